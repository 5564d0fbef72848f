"""Cut bands over global tokens by a layout: into the tiles of one rank, or into key ranges and the ranks that need them.

Spans of step 1 are found by bisection. With stripes (one span `(rank, S, P)` each), query `i = r + P a` of rank `r` and
key `j = s + P b` of rank `s` satisfy `lo <= i - j <= hi` iff

    ceil((lo - (r - s)) / P) <= a - b <= floor((hi - (r - s)) / P)
"""

from dataclasses import dataclass

import numpy as np

from longspan.plan import bands as algebra
from longspan.plan.layout import Layout
from longspan.plan.mask import Mask

Array = np.ndarray


def tiles_of(layout: Layout, mask: Mask, rank: int) -> tuple[Array, Array]:
    """Return the tiles `(n, 6)` of `rank` and the source rank `(n,)` of each tile's keys.

    A tile is over the query slots of `rank` and the key slots of its source. Tiles are trimmed, merged if the union is
    one tile, and sorted by source, query, key.
    """
    tiles, source = algebra.merge(*_cut(layout, mask.array, rank, _QUERIES))
    order = np.lexsort((tiles[:, 2], tiles[:, 0], source))
    return tiles[order], source[order]


def rows_for(layout: Layout, mask: Mask, rank: int) -> Array:
    """Slot ranges of `rank` that other ranks' queries see: int64 `(n, 3)`, (other rank, start, stop); sorted, disjoint."""
    tiles, other = _cut(layout, mask.array, rank, _KEYS)
    return _union(other[other != rank], tiles[other != rank])


def rows_from(layout: Layout, mask: Mask, rank: int) -> Array:
    """Slot ranges of other ranks that queries of `rank` see: int64 `(n, 3)`, (other rank, start, stop); sorted, disjoint."""
    tiles, other = _cut(layout, mask.array, rank, _QUERIES)
    return _union(other[other != rank], tiles[other != rank])


def area_by_rank(layout: Layout, mask: Mask) -> Array:
    """Visible pairs of each rank's queries: int64 `(ranks,)`."""
    totals = np.zeros(layout.ranks, dtype=np.int64)
    if layout.step > 1:
        for rank in range(layout.ranks):
            totals[rank] = algebra.area(_cut(layout, mask.array, rank, _QUERIES)[0]).sum()
    else:
        owner, start, stop, _ = layout.by_start.T
        pieces, _, span = _clip(mask.array, _QUERIES, start, stop)
        np.add.at(totals, owner[span], algebra.area(pieces))
    return totals


@dataclass(frozen=True)
class Demand:
    """Ranges of key slots that other ranks need: disjoint, sorted by (source, start), all arrays int64 `(n,)`.

    `near` and `far` are the distances `(rank - source) mod ranks` to the nearest and farthest rank that needs the range.
    """

    source: Array
    start: Array
    stop: Array
    near: Array
    far: Array


def demand_of(layout: Layout, mask: Mask) -> Demand:
    """Find the rows that leave their rank, and the distances to the nearest and farthest rank that needs them."""
    cut = _demand_of_stripes if layout.step > 1 else _demand_of_spans
    source, start, stop, near, far = cut(layout, mask.array)
    needed = far > 0
    return _flatten(source[needed], start[needed], stop[needed], near[needed], far[needed])


# Tiles. One side of a band (queries or keys) is cut by the spans of one rank, then the other side by all spans.

_QUERIES, _KEYS = 0, 2
"""The first column of each side of a band."""


def _cut(layout: Layout, bands: Array, rank: int, side: int) -> tuple[Array, Array]:
    """Return the tiles whose `side` is on `rank`, over local slots, and the rank of each tile's other side."""
    return (_cut_stripes if layout.step > 1 else _cut_spans)(layout, bands, rank, side)


def _clip(bands: Array, side: int, starts: Array, stops: Array) -> tuple[Array, Array, Array]:
    """Clip one side of bands by disjoint, sorted spans. Returns (trimmed pieces, index of each band, index of each span)."""
    band, span = algebra.overlaps(bands[:, side], bands[:, side + 1], starts, stops)
    pieces = bands[band]
    pieces[:, side] = np.maximum(pieces[:, side], starts[span])
    pieces[:, side + 1] = np.minimum(pieces[:, side + 1], stops[span])
    pieces, kept = algebra.trim(pieces)
    return pieces, band[kept], span[kept]


def _cut_spans(layout: Layout, bands: Array, rank: int, side: int) -> tuple[Array, Array]:
    spans = layout.by_start
    owner, start, stop, slot = spans.T
    own = spans[owner == rank]
    rows, _, own_span = _clip(bands, side, own[:, 1], own[:, 2])
    tiles, row, span = _clip(rows, _KEYS - side, start, stop)
    _renumber(tiles, side, (own[:, 3] - own[:, 1])[own_span[row]], (slot - start)[span])
    return tiles, owner[span]


