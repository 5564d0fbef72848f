"""Groups from a process group, a mesh axis, or nothing."""

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from longspan.comm.groups import as_group, rank_and_size, ranks_per_node
from tests.oracle import raised
from tests.ranks import run_ranks


def test_nothing_is_a_group_of_one():
    assert as_group(None) is None
    assert rank_and_size(None) == (0, 1)


def test_other_things_are_refused():
    assert raised(as_group, "cp") == ("SpecError", "str is neither a process group nor a DeviceMesh")


def _places(group, rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "cp"))
    nameless = init_device_mesh("cpu", (2, 2))
    odd = dist.new_group([1, 3])
    return (
        rank_and_size(as_group(group)),
        rank_and_size(as_group(mesh["cp"])),
        rank_and_size(as_group(mesh["tp"])),
        raised(as_group, mesh),
        raised(as_group, nameless),
        raised(rank_and_size, odd) if rank % 2 == 0 else rank_and_size(odd),
    )


def test_rank_and_size_in_the_given_axis():
    refusal = (
        "SpecError",
        "a mesh of 2 axes {} was given where one axis is needed\n\n"
        'hint: give only the context-parallel axis, such as mesh["cp"]',
    )
    for rank, places in enumerate(run_ranks(4, _places)):
        world, cp, tp, named, nameless, odd = places
        assert (world, cp, tp) == ((rank, 4), (rank % 2, 2), (rank // 2, 2))
        assert named == (refusal[0], refusal[1].format("('tp', 'cp')"))
        assert nameless == (refusal[0], refusal[1].format("without names"))
        outside = ("SpecError", f"this process (global rank {rank}) is not part of the given group")
        assert odd == (outside if rank % 2 == 0 else (rank // 2, 2))


@pytest.mark.parametrize(
    ("ranks", "found"),
    [
        ([0, 1, 2, 3], 2),
        ([0, 2, 4], 1),  # a rank of each node
        ([2, 3], 2),  # one node
        ([0, 1, 2], None),  # two of one node, one of the next
        ([0, 2, 1, 3], None),  # nodes 0 1 0 1: one neighbour each, and each node twice
        ([0, 1, 2, 3, 4], None),
    ],
)
def test_neighbours_that_share_a_node(monkeypatch: pytest.MonkeyPatch, ranks: list[int], found: int | None) -> None:
    """Nodes of two ranks: 0 and 1, 2 and 3, 4 and 5."""
    group = object()
    monkeypatch.setattr(dist, "get_process_group_ranks", {group: ranks}.__getitem__)
    for name, value in {"RANK": "0", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert ranks_per_node(group) == found
    assert ranks_per_node(None) is None
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert ranks_per_node(group) is None
