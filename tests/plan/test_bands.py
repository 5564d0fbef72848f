"""The algebra of bands against the pairs themselves."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.plan import bands as algebra
from longspan.plan.bands import UNBOUNDED
from tests.examples import examples

SIZE = 12
edges = st.lists(st.integers(0, SIZE), min_size=2, max_size=2).map(sorted)
bounds = st.integers(-SIZE - 2, SIZE + 2)
lows, highs = bounds | st.just(-UNBOUNDED), bounds | st.just(UNBOUNDED)
bands = st.tuples(edges, edges, lows, highs).map(lambda b: (*b[0], *b[1], b[2], b[3]))
band_lists = st.lists(bands, max_size=6)
thorough = examples(300)


def as_array(rows):
    return np.array(rows, dtype=np.int64).reshape(-1, 6)


def pairs(band):
    q0, q1, k0, k1, lo, hi = band
    return {(i, j) for i in range(q0, q1) for j in range(k0, k1) if lo <= i - j <= hi}


@thorough
@given(band_lists)
def test_trim_keeps_the_pairs_and_only_rows_columns_and_diagonals_that_have_one(rows):
    trimmed, kept = algebra.trim(as_array(rows))
    assert kept.tolist() == [index for index, row in enumerate(rows) if pairs(row)]
    for band, index in zip(trimmed.tolist(), kept.tolist(), strict=True):
        seen = pairs(band)
        assert seen == pairs(rows[index])
        q0, q1, k0, k1, lo, hi = band
        assert {i for i, _ in seen} == set(range(q0, q1))
        assert {j for _, j in seen} == set(range(k0, k1))
        assert min(i - j for i, j in seen) == lo
        assert max(i - j for i, j in seen) == hi


@thorough
@given(band_lists)
def test_area_counts_the_pairs(rows):
    trimmed, kept = algebra.trim(as_array(rows))
    assert algebra.area(trimmed).tolist() == [len(pairs(rows[index])) for index in kept.tolist()]
    assert [algebra.tile_area(tuple(band)) for band in trimmed.tolist()] == algebra.area(trimmed).tolist()


@pytest.mark.parametrize(
    ("band", "right"),
    [
        ((0, 4, 0, 4, 0, 3), 10),  # causal
        ((0, 4, 0, 4, -3, 3), 16),  # full
        ((0, 4, 0, 4, 0, 1), 7),  # window 2
        ((0, 4, 0, 4, -1, 1), 10),  # window 2 to both sides
        ((2, 6, 0, 4, 0, 5), 15),  # rows 2..5 against keys 0..3: 3, 4, 4, 4
    ],
)
def test_area_by_hand(band, right):
    assert len(pairs(band)) == algebra.tile_area(band)
    assert algebra.tile_area(band) == right


def blocks_with_a_pair(band, size):
    q0, _, k0, _, _, _ = band
    return {((i - q0) // size, (j - k0) // size) for i, j in pairs(band)}


@thorough
@given(band_lists, st.integers(1, SIZE + 2))
def test_blocks_counts_those_that_hold_a_pair(rows, size):
    trimmed = algebra.trim(as_array(rows))[0]
    right = [len(blocks_with_a_pair(band, size)) for band in trimmed.tolist()]
    assert algebra.blocks(trimmed, size).tolist() == right


@examples(60)
@given(st.integers(1, 700), st.integers(1, 700), st.integers(-800, 800), st.integers(-800, 800), st.integers(0, 300))
def test_blocks_of_128_on_a_dense_mask(num_q, num_k, lo, hi, start):
    trimmed = algebra.trim(as_array([(start, start + num_q, 0, num_k, lo + start, hi + start)]))[0]
    right = []
    for q0, q1, k0, k1, low, high in trimmed.tolist():
        away = np.arange(q0, q1)[:, None] - np.arange(k0, k1)[None, :]
        seen = (low <= away) & (away <= high)
        right.append(
            sum(seen[i : i + 128, j : j + 128].any() for i in range(0, q1 - q0, 128) for j in range(0, k1 - k0, 128))
        )
    assert algebra.blocks(trimmed).tolist() == right


@pytest.mark.parametrize(
    ("band", "right"),
    [
        ((0, 512, 0, 512, 0, 511), 10),  # causal: 1 + 2 + 3 + 4
        ((0, 512, 0, 512, -511, 511), 16),  # full
        ((0, 513, 0, 512, -511, 512), 20),  # a row more
        ((0, 512, 0, 512, 0, 127), 7),  # window 128: the diagonal and the one below it
        ((0, 512, 0, 512, 0, 128), 7),  # window 129: still
        ((0, 512, 0, 512, 0, 129), 9),  # window 130: the corner of one more
        ((100, 101, 7, 8, 93, 93), 1),  # one pair, wherever it lies
    ],
)  # fmt: skip
def test_blocks_by_hand(band, right):
    assert algebra.blocks(as_array([band])).tolist() == [right]


def disjoint(rows):
    taken, kept = set(), []
    for row in rows:
        seen = pairs(row)
        if seen and not seen & taken:
            taken |= seen
            kept.append(row)
    return kept


@thorough
@given(band_lists, st.lists(st.integers(0, 1), min_size=6, max_size=6))
def test_merge_keeps_pairs_and_groups(rows, groups):
    tiles = algebra.trim(as_array(disjoint(rows)))[0]
    group = np.array(groups[: len(tiles)], dtype=np.int64)
    merged, merged_group = algebra.merge(tiles, group)
    for which in (0, 1):
        before = [pairs(tile) for tile in tiles[group == which].tolist()]
        after = [pairs(tile) for tile in merged[merged_group == which].tolist()]
        assert set().union(*before) == set().union(*after)
        assert sum(map(len, after)) == sum(map(len, before))
    assert np.array_equal(algebra.trim(merged)[0], merged)
    assert len(merged) <= len(tiles)


@pytest.mark.parametrize(
    ("tiles", "right"),
    [
        # zigzag's own step: causal, rectangle, causal
        ([(0, 4, 0, 4, 0, 3), (4, 8, 0, 4, 1, 7), (4, 8, 4, 8, 0, 3)], [(0, 8, 0, 8, 0, 7)]),
        # four quarters of a rectangle
        (
            [(0, 2, 0, 2, -1, 1), (0, 2, 2, 4, -3, -1), (2, 4, 0, 2, 1, 3), (2, 4, 2, 4, -1, 1)],
            [(0, 4, 0, 4, -3, 3)],
        ),
        # eight columns in a row, to be joined in pairs of pairs
        ([(0, 3, j, j + 1, -j, 2 - j) for j in range(8)], [(0, 3, 0, 8, -7, 2)]),
        # two documents stay two
        ([(0, 4, 0, 4, 0, 3), (4, 8, 4, 8, 0, 3)], [(0, 4, 0, 4, 0, 3), (4, 8, 4, 8, 0, 3)]),
    ],
)
def test_merge_by_hand(tiles, right):
    merged, _ = algebra.merge(as_array(tiles), np.zeros(len(tiles), dtype=np.int64))
    assert sorted(map(tuple, merged.tolist())) == right


def test_merge_joins_nothing_across_groups():
    halves = as_array([(0, 4, 0, 2, -1, 3), (0, 4, 2, 4, -3, 1)])
    merged, group = algebra.merge(halves, np.array([0, 1]))
    assert merged.tolist() == halves.tolist()
    assert group.tolist() == [0, 1]


@thorough
@given(band_lists)
def test_first_overlap_finds_two_that_share_a_pair_or_none(rows):
    trimmed = algebra.trim(as_array(rows))[0]
    seen = [pairs(band) for band in trimmed.tolist()]
    shared = {(a, b) for a in range(len(seen)) for b in range(len(seen)) if a != b and seen[a] & seen[b]}
    found = algebra.first_overlap(trimmed)
    assert found in shared if shared else found is None


@thorough
@given(edges, st.lists(st.integers(1, 4), max_size=5))
def test_overlaps_finds_the_spans_that_share_a_token(interval, lengths):
    stops = np.cumsum(lengths).astype(np.int64)
    starts = stops - np.array(lengths, dtype=np.int64)
    index, span = algebra.overlaps(np.array([interval[0]]), np.array([interval[1]]), starts, stops)
    tokens = set(range(*interval))
    right = [n for n in range(len(lengths)) if tokens & set(range(starts[n], stops[n]))]
    if tokens:
        assert span.tolist() == right
        assert index.tolist() == [0] * len(right)


def test_expand_numbers_each_row():
    index, number = algebra.expand(np.array([5, 0, 9]), np.array([2, 0, 3]))
    assert index.tolist() == [0, 0, 2, 2, 2]
    assert number.tolist() == [5, 6, 9, 10, 11]
