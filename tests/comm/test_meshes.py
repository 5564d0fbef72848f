"""Every axis of every mesh is the topology's own group, in whatever order ranks are numbered, with the world's timeout."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from longspan.comm.groups import as_group
from longspan.comm.meshes import Meshes
from longspan.topology import Topology
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
        Topology(dp=4, cp=2, dp_replicate=2),
        Topology(dp=4, cp=2, dp_replicate=2, order="cp-dp-ep-tp-pp"),
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


def groups_of(meshes: Meshes) -> dict[str, dist.ProcessGroup]:
    """The groups of this rank, by the name of their axis where it first has one."""
    named: dict[str, dist.ProcessGroup] = {"world": dist.group.WORLD, "tokens": meshes.tokens}
    for name, axes in AXES.items():
        named |= {f"{name} {axis}": getattr(meshes, name)[axis].get_group() for axis in axes}
    named["dp x cp"] = as_group(meshes.data["dp", "cp"], levels=meshes.data["dp", "cp"].shape)
    return named if meshes.ends is None else named | {"ends": meshes.ends}


def timeouts_on_ranks(group: Any, rank: int, topology: Topology) -> dict[str, float]:
    """Seconds that the backend of each group waits."""
    backends = {name: g._get_backend(torch.device("cpu")) for name, g in groups_of(Meshes.of(topology, "cpu")).items()}
    return {name: backend.options._timeout.total_seconds() for name, backend in backends.items()}


@pytest.mark.parametrize(
    "topology", [Topology(dp=2, tp=2, cp=2, ep=2, dp_replicate=2), Topology(dp=1, cp=2, pp=4)], ids=str
)
def test_every_group_has_the_timeout_of_the_world(topology: Topology) -> None:
    """`run_ranks` gives the world 60 s; torch's default is 1,800."""
    for found in run_ranks(8, timeouts_on_ranks, topology):
        assert found == dict.fromkeys(found, 60.0)


def calls_on_ranks(group: Any, rank: int, topology: Topology) -> tuple[int, dict[str, str]]:
    """How many groups this rank makes, and the groups that are one, by name."""
    calls, new_group = [], dist.new_group
    dist.new_group = lambda *given, **named: calls.append(given) or new_group(*given, **named)
    try:
        meshes = Meshes.of(topology, "cpu")
    finally:
        dist.new_group = new_group
    first: dict[str, str] = {}
    mine: dict[str, dist.ProcessGroup] = {"world": group}
    for name, axes in AXES.items():
        mine |= {axis: getattr(meshes, name)[axis].get_group() for axis in axes}
    mine |= {"tokens": meshes.tokens} | ({} if meshes.ends is None else {"ends": meshes.ends})
    same = {name: first.setdefault(g.group_name, name) for name, g in mine.items()}
    return len(calls), {name: other for name, other in same.items() if name != other}


@pytest.mark.parametrize(
    ("topology", "calls", "same"),
    [
        # Made: single ranks (pp and all other axes of degree 1), and shard, which gathers weights beside cp's hops.
        (
            Topology(dp=1, cp=4),
            2,
            {"cp": "world", "tokens": "world", "edp": "shard", "dp": "pp", "tp": "pp", "replica": "pp", "ep": "pp"},
        ),
        # Made: pp, single ranks, cp, shard.
        (
            Topology(dp=1, cp=2, pp=2),
            4,
            {"ends": "pp", "tokens": "cp", "edp": "shard", "tp": "dp", "replica": "dp", "ep": "dp"},
        ),
        (
            Topology(dp=1),
            0,
            dict.fromkeys(("tokens", "pp", "dp", "cp", "tp", "replica", "shard", "edp", "ep"), "world"),
        ),
    ],
    ids=str,
)
def test_axes_of_the_same_ranks_share_a_group_made_by_one_call(
    topology: Topology, calls: int, same: dict[str, str]
) -> None:
    for found, shared in run_ranks(topology.world, calls_on_ranks, topology):
        assert (found, shared) == (calls, same)


def split_on_ranks(group: Any, rank: int, topology: Topology) -> tuple[list[tuple[Any, ...]], set[float]]:
    """What `split_group` is given where the world is bound to a device, and the timeouts that its groups end with.

    A group that it makes has torch's default timeout, as gloo's half of a split has.
    """
    given: list[tuple[Any, ...]] = []

    def split_group(split_ranks: list[list[int]], timeout: timedelta, group_desc: str) -> dist.ProcessGroup:
        given.append((group_desc, split_ranks, timeout.total_seconds()))
        group.bound_device_id = None
        own, _ = dist.new_subgroups_by_enumeration(split_ranks)
        group.bound_device_id = torch.device("cuda", 0)
        return own

    real, dist.split_group = dist.split_group, split_group
    group.bound_device_id = torch.device("cuda", 0)
    try:
        meshes = Meshes.of(topology, "cpu")
    finally:
        dist.split_group, group.bound_device_id = real, None
    backends = [g._get_backend(torch.device("cpu")) for g in groups_of(meshes).values()]
    return given, {backend.options._timeout.total_seconds() for backend in backends}


def test_a_world_bound_to_devices_is_split_once_for_each_axis() -> None:
    """Two nodes of pipelines of 4 stages: cp x pp."""
    pipelines = [[0, 2, 4, 6], [1, 3, 5, 7]]
    neighbours = [[0, 1], [2, 3], [4, 5], [6, 7]]
    for given, timeouts in run_ranks(8, split_on_ranks, Topology(dp=1, cp=2, pp=4)):
        assert given == [
            ("pp", pipelines, 60.0),
            ("dp", [[rank] for rank in range(8)], 60.0),
            ("cp", neighbours, 60.0),
            ("ends", [[0, 6], [1, 7], [2, 4], [3, 5]], 60.0),
            ("shard", neighbours, 60.0),
        ]
        assert timeouts == {60.0}
