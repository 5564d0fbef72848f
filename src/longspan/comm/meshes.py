"""The ranks of a run as meshes of named axes: where data differ, where weights are cut, where experts are."""

from dataclasses import dataclass

import numpy as np
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from longspan.comm.groups import set_timeout, timeout_of
from longspan.topology import Topology


@dataclass(frozen=True, eq=False)
class Meshes:
    """One world, laid out three times.

    data     pp, dp, cp, tp              which rows (dp), which of their tokens (cp), which layers (pp)
    weights  pp, replica, shard, tp      FSDP2 cuts over shard = inner dp x cp; HSDP keeps `replica` copies of that
    experts  pp, edp, ep                 the ranks of the MLP, folded: experts over ep, each cut over edp
    """

    topology: Topology
    data: DeviceMesh
    weights: DeviceMesh
    experts: DeviceMesh
    tokens: dist.ProcessGroup
    """The ranks that hold tokens of one micro-batch: tp x cp."""
    ends: dist.ProcessGroup | None
    """The first and the last stage's rank of this pipeline, if this rank is one of them and there are two."""

    @classmethod
    def of(cls, topology: Topology, device_type: str) -> "Meshes":
        """Make the groups of the initialised world, all with its timeout. Collective over it."""
        assert dist.get_world_size() == topology.world, "the degrees multiply to the world"
        t, groups = topology, _make_groups(topology)

        def mesh(ranks: np.ndarray, *names: str) -> DeviceMesh:
            # DeviceMesh reads the strides of what it is given, and takes those of a transposed array for its axes'.
            ranks = np.ascontiguousarray(ranks)
            return DeviceMesh.from_group([groups[name] for name in names], device_type, ranks, mesh_dim_names=names)

        weights = t.grid(("pp", "replica", "shard_dp", "cp", "tp")).reshape(t.pp, t.dp_replicate, -1, t.tp)
        # Two axes made one: process groups number their ranks ascending, so this axis has to, whatever the order.
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
"""Disjoint groups that hold every rank of the world."""

_OF_WEIGHTS = ("replica", "shard", "edp")
"""The axes over which FSDP2 and DDP gather weights and reduce gradients, beside what the model sends."""


def _make_groups(topology: Topology) -> dict[str, dist.ProcessGroup]:
    """This rank's group of each axis, by name. Collective over the world.

    Axes with the same ranks share one group, except that weights never share one with the model: NCCL runs what a group
    carries in the order posted, so a hop would wait behind a gradient. All axes of one rank share one.
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
    """The first and the last rank of each pipeline, and those between them.

    The latter need no group. But torch makes the name of a next group from the number of groups a rank is in, so that all ranks
    have to be in as many.
    """
    stages = topology.groups("pp")
    ends = [ranks if len(ranks) < 3 else (ranks[0], ranks[-1]) for ranks in stages]
    return (*ends, *(ranks[1:-1] for ranks in stages if len(ranks) > 2))


def _split_world(partition: _Partition, name: str) -> dist.ProcessGroup:
    """Make the groups of a partition by one call on each rank, and return this rank's. Collective over the world."""
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
