"""The ranks of a run as meshes of named axes: where data differ, where weights are cut, where experts are."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from longspan.plan import Topology


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
    tokens: dist.ProcessGroup | None
    """The ranks that hold tokens of one micro-batch: tp x cp."""
    ends: dist.ProcessGroup | None
    """The first and the last stage's rank of this pipeline, if this rank is one of them and there are two."""

    @classmethod
    def of(cls, topology: Topology, device_type: str) -> "Meshes":
        """Make the groups of the initialised world. Collective over it."""
        assert dist.get_world_size() == topology.world, "the degrees multiply to the world"

        def mesh(ranks: np.ndarray, *names: str) -> DeviceMesh:
            # DeviceMesh reads the strides of what it is given, and takes those of a transposed array for its axes'.
            return DeviceMesh(device_type, np.ascontiguousarray(ranks), mesh_dim_names=names)

        t = topology
        weights = t.grid(("pp", "replica", "shard_dp", "cp", "tp")).reshape(t.pp, t.replicas, -1, t.tp)
        # Two axes made one: process groups number their ranks ascending, so this axis has to, whatever the order.
        weights = np.sort(weights, axis=2)
        tokens = _own(t.groups("tp-cp"))
        ends = _own([(group[0], group[-1]) for group in t.groups("pp")]) if t.pp > 1 else None
        return cls(
            t,
            mesh(t.grid(("pp", "dp", "cp", "tp")), "pp", "dp", "cp", "tp"),
            mesh(weights, "pp", "replica", "shard", "tp"),
            mesh(t.grid(("pp", "edp", "ep")), "pp", "edp", "ep"),
            tokens,
            ends,
        )


def _own(groups: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
    """Make disjoint groups, and return the one that this rank is in."""
    own, _ = dist.new_subgroups_by_enumeration([list(group) for group in groups])
    return own if isinstance(own, dist.ProcessGroup) else None