def _cut_stripes(layout: Layout, bands: Array, rank: int, side: int) -> tuple[Array, Array]:
    step, other = layout.step, _KEYS - side
    owner_of, slot_of = np.zeros((2, step), dtype=np.int64)
    owner_of[layout.by_start[:, 1]], slot_of[layout.by_start[:, 1]] = layout.by_start[:, 0], layout.by_start[:, 3]
    tiles, owners = [np.empty((0, 6), dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    for stripe in np.flatnonzero(owner_of[: layout.seq_len] == rank).tolist():
        rows = bands.copy()
        rows[:, side] = stripe + step * _ceil(bands[:, side] - stripe, step)
        rows[:, side + 1] = stripe + step * (_ceil(bands[:, side + 1] - stripe, step) - 1) + 1
        rows, _ = algebra.trim(rows)
        row, token = algebra.expand(rows[:, other], np.minimum(step, rows[:, other + 1] - rows[:, other]))
        opposite = token % step
        q, k = (stripe, opposite) if side == _QUERIES else (opposite, stripe)
        q0, q1, k0, k1, lo, hi = rows[row].T
        columns = (
            _ceil(q0 - q, step),
            _ceil(q1 - q, step),
            _ceil(k0 - k, step),
            _ceil(k1 - k, step),
            _ceil(lo - (q - k), step),
            (hi - (q - k)) // step,
        )
        part, kept = algebra.trim(np.stack(columns, axis=1))
        _renumber(part, side, slot_of[stripe], slot_of[opposite[kept]])
        tiles.append(part)
        owners.append(owner_of[opposite[kept]])
    return np.concatenate(tiles), np.concatenate(owners)


def _renumber(tiles: Array, side: int, shift: Array, other_shift: Array) -> None:
    """Shift the numbers of both sides of tiles, in place."""
    q_shift, k_shift = (shift, other_shift) if side == _QUERIES else (other_shift, shift)
    for column, by in enumerate((q_shift, q_shift, k_shift, k_shift, q_shift - k_shift, q_shift - k_shift)):
        tiles[:, column] += by


def _union(rank: Array, tiles: Array) -> Array:
    """Unite the keys of each rank's tiles into disjoint, non-touching ranges: int64 `(n, 3)`, (rank, start, stop)."""
    if not len(tiles):
        return np.empty((0, 3), dtype=np.int64)
    stride = int(tiles[:, 3].max()) + 1
    order = np.argsort(rank * stride + tiles[:, 2], kind="stable")
    rank, start, stop = rank[order], tiles[order, 2], tiles[order, 3]
    reach = np.maximum.accumulate(rank * stride + stop)  # ranges of one rank never reach the next rank's numbers
    begins = np.concatenate(([True], (rank * stride + start)[1:] > reach[:-1])) | _changes(rank)
    last = np.append(np.flatnonzero(begins)[1:] - 1, -1)
    return np.stack((rank[begins], start[begins], reach[last] - rank[last] * stride), axis=1)


def _changes(x: Array) -> Array:
    """Whether each element differs from the one before; True for the first."""
    return np.concatenate(([True], x[1:] != x[:-1]))


def _ceil(a: Array, b: int) -> Array:
    return -(-a // b)


# Demand. Key `j` of a band is seen by the queries `max(q0, j + lo) .. min(q1 - 1, j + hi)`: an interval that moves with `j`.


def _demand_of_spans(layout: Layout, bands: Array) -> tuple[Array, ...]:
    owner, start, stop, slot = layout.by_start.T
    pieces, _, span = _clip(bands, _KEYS, start, stop)
    pieces, piece = _cut_where_spans_change(pieces, start)
    span = span[piece]
    q0, q1, k0, k1, lo, hi = pieces.T
    first_query, last_query = np.maximum(q0, k0 + lo), np.minimum(q1 - 1, k0 + hi)
    first = np.searchsorted(start, first_query, side="right") - 1
    last = np.searchsorted(start, last_query, side="right") - 1
    near, far = _distances(owner, first, last, owner[span], layout.ranks)
    shift = (slot - start)[span]
    return owner[span], k0 + shift, k1 + shift, near, far


def _cut_where_spans_change(pieces: Array, start: Array) -> tuple[Array, Array]:
    """Cut the keys of each piece where the first or the last query that sees them enters another span."""
    q0, q1, k0, k1, lo, hi = pieces.T
    everyone = np.arange(len(pieces))
    cuts, owners = [k0], [everyone]
    for low, high, offset in (
        (np.maximum(q0, k0 + lo), np.maximum(q0, k1 - 1 + lo), lo),
        (np.minimum(q1 - 1, k0 + hi), np.minimum(q1 - 1, k1 - 1 + hi), hi),
    ):
        at = np.searchsorted(start, low, side="right")
        piece, edge = algebra.expand(at, np.searchsorted(start, high, side="right") - at)
        cuts.append(start[edge] - offset[piece])
        owners.append(piece)
    if sum(map(len, cuts)) == len(pieces):
        return pieces, everyone
    piece, cut = np.concatenate(owners), np.concatenate(cuts)
    order = np.lexsort((cut, piece))
    piece, cut = piece[order], cut[order]
    until = np.where(np.append(piece[1:] == piece[:-1], False), np.append(cut[1:], 0), k1[piece])
    some = cut < until
    parts = pieces[piece[some]]
    parts[:, 2], parts[:, 3] = cut[some], until[some]
    return parts, piece[some]


def _distances(owner: Array, first: Array, last: Array, source: Array, ranks: int) -> tuple[Array, Array]:
    """Return the least and greatest distance from `source` to the owners of spans `first..last`; 0 if `source` owns all.

    Successive spans whose owners count up or down by one form a series, and the owners in a series form an interval.
    Zigzag has two series.
    """
    change = np.diff(owner)
    run = np.concatenate(([0], np.cumsum(_starts_run(change))))
    run_first = np.flatnonzero(_changes(run))
    run_last = np.append(run_first[1:], len(owner)) - 1
    query, index = algebra.expand(run[first], run[last] - run[first] + 1)
    a, b = owner[np.maximum(first[query], run_first[index])], owner[np.minimum(last[query], run_last[index])]
    near, far = _spread((np.minimum(a, b) - source[query]) % ranks, np.abs(a - b) + 1, ranks)
    if len(query) == len(first):
        return near, far
    begins = np.flatnonzero(_changes(query))
    near = np.minimum.reduceat(np.where(near == 0, ranks, near), begins)
    far = np.maximum.reduceat(far, begins)
    return np.where(far == 0, 0, near), far


def _starts_run(change: Array) -> Array:
    """Whether a new series of owners begins: the step is not +1 or -1, or differs from the step before."""
    steady = np.abs(change) == 1
    return ~steady | np.concatenate(([False], steady[:-1] & (change[1:] != change[:-1])))


def _spread(first: Array, length: Array, ranks: int) -> tuple[Array, Array]:
    """Return the least and greatest nonzero of the distances `first, ..., first + length - 1 (mod ranks)`; 0 if none."""
    last = first + np.minimum(length, ranks) - 1
    far = np.where(last >= ranks, ranks - 1, last)
    near = np.where((first == 0) | (last > ranks), np.minimum(1, far), first)
    return near, far


def _demand_of_stripes(layout: Layout, bands: Array) -> tuple[Array, ...]:
    step = layout.step
    band, key = algebra.expand(bands[:, 2], np.minimum(step, bands[:, 3] - bands[:, 2]))
    stripe = key % step
    q0, q1, k0, k1, lo, hi = bands[band].T
    # The ends of the query interval are fixed or slide with the key. Between these edges the interval's first stripe
    # and min(length, step) are constant, except for keys seen by fewer than `step` queries: at most one per stripe.
    edges = np.stack((k0, k1, q0 - lo, q1 - 1 - hi, q1 - lo - step + 1, q0 + step - 1 - hi), axis=1)
    slots = np.sort(_ceil(np.clip(edges, k0[:, None], k1[:, None]) - stripe[:, None], step), axis=1)
    start, stop = slots[:, :-1].ravel(), slots[:, 1:].ravel()
    some = np.flatnonzero(start < stop)
    start, stop, index = start[some], stop[some], some // (edges.shape[1] - 1)
    stripe, q0, q1, lo, hi = stripe[index], q0[index], q1[index], lo[index], hi[index]
    key = stripe + step * start
    first_query, last_query = np.maximum(q0, key + lo), np.minimum(q1 - 1, key + hi)
    # An interval of stripes (mod step) is an interval of ranks (mod ranks): a rank holds `width` neighbouring stripes.
    width = step // layout.ranks
    first, length = first_query % step, np.minimum(last_query - first_query + 1, step)
    owners = (first % width + length - 1) // width + 1
    near, far = _spread((first // width - stripe // width) % layout.ranks, owners, layout.ranks)
    shift = np.zeros(step, dtype=np.int64)
    shift[layout.by_start[:, 1]] = layout.by_start[:, 3]
    return stripe // width, start + shift[stripe], stop + shift[stripe], near, far


def _flatten(source: Array, start: Array, stop: Array, near: Array, far: Array) -> Demand:
    """Make ranges disjoint. A row in several ranges gets the least `near` and the greatest `far` of these ranges."""
    if not len(source):
        return Demand(source, start, stop, near, far)
    stride = int(stop.max()) + 1
    begin, end = source * stride + start, source * stride + stop
    edges = np.unique(np.concatenate((begin, end)))
    first = np.searchsorted(edges, begin)
    run, segment = algebra.expand(first, np.searchsorted(edges, end) - first)
    least = np.full(len(edges), np.iinfo(np.int64).max)
    most = np.zeros(len(edges), dtype=np.int64)
    np.minimum.at(least, segment, near[run])
    np.maximum.at(most, segment, far[run])
    used = np.flatnonzero(most)
    owner = edges[used] // stride
    return Demand(owner, edges[used] - owner * stride, edges[used + 1] - owner * stride, least[used], most[used])
