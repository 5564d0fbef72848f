"""Every axis of every mesh is the topology's own group, in whatever order ranks are numbered."""

from typing import Any

import pytest
import torch.distributed as dist

from longspan.comm.meshes import Meshes
from longspan.plan import Topology
from tests.ranks import run_ranks

AXES = {
    "data": {"pp": "pp", "dp": "dp", "cp": "cp", "tp": "tp"},
    "weights": {"pp": "pp", "replica": "replica", "shard": "shard", "tp": "tp"},
    "experts": {"pp": "pp", "edp": "edp", "ep": "ep"},
}
"""The topology's name for each axis of each mesh."""


def groups_on_ranks(group: Any, rank: int, topology: Topology) -> dict[str, tuple[int, ...]]:
    meshes = Meshes.of(topology, "cpu")
    found = {
        f"{name} {axis}": dist.get_process_group_ranks(getattr(meshes, name)[axis].get_group())
        for name, axes in AXES.items()
        for axis in axes
    }
    found["tokens"] = dist.get_process_group_ranks(meshes.tokens)
    if meshes.ends is not None:
        found["ends"] = dist.get_process_group_ranks(meshes.ends)
    # Where a rank stands along an axis is its number in the group, which shards go by.
    for name, axes in AXES.items():
        mesh = getattr(meshes, name)
        assert [mesh[axis].get_local_rank() for axis in axes] == [
            dist.get_rank(mesh[axis].get_group()) for axis in axes
        ]
    return {name: tuple(ranks) for name, ranks in found.items()}


@pytest.mark.parametrize(
    "topology",
    [
        Topology(dp=2, tp=2, cp=2),
        Topology(dp=2, tp=2, pp=2),
        Topology(dp=2, cp=2, pp=2, order="pp-dp-ep-cp-tp"),
        Topology(dp=2, cp=2, tp=2, order="dp-cp-tp-ep-pp"),
        Topology(dp=4, cp=2, replicas=2),
        Topology(dp=4, cp=2, replicas=2, order="cp-dp-ep-tp-pp"),
        Topology(dp=1, cp=2, pp=4),
        Topology(dp=2, cp=2, pp=2, ep=4),
        Topology(dp=2, cp=2, tp=2, ep=2),
    ],
    ids=str,
)
def test_meshes_are_the_topology(topology: Topology) -> None:
    for rank, found in enumerate(run_ranks(8, groups_on_ranks, topology)):

        def own(axes: str, rank: int = rank) -> tuple[int, ...]:
            return next(group for group in topology.groups(axes) if rank in group)

        want = {f"{name} {axis}": own(known) for name, axes in AXES.items() for axis, known in axes.items()}
        want["tokens"] = own("tp-cp")
        stages = own("pp")
        if len(stages) > 1 and rank in (stages[0], stages[-1]):
            want["ends"] = (stages[0], stages[-1])
        assert found == want, f"rank {rank}"
