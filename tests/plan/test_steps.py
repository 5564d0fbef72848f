"""The records of one rank's share."""

import pytest

from longspan.plan import Layout, Mask, RankPlan, Shape, Stage, Step, Tile, Transfer, plan_attention


@pytest.mark.parametrize(
    ("tile", "shape", "has_lo", "has_hi"),
    [
        (Tile(4, 8, 0, 4, -3, 11), Shape(4, 4, -7, 7), False, False),  # full, bounds never met
        (Tile(0, 4, 0, 4, 0, 3), Shape(4, 4, 0, 3), True, False),  # causal
        (Tile(4, 8, 4, 8, 0, 3), Shape(4, 4, 0, 3), True, False),  # causal, elsewhere
        (Tile(6, 8, 0, 4, 3, 6), Shape(2, 4, -3, 0), False, True),  # upper corner
        (Tile(2, 6, 0, 4, 1, 3), Shape(4, 4, -1, 1), True, True),  # band
        (Tile(5, 6, 2, 3, 3, 3), Shape(1, 1, 0, 0), False, False),
    ],
)
def test_shape_is_the_tile_from_its_own_corner(tile, shape, has_lo, has_hi):
    assert tile.shape == shape
    assert (shape.has_lo, shape.has_hi) == (has_lo, has_hi)


TWO, THREE = Transfer(1, ((0, 1), (4, 5))), Transfer(2, ((0, 3),))


def test_a_rank_counts_what_its_transfers_carry():
    stages = (
        Stage((Step(0, 5, ()),), sends=(TWO, THREE)),
        Stage((Step(2, 3, (), recv=THREE, home_send=THREE), Step(1, 2, (), recv=TWO)), home_recvs=(TWO,)),
        Stage((Step(3, 3, (), recv=THREE, grad_recv=THREE, grad_send=THREE, home_send=TWO),), sends=(TWO,)),
    )
    share = RankPlan(rank=0, slots=6, tokens=5, rows=6, ranks=(0, 1, 2, 3), stages=stages)
    assert (TWO.rows, THREE.rows) == (2, 3)
    assert [step.source for step in share.steps] == [0, 2, 1, 3]
    assert (share.rows_sent, share.rows_received, share.grad_rows_sent) == (2 + 3 + 2, 3 + 2 + 3, 3 + 3 + 2)
    assert share.live_rows == 5


def test_rows_of_other_members_count_as_received_where_heads_are_exchanged():
    heads = plan_attention(Layout.contiguous(9, 2), Mask.full(9), "ulysses", (4, 2)).rank_plan(1).heads
    share = RankPlan(1, 6, 4, 9, (0,), (Stage((Step(0, 9, ()),)),), heads=heads)
    assert (share.rows_received, share.rows_sent, share.live_rows) == (5, 0, 9)


@pytest.mark.parametrize(
    ("stage", "idle"),
    [
        (Stage((Step(2, 0, ()),)), True),
        (Stage(()), True),
        (Stage((Step(2, 0, ()),), sends=(TWO,)), False),
        (Stage((), home_recvs=(TWO,)), False),
        (Stage((Step(2, 3, (), recv=THREE),)), False),
        (Stage((Step(2, 3, (Tile(0, 1, 0, 3, -2, 0),)),)), False),
    ],
)
def test_a_stage_is_idle_if_nothing_happens_in_it(stage, idle):
    assert stage.idle is idle
