"""Rows that go straight to those that want them, by brute force: each exactly once, nothing else, each gradient back."""

import numpy as np
import pytest
from hypothesis import given

from longspan.names import LAYOUTS
from longspan.plan import Layout, Mask, Transfer, plan_attention
from tests.examples import examples

from .brute import carry_out, check_transfers, owners
from .strategies import layout_and_mask

thorough = examples(200)


def wanted(layout, dense, rank) -> list[int]:
    """The keys that queries of `rank` see and other ranks hold."""
    owner = owners(layout)
    return np.flatnonzero(dense[owner == rank].any(axis=0) & (owner != rank)).tolist()


@thorough
@given(layout_and_mask(with_slots=True))
def test_an_exchange_brings_the_rows_that_queries_see_each_once_and_no_other(case):
    layout, mask = case
    plan, dense, P = plan_attention(layout, mask, "exchange"), mask.dense(), layout.ranks
    run = carry_out(plan)
    assert np.array_equal(run.pairs, dense)
    assert np.array_equal(run.home, dense)
    assert run.pairs_by_rank == [plan.area(rank) for rank in range(P)]
    assert [sorted(keys) for keys in run.arrived] == [wanted(layout, dense, rank) for rank in range(P)]
    check_transfers(plan)
    for rank in range(P):
        share = plan.rank_plan(rank)
        assert plan.rows_received(rank) == len(run.arrived[rank])
        # Every row that came has a gradient, which goes straight back.
        assert share.grad_rows_sent == share.rows_received
        assert share.means == "messages"
        assert all(len(stage.steps) <= 4 for stage in share.stages)
    assert sum(plan.rank_plan(rank).rows_sent for rank in range(P)) == sum(map(len, run.arrived))


@thorough
@given(layout_and_mask(with_slots=True))
def test_an_allgather_brings_every_row_once_or_none_at_all(case):
    layout, mask = case
    plan, dense, P = plan_attention(layout, mask, "allgather"), mask.dense(), layout.ranks
    run = carry_out(plan)
    assert np.array_equal(run.pairs, dense)
    assert np.array_equal(run.home, dense)
    check_transfers(plan)
    owner = owners(layout)
    needed = any(wanted(layout, dense, rank) for rank in range(P))
    for rank in range(P):
        right = np.flatnonzero(owner != rank).tolist() if needed else []
        assert sorted(run.arrived[rank]) == right
        assert plan.rows_received(rank) == len(right)
        assert len(plan.rank_plan(rank).stages) == (2 if needed and P > 1 else 1)


@pytest.mark.parametrize("P", [1, 2, 3, 5, 8, 11])
def test_the_nearest_source_comes_alone_and_later_ones_up_to_four_together(P):
    plan = plan_attention(Layout.contiguous(2 * P, P), Mask.full(2 * P), "exchange")
    distances = [[0], [1], [2, 3], [4, 5, 6, 7], [8, 9, 10]]
    for rank in range(P):
        found = [[(rank - step.source) % P for step in stage.steps] for stage in plan.rank_plan(rank).stages]
        assert found == [[d for d in stage if d < P] for stage in distances if stage[0] < P]


def test_stages_of_an_exchange_by_hand():
    """Two documents over three ranks: rank 1 lacks a row of rank 0, rank 2 lacks two of rank 1, and nobody else anything."""
    plan = plan_attention(Layout.contiguous(12, 3), Mask.documents([3, 3, 6]), "exchange")
    first, second, third = (plan.rank_plan(rank).stages for rank in range(3))
    one, two = ((3, 4),), ((2, 4),)
    assert [stage.sends for stage in first] == [(Transfer(1, one),), ()]
    assert [stage.home_recvs for stage in first] == [(), (Transfer(1, one),)]
    assert [[step.source for step in stage.steps] for stage in first] == [[0], []]
    assert [stage.sends for stage in second] == [(Transfer(2, two),), ()]
    assert [[step.source for step in stage.steps] for stage in second] == [[1], [0]]
    assert second[1].steps[0].recv == second[1].steps[0].home_send == Transfer(0, ((0, 1),))
    assert [stage.sends for stage in third] == [(), ()]
    assert third[1].steps[0].recv == Transfer(1, ((0, 2),))
    assert [plan.rows_received(rank) for rank in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("route", ["ring", "rotate", "exchange"])
def test_a_window_brings_less_than_the_window(route):
    plan = plan_attention(Layout.contiguous(65536, 8), Mask.causal(65536, window=1024), route)
    assert [plan.rows_received(rank) for rank in range(8)] == [0] + [1023] * 7


@pytest.mark.parametrize("route", ["ring", "rotate", "exchange", "allgather"])
def test_documents_that_stay_whole_send_nothing_and_leave_one_stage(route):
    plan = plan_attention(Layout.contiguous(64, 4), Mask.documents([5, 11, 16, 8, 8, 16]), route, heads=(4, 2))
    for rank in range(4):
        share = plan.rank_plan(rank)
        (only,) = share.stages
        assert (only.sends, only.home_recvs, [step.recv for step in only.steps]) == ((), (), [None])
        assert plan.rows_received(rank) == 0
        assert plan.bytes(rank, "forward", 64, 2) == plan.bytes(rank, "backward", 64, 2) == 0


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("P", [2, 3, 8])
def test_an_exchange_never_moves_more_than_a_ring_and_a_ring_never_more_than_a_gather(name, P):
    S = 100
    for mask in (Mask.causal(S), Mask.full(S), Mask.documents([30, 50, 20]), Mask.causal(S, 9), Mask.prefix(S, 33)):
        layout = Layout.named(name, S, P, masks=[mask])
        moved = {
            route: sum(plan_attention(layout, mask, route).rows_received(rank) for rank in range(P))
            for route in ("exchange", "ring", "allgather")
        }
        assert moved["exchange"] <= moved["ring"] <= moved["allgather"], (mask.array.tolist(), moved)
