"""The cell map against brute force over the dense mask: each pair belongs to the rank, or group, that holds its query."""

import numpy as np
import pytest

from longspan.plan import Layout, Mask, Plan, plan_attention
from longspan.report.cells import HIDDEN, cell_edges, cell_map, even_cells, owner_map
from tests.plan.strategies import NAMES as LAYOUTS
from tests.report.plans import LEVELS, MASKS, groups, make, owners


def most(amounts: np.ndarray, turn: int) -> int:
    """The rank with the most, those that tie in turn."""
    if not amounts.max():
        return HIDDEN
    tied = np.flatnonzero(amounts == amounts.max())
    return int(tied[turn % len(tied)])


def brute_force(plan: Plan, rows: int, columns: int) -> np.ndarray:
    first = {rank: members[0] for members in groups(plan) for rank in members}
    seen, owner = plan.mask.dense(), np.array([first[rank] for rank in owners(plan.layout)])
    down, across = cell_edges(plan.seq_len, rows), cell_edges(plan.seq_len, columns)
    cells = np.empty((rows, columns), dtype=np.int64)
    for r in range(rows):
        for c in range(columns):
            block = seen[down[r] : down[r + 1], across[c] : across[c + 1]]
            pairs = block.sum(axis=1)
            amounts = np.array([pairs[owner[down[r] : down[r + 1]] == rank].sum() for rank in range(plan.ranks)])
            cells[r, c] = most(amounts, r)
    return cells


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_cell_map_equals_brute_force(layout: str, mask: Mask, ranks: int) -> None:
    plan = make(layout, mask, ranks)
    for rows, columns in ((24, 24), (6, 6), (5, 7), (1, 1), (4, 24)):
        np.testing.assert_array_equal(cell_map(plan, rows, columns), brute_force(plan, rows, columns))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("route", [name for name, level in LEVELS.items() if level != "none"])
def test_where_heads_are_exchanged_cells_are_the_group_s(route: str, layout: str) -> None:
    plan = make(layout, MASKS["documents"], 6, heads=(6, 6), route=route)
    for rows, columns in ((24, 24), (5, 7)):
        np.testing.assert_array_equal(cell_map(plan, rows, columns), brute_force(plan, rows, columns))


def test_one_cell_per_pair_is_the_mask_coloured_by_the_query_s_rank() -> None:
    plan = make("zigzag", Mask.causal(8), 2)
    # Chunks of two tokens: 0 1 1 0.
    assert cell_map(plan, 8, 8).tolist() == [
        [0, -1, -1, -1, -1, -1, -1, -1],
        [0, 0, -1, -1, -1, -1, -1, -1],
        [1, 1, 1, -1, -1, -1, -1, -1],
        [1, 1, 1, 1, -1, -1, -1, -1],
        [1, 1, 1, 1, 1, -1, -1, -1],
        [1, 1, 1, 1, 1, 1, -1, -1],
        [0, 0, 0, 0, 0, 0, 0, -1],
        [0, 0, 0, 0, 0, 0, 0, 0],
    ]


def test_ranks_that_tie_take_turns() -> None:
    plan = make("striped", Mask.causal(8), 2)
    assert cell_map(plan, 4, 4).tolist() == [[1, -1, -1, -1], [1, 1, -1, -1], [0, 0, 1, -1], [1, 1, 1, 1]]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("seq_len", "ranks"), [(24, 3), (23, 5), (7, 8), (64, 2)])
def test_owner_map_counts_tokens(layout: str, seq_len: int, ranks: int) -> None:
    shards = Layout.named(layout, seq_len, ranks)
    owner = owners(shards)
    np.testing.assert_array_equal(owner_map(shards, seq_len), owner)
    edges = cell_edges(seq_len, 5)
    expected = [most(np.bincount(owner[edges[n] : edges[n + 1]], minlength=ranks), n) for n in range(5)]
    assert owner_map(shards, 5).tolist() == expected


def test_a_long_sequence_costs_no_more_than_its_cells() -> None:
    seq_len = 1 << 24
    plan = plan_attention(Layout.zigzag(seq_len, 8), Mask.documents([seq_len // 2] * 2))
    cells = cell_map(plan, 64, 64)
    assert (cells[32:, :32] == HIDDEN).all()
    assert (np.diag(cells) == owner_map(plan.layout, 64)).all()


@pytest.mark.parametrize(("seq_len", "cells"), [(100, 100), (256, 256), (8192, 256), (3 * 128, 192), (257, 256)])
def test_even_cells(seq_len: int, cells: int) -> None:
    assert even_cells(seq_len, 256) == cells
