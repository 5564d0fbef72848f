"""The device meshes of a run: for data, weights and experts."""

from dataclasses import dataclass

import numpy as np
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from longspan.comm.groups import set_timeout, timeout_of
from longspan.topology import Topology


@dataclass(frozen=True, eq=False)
class Meshes:
    """Three meshes over the ranks of one world.

    data     pp, dp, cp, tp              rows differ over dp, tokens of a row over cp, layers over pp
    weights  pp, replica, shard, tp      FSDP2 shards over `shard` = inner dp x cp; HSDP keeps `replica` replicas
    experts  pp, edp, ep                 the same ranks, folded for the MLP: experts over ep, each sharded over edp
    """

    topology: Topology
    data: DeviceMesh
    weights: DeviceMesh
    experts: DeviceMesh
    tokens: dist.ProcessGroup
    """Ranks that hold tokens of one micro-batch: tp x cp."""
    ends: dist.ProcessGroup | None
    """Group of the first and last rank of this pipeline. None if this rank is neither, or if pp is 1."""

    @classmethod
    def of(cls, topology: Topology, device_type: str) -> "Meshes":
        """Create the groups and meshes, all with the world's timeout. Collective over the initialised world."""
        assert dist.get_world_size() == topology.world, "the degrees multiply to the world"
        t, groups = topology, _make_groups(topology)

        def mesh(ranks: np.ndarray, *names: str) -> DeviceMesh:
            # DeviceMesh derives its axes from strides, so a transposed array must be copied.
            ranks = np.ascontiguousarray(ranks)
            return DeviceMesh.from_group([groups[name] for name in names], device_type, ranks, mesh_dim_names=names)

        weights = t.grid(("pp", "replica", "shard_dp", "cp", "tp")).reshape(t.pp, t.dp_replicate, -1, t.tp)
        # Process groups number their ranks in ascending order, so the flattened axis must be sorted too.
        weights = np.sort(weights, axis=2)
        return cls(
            t,
            mesh(t.grid(("pp", "dp", "cp", "tp")), "pp", "dp", "cp", "tp"),
            mesh(weights, "pp", "replica", "shard", "tp"),
            mesh(t.grid(("pp", "edp", "ep")), "pp", "edp", "ep"),
            groups["tp-cp"],
            groups["ends"] if t.pp > 1 and t.coordinates(dist.get_rank())["pp"] in (0, t.pp - 1) else None,
        )


_Partition = tuple[tuple[int, ...], ...]
"""Disjoint groups of ranks that cover the world."""

_OF_WEIGHTS = ("replica", "shard", "edp")
"""Axes over which FSDP2 and DDP gather weights and reduce gradients."""


def _make_groups(topology: Topology) -> dict[str, dist.ProcessGroup]:
    """Create this rank's group of each axis, by name. Collective over the world.

    Axes with the same ranks share one group. But axes of weights share no group with axes of the model, except groups of
    one rank: NCCL runs the operations of a group in posting order, so a hop would wait behind a gradient.
    """
    world = dist.group.WORLD
    assert world is not None, "the world is initialised"
    made = {(False, topology.groups("tp-cp-dp-pp")): world}
    groups = {}
    for axis in ("pp", "dp", "cp", "tp", "ep", "tp-cp", "ends", *_OF_WEIGHTS):
        partition = _ends(topology) if axis == "ends" else topology.groups(axis)
        key = (axis in _OF_WEIGHTS and len(partition) < topology.world, partition)
        if key not in made:
            made[key] = _split_world(partition, axis)
        groups[axis] = made[key]
    return groups


def _ends(topology: Topology) -> _Partition:
    """Return the partition into first and last ranks of each pipeline, and the ranks between them.

    The ranks between need no group. But torch derives the name of a new group from the number of groups that a rank is
    in, and this number must be equal on all ranks.
    """
    stages = topology.groups("pp")
    ends = [ranks if len(ranks) < 3 else (ranks[0], ranks[-1]) for ranks in stages]
    return (*ends, *(ranks[1:-1] for ranks in stages if len(ranks) > 2))


def _split_world(partition: _Partition, name: str) -> dist.ProcessGroup:
    """Create the groups of a partition and return this rank's. Collective over the world."""
    world, rank = dist.group.WORLD, dist.get_rank()
    assert world is not None, "the world is initialised"
    timeout = timeout_of(world)
    if world.bound_device_id is None:
        own = next(ranks for ranks in partition if rank in ranks)
        group = dist.new_group(list(own), timeout, use_local_synchronization=True, group_desc=name)
    else:
        group = dist.split_group(split_ranks=[list(ranks) for ranks in partition], timeout=timeout, group_desc=name)
    assert isinstance(group, dist.ProcessGroup), "a partition holds every rank"
    set_timeout(group, timeout)
    return group
