"""shard, unshard, gather: nothing lost, nothing moved to the wrong place, gradients likewise."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longspan.comm.sharding import gather, shard, unshard
from longspan.errors import SpecError
from longspan.plan import Layout
from tests.examples import examples
from tests.oracle import raised
from tests.plan.strategies import layouts
from tests.ranks import run_ranks


@st.composite
def sharded(draw):
    """A layout, a tensor's shape with the sequence in one dim, and that dim, counted from either end."""
    layout = draw(layouts(draw(st.integers(1, 60)), with_slots=True))
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    shape[dim] = layout.seq_len
    return layout, shape, dim


@examples(200)
@given(sharded())
def test_unshard_undoes_shard_and_so_do_their_gradients(case):
    layout, shape, dim = case
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    parts = [shard(x, layout, rank, dim, fill=float("nan")) for rank in range(layout.ranks)]
    for rank, part in enumerate(parts):
        live = int(layout.counts[rank])
        assert part.shape[dim] == layout.num_slots(rank)
        assert part.narrow(dim, live, part.shape[dim] - live).isnan().all()
        assert torch.equal(
            part.narrow(dim, 0, live), x.index_select(dim, torch.from_numpy(layout.positions(rank)[:live]))
        )
    whole = unshard(parts, layout, dim)
    assert torch.equal(whole, x)
    weight = torch.randn(shape, dtype=torch.float64)
    (whole * weight).sum().backward()
    assert torch.equal(x.grad, weight)


def test_dead_slots_have_no_gradient():
    layout = Layout.contiguous(3, 2, slots=4)
    x = torch.ones(3, requires_grad=True)
    for rank in range(2):
        shard(x, layout, rank, 0, fill=7.0).sum().backward()
    assert x.grad.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("dtype", "fill"), [(torch.int64, -100), (torch.int32, -1), (torch.bool, 0), (torch.bfloat16, 0.5)]
)
def test_fill_in_the_tensors_own_type(dtype, fill):
    layout = Layout.zigzag(6, 4, slots=3)
    local = shard(torch.ones(1, 6, dtype=dtype), layout, 0, 1, fill=fill)
    assert local.dtype == dtype
    assert local.tolist() == [[1, *[fill] * 2]]


def test_positions_of_the_shard():
    layout = Layout.zigzag(8, 2)
    assert shard(torch.arange(8), layout, 0, 0).tolist() == [0, 1, 6, 7]
    assert shard(torch.arange(8), layout, 1, 0).tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize("dim", [2, -1])
def test_positions_of_several_axes(dim):
    positions = torch.arange(8).expand(3, 2, 8) + 100 * torch.arange(3).view(3, 1, 1)
    local = shard(positions, Layout.zigzag(8, 2), 0, dim)
    assert local.shape == (3, 2, 4)
    assert local[1, 1].tolist() == [100, 101, 106, 107]


def test_a_table_of_the_global_row_reaches_the_last_position():
    table = torch.arange(16.0)[:, None]
    for layout in (Layout.zigzag(16, 2), Layout.contiguous(16, 2), Layout.striped(16, 2)):
        assert max(shard(table, layout, rank, 0).max().item() for rank in range(2)) == 15


LAYOUT = Layout.zigzag(8, 2)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: shard(torch.zeros(2, 4), LAYOUT, 0, 1),
            "dim 1 of a tensor of shape (2, 4) has 4 rows; the sequence has 8 tokens\n\n"
            "hint: give the global tensor; this tensor may be sharded already, or have its sequence in another dim",
        ),
        (
            lambda: shard(torch.zeros(32, 8), LAYOUT, 0, -2),
            "dim -2 of a tensor of shape (32, 8) has 32 rows; the sequence has 8 tokens\n\n"
            "hint: give the global tensor; this tensor may be sharded already, or have its sequence in another dim",
        ),
        (lambda: shard(torch.zeros(8), LAYOUT, 0, 1), "dim 1 does not exist in a tensor of shape (8,)"),
        (lambda: shard(torch.zeros(8), LAYOUT, 2, 0), "rank 2 is not one of the 2 ranks 0..1"),
        (lambda: unshard([torch.zeros(4)], LAYOUT, 0), "1 parts were given for a layout of 2 ranks"),
        (
            lambda: gather(torch.zeros(1, 8), LAYOUT, 0, 1, None),
            "dim 1 of a tensor (1, 8) is not the 4 slots of rank 0\n\n"
            "hint: give a tensor that has this rank's slots, as shard returns it",
        ),
    ],
)
def test_refusals(call, text):
    with pytest.raises(SpecError) as error:
        call()
    assert str(error.value) == text


def test_sharding_twice_is_refused():
    once = shard(torch.arange(8), LAYOUT, 0, 0)
    assert raised(shard, once, LAYOUT, 0, 0)[0] == "SpecError"


def _gather(group, rank, layouts):
    for layout in layouts:
        for dim in (0, 1, -1):
            shape = [2, 3, 2]
            shape[dim] = layout.seq_len
            x = torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64).view(shape)
            local = shard(x, layout, rank, dim, fill=float("nan")).requires_grad_()
            whole = gather(local, layout, rank, dim, group)
            assert torch.equal(whole, x)
            # Every rank computes the same loss of the whole; its gradient by the own slots is their slice, once.
            whole.backward(x + 1)
            assert torch.equal(local.grad, shard(x + 1, layout, rank, dim))
    return True


def test_gather_gives_all_ranks_the_whole_and_each_its_own_gradient():
    some = [
        Layout.zigzag(13, 4), Layout.contiguous(2, 4), Layout.striped(9, 4, slots=5), Layout.zigzag(16, 4, slots=4),
        Layout.contiguous(1, 4),
    ]  # fmt: skip
    assert run_ranks(4, _gather, some) == [True] * 4


def test_gather_of_one_rank():
    assert _gather(None, 0, [Layout.zigzag(5, 1), Layout.striped(5, 1, slots=7)])
