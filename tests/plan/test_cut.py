"""Cutting a mask by a layout, against the pairs themselves."""

import numpy as np
from hypothesis import given

from longspan.plan import Layout, Mask
from longspan.plan import bands as algebra
from longspan.plan.cut import area_by_rank, demand_of, rows_for, rows_from, tiles_of
from tests.examples import examples

from .brute import needed_distances, owners
from .strategies import layout_and_mask

thorough = examples(300)


@thorough
@given(layout_and_mask(with_slots=True))
def test_tiles_hold_each_pair_of_a_rank_once(case):
    layout, mask = case
    dense = mask.dense()
    for rank in range(layout.ranks):
        tiles, source = tiles_of(layout, mask, rank)
        assert np.array_equal(algebra.trim(tiles)[0], tiles)
        assert (np.diff(source) >= 0).all()
        times = np.zeros_like(dense, dtype=int)
        for (q0, q1, k0, k1, lo, hi), holder in zip(tiles.tolist(), source.tolist(), strict=True):
            away = np.arange(q0, q1)[:, None] - np.arange(k0, k1)
            queries, keys = layout.positions(rank)[q0:q1], layout.positions(holder)[k0:k1]
            times[np.ix_(queries, keys)] += (away >= lo) & (away <= hi)
        own = owners(layout) == rank
        assert np.array_equal(times, dense * own[:, None])
        assert area_by_rank(layout, mask)[rank] == dense[own].sum()


@thorough
@given(layout_and_mask(with_slots=True))
def test_demand_names_the_nearest_and_farthest_rank_of_each_row(case):
    layout, mask = case
    demand = demand_of(layout, mask)
    order = np.lexsort((demand.start, demand.source))
    assert (order == np.arange(len(order))).all()
    near, far = np.zeros(mask.seq_len, dtype=int), np.zeros(mask.seq_len, dtype=int)
    for source, start, stop, least, most in zip(
        demand.source, demand.start, demand.stop, demand.near, demand.far, strict=True
    ):
        keys = layout.positions(source)[start:stop]
        assert not far[keys].any()
        near[keys], far[keys] = least, most
    distances = needed_distances(layout, mask.dense(), 1)
    assert near.tolist() == [d[0] if d else 0 for d in distances]
    assert far.tolist() == [d[-1] if d else 0 for d in distances]


@thorough
@given(layout_and_mask(with_slots=True))
def test_rows_from_and_rows_for_are_two_views_of_the_same_pairs(case):
    layout, mask = case
    dense, owner = mask.dense(), owners(layout)
    for rank in range(layout.ranks):
        wanted = [(int(owner[k]), int(k)) for k in np.flatnonzero(dense[owner == rank].any(axis=0)) if owner[k] != rank]
        runs = rows_from(layout, mask, rank)
        found = [(h, layout.positions(h)[slot]) for h, start, stop in runs.tolist() for slot in range(start, stop)]
        assert sorted(found) == sorted(wanted)
        given_away = {
            (peer, key) for peer in range(layout.ranks) if peer != rank
            for key in np.flatnonzero(dense[owner == peer].any(axis=0) & (owner == rank)).tolist()
        }  # fmt: skip
        others = rows_for(layout, mask, rank)
        found = [(p, layout.positions(rank)[slot]) for p, start, stop in others.tolist() for slot in range(start, stop)]
        assert len(found) == len(given_away)
        assert set(found) == given_away
        for table in (runs, others):
            # Sorted, and runs of one rank neither overlap nor touch.
            assert ((table[1:, 0] > table[:-1, 0]) | (table[1:, 1] > table[:-1, 2])).all()


def test_stripes_of_a_causal_mask_are_triangles_with_and_without_the_diagonal():
    # Rank 1 of 3 over 9 tokens holds 1, 4, 7; of rank 2 (2, 5, 8) its queries see the keys strictly before their slot.
    tiles, source = tiles_of(Layout.striped(9, 3), Mask.causal(9), 1)
    assert source.tolist() == [0, 1, 2]
    assert tiles.tolist() == [[0, 3, 0, 3, 0, 2], [0, 3, 0, 3, 0, 2], [1, 3, 0, 2, 1, 2]]


def test_rounding_may_leave_no_tile():
    # Under a window of 1 a query sees itself alone, so no other rank has a key for it.
    tiles, source = tiles_of(Layout.striped(12, 4), Mask.causal(12, window=1), 2)
    assert source.tolist() == [2]
    assert tiles.tolist() == [[0, 3, 0, 3, 0, 0]]
