"""Keys in sight, summed up to any token, against the dense masks; pieces and cuts where the number falls."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.plan import Mask
from longspan.plan.density import Density
from tests.examples import examples

from .strategies import weighted_masks

thorough = examples(300)


def in_sight(masks) -> np.ndarray:
    """Keys that each query sees, over all masks."""
    return sum(weight * mask.dense().sum(axis=1) for mask, weight in masks)


@thorough
@given(weighted_masks(), st.data())
def test_pairs_are_those_of_the_dense_masks(masks, data):
    density, rows = Density(masks), in_sight(masks)
    S = density.seq_len
    before = np.concatenate(([0], np.cumsum(rows)))
    assert [density.before(token) for token in range(S + 1)] == before.tolist()
    assert density.total == sum(weight * mask.area for mask, weight in masks)
    edges = sorted(data.draw(st.lists(st.integers(0, S), max_size=6)))
    runs = list(pairwise(edges))
    assert [density.between(*run) for run in runs] == [before[stop] - before[start] for start, stop in runs]
    assert density.within(runs[::2]) == sum(rows[start:stop].sum() for start, stop in runs[::2])


@thorough
@given(weighted_masks())
def test_pieces_end_where_no_band_reaches_across(masks):
    density = Density(masks)
    S, pieces = density.seq_len, density.pieces.tolist()
    bands = [(min(q0, k0), max(q1, k1)) for mask, _ in masks for q0, q1, k0, k1, *_ in mask.array.tolist()]
    joined = [any(start < edge < stop for start, stop in bands) for edge in range(1, S)]
    alone = [not any(start <= token < stop for start, stop in bands) for token in range(S)]
    # Tokens that are in no band at all, side by side, are one piece.
    kept = [edge for edge in range(1, S) if not (joined[edge - 1] or (alone[edge - 1] and alone[edge]))]
    assert pieces == [[start, stop] for start, stop in pairwise([0, *kept, S])]


@thorough
@given(weighted_masks())
def test_rising_runs_are_cut_where_keys_in_sight_fall_by_a_jump(masks):
    density, rows = Density(masks), in_sight(masks)
    pieces = [tuple(piece) for piece in density.pieces.tolist()]
    parts = density.rising(pieces)
    assert sorted({start for start, _ in pieces} - {start for start, _ in parts}) == []
    assert [stop for _, stop in parts[:-1]] == [start for start, _ in parts[1:]]
    assert (parts[0][0], parts[-1][1]) == (0, density.seq_len)
    starts = {start for start, _ in pieces}
    for start, _ in parts:
        assert start in starts or rows[start] < rows[start - 1], "cut where nothing falls"


@pytest.mark.parametrize(
    ("mask", "before", "pieces", "rising"),
    [
        (Mask.causal(5), [0, 1, 3, 6, 10, 15], [(0, 5)], [(0, 5)]),
        (Mask.causal(5, window=3), [0, 1, 3, 6, 9, 12], [(0, 5)], [(0, 5)]),
        (Mask.full(3), [0, 3, 6, 9], [(0, 3)], [(0, 3)]),
        (Mask.documents([2, 0, 3]), [0, 1, 3, 4, 6, 9], [(0, 2), (2, 5)], [(0, 2), (2, 5)]),
        # Answers to one prompt are one piece, and each of them rises.
        (Mask.shared_prefix(2, [2, 2]), [0, 1, 3, 6, 10, 13, 17], [(0, 6)], [(0, 4), (4, 6)]),
        # The ends of a window on both sides fall slowly, which is no jump.
        (Mask.documents([5], causal=False, window=2), [0, 2, 5, 8, 11, 13], [(0, 5)], [(0, 5)]),
        # Nobody sees or is seen in 1..2.
        (Mask.bands(5, [(0, 1, 0, 1, None, None), (3, 5, 3, 5, 0, None)]), [0, 1, 1, 1, 2, 4], [(0, 1), (1, 3), (3, 5)], None),
        (Mask.bands(3, []), [0, 0, 0, 0], [(0, 3)], [(0, 3)]),
    ],
)  # fmt: skip
def test_by_hand(mask, before, pieces, rising):
    density = Density([(mask, 1)])
    assert [density.before(token) for token in range(mask.seq_len + 1)] == before
    assert [tuple(piece) for piece in density.pieces.tolist()] == pieces
    assert density.rising(pieces) == (rising or pieces)


def test_masks_count_by_their_weights():
    density = Density([(Mask.causal(4), 2), (Mask.causal(4, window=1), 3)])
    assert [density.before(token) for token in range(5)] == [0, 5, 12, 21, 32]
    assert density.within([(0, 1), (3, 4)]) == 5 + 11
