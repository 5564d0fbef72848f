"""The attention matrix as a grid of cells: which rank computes most of the visible pairs in each cell.

Pairs are counted in closed form, so the cost depends on the number of cells, not of tokens.

    S=8, striped, 2 ranks, causal         4 x 4 cells of 2 x 2 tokens: in a cell of the lower triangle both ranks
    0               0                     compute 2 pairs and take turns row by row; on the diagonal rank 1 has 2, rank 0 has 1
    1 1             . .                   1
    0 0 0           . .  0                1 1
    1 1 1 1         . .  . .              0 0 1
    ...                                   1 1 1 1
"""

import numpy as np

from longspan.plan import Layout, Plan
from longspan.plan.bands import expand

Array = np.ndarray

HIDDEN = -1
"""Value of a cell without a visible pair."""


def cell_map(plan: Plan, rows: int, columns: int) -> Array:
    """Find the rank with most pairs in each cell: int64 `(rows, columns)`, queries by keys; `HIDDEN` without pairs.

    Tied ranks take turns row by row. Cell sizes differ by at most one token; with `rows = columns = seq_len` every cell
    is one pair. A pair belongs to the rank that holds the query. If heads are exchanged, a pair belongs to a group, and
    the cell holds the group's first rank.
    """
    across, down = cell_edges(plan.seq_len, columns), cell_edges(plan.seq_len, rows)
    first = first_ranks(plan)
    cells = [
        _dominant(_row_areas(plan, first, start, stop, across), np.full(columns, row))
        for row, (start, stop) in enumerate(zip(down[:-1].tolist(), down[1:].tolist(), strict=True))
    ]
    return np.stack(cells)


def owner_map(layout: Layout, cells: int) -> Array:
    """Find the rank that holds most tokens of each cell: int64 `(cells,)`. Tied ranks take turns."""
    edges = cell_edges(layout.seq_len, cells)
    held = np.zeros((layout.ranks, cells), dtype=np.int64)
    for owner, start, stop in layout.spans.tolist():
        before = -(-(np.clip(edges, start, stop) - start) // layout.step)
        held[owner] += np.diff(before)
    return _dominant(held, np.arange(cells))


def first_ranks(plan: Plan) -> Array:
    """For each rank, the first rank of its head-exchange group (without exchange, the rank itself): int64 `(ranks,)`."""
    first = [plan.degrees.members(group)[0] for group in range(plan.degrees.rows)]
    return np.array([first[plan.degrees.group_of(rank)] for rank in range(plan.ranks)])


def cell_edges(seq_len: int, cells: int) -> Array:
    """Token indices of the cells' edges: int64 `(cells + 1,)`."""
    return np.arange(cells + 1) * seq_len // cells


def even_cells(seq_len: int, most: int) -> int:
    """Choose a number of cells up to `most`: one per token if possible, else a divisor of `seq_len` above `most / 2`."""
    if seq_len <= most:
        return seq_len
    return next((cells for cells in range(most, most // 2, -1) if seq_len % cells == 0), most)


def _row_areas(plan: Plan, counts_for: Array, start: int, stop: int, across: Array) -> Array:
    """Count the pairs of queries `start..stop` in each column of cells: int64 `(ranks, columns)`.

    Pairs of `rank` are added to the count of `counts_for[rank]`.
    """
    layout, bands, spans = plan.layout, plan.mask.array, plan.layout.spans
    bands = bands[(bands[:, 0] < stop) & (bands[:, 1] > start)]
    spans = spans[(spans[:, 1] < stop) & (spans[:, 2] > start)]
    areas = np.zeros((layout.ranks, len(across) - 1), dtype=np.int64)

    band = np.repeat(np.arange(len(bands)), len(spans))
    owner, origin, end = np.tile(spans, (len(bands), 1)).T
    q0, q1, k0, k1, lo, hi = bands[band].T
    q0, q1 = np.maximum(np.maximum(q0, start), origin), np.minimum(np.minimum(q1, stop), end)
    first = origin + _ceil(q0 - origin, layout.step) * layout.step
    count = _ceil(q1 - first, layout.step)
    last = first + (count - 1) * layout.step
    seen, unseen = np.maximum(k0, first - hi), np.minimum(k1, last - lo + 1)
    some = (count > 0) & (seen < unseen)

    column = np.searchsorted(across, seen, side="right") - 1
    width = np.where(some, np.searchsorted(across, unseen, side="left") - column, 0)
    piece, column = expand(column, width)
    k0, k1 = np.maximum(k0[piece], across[column]), np.minimum(k1[piece], across[column + 1])
    pairs = _strided_area(first[piece], count[piece], layout.step, k0, k1, lo[piece], hi[piece])
    np.add.at(areas, (counts_for[owner[piece]], column), pairs)
    return areas


def _strided_area(first: Array, count: Array, step: int, k0: Array, k1: Array, lo: Array, hi: Array) -> Array:
    """Count the pairs of `count` queries `first, first + step, ...` with keys `k0..k1`, where `lo <= i - j <= hi`."""

    def up_to(bound: Array) -> Array:
        return _ramp(k1 - first + bound, count, step) - _ramp(k0 - first + bound, count, step)

    return up_to(hi) - up_to(lo - 1)


def _ramp(height: Array, count: Array, step: int) -> Array:
    """Sum `max(0, height - step * a)` over `a < count`."""
    terms = np.clip(_ceil(height, step), 0, count)
    return terms * height - step * (terms * (terms - 1) // 2)


def _ceil(a: Array, b: int) -> Array:
    return -(-a // b)


def _dominant(amounts: Array, turn: Array) -> Array:
    """Find the rank of the maximum in each column of `(ranks, n)`; `HIDDEN` if all are 0. `turn % m` breaks m-way ties."""
    most = amounts.max(axis=0)
    tied = amounts == most
    chosen = tied & (np.cumsum(tied, axis=0) == turn % tied.sum(axis=0) + 1)
    return np.where(most > 0, chosen.argmax(axis=0), HIDDEN)
