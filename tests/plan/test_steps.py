"""The records of one rank's share."""

import pytest

from longspan.plan import RankPlan, Shape, Step, Tile, Transfer


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


def test_a_rank_counts_what_its_transfers_carry():
    two, three = Transfer(1, ((0, 1), (4, 5))), Transfer(2, ((0, 3),))
    assert (two.rows, three.rows) == (2, 3)
    steps = (
        Step(0, 5, (), send=two),
        Step(2, 3, (), recv=three, send=two, grad_recv=three, grad_send=two, home_send=three, home_recv=two),
    )
    share = RankPlan(0, 5, 5, steps)
    assert (share.rows_sent, share.rows_received, share.grad_rows_sent) == (4, 3, 5)
