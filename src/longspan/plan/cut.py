"""Cut bands over global tokens by a layout: into the tiles of one rank, and into runs of keys with the ranks that need them.

Spans of step 1 are found by bisection. Under stripes (one span `(rank, S, P)` each) token `i = r + P a` of rank `r` and key
`j = s + P b` of rank `s` obey `lo <= i - j <= hi` iff `ceil((lo - (r - s)) / P) <= a - b <= floor((hi - (r - s)) / P)`.
"""

from dataclasses import dataclass

import numpy as np

from longspan.plan import bands as algebra
from longspan.plan.layout import Layout
from longspan.plan.mask import Mask

Array = np.ndarray


def tiles_of(layout: Layout, mask: Mask, rank: int) -> tuple[Array, Array]:
    """Trimmed tiles `(n, 6)` over query slots of `rank` and key slots of their source, and that source rank `(n,)`.

    Tiles of one source are merged where the union is one tile, and sorted by source, query, key.
    """
    cut = _tiles_of_stripe if layout.step > 1 else _tiles_of_spans
    tiles, source = cut(layout, mask.array, rank)
    tiles, source = algebra.merge(tiles, source)
    order = np.lexsort((tiles[:, 2], tiles[:, 0], source))
    return tiles[order], source[order]


def area_by_rank(layout: Layout, mask: Mask) -> Array:
    """Visible pairs of each rank's queries: int64 `(ranks,)`, without cutting the keys."""
    totals = np.zeros(layout.ranks, dtype=np.int64)
    if layout.step > 1:
        for rank in range(layout.ranks):
            totals[rank] = algebra.area(_tiles_of_stripe(layout, mask.array, rank)[0]).sum()
    else:
        owner, start, stop, _ = layout.by_start.T
        pieces, span = _clip(mask.array, 0, start, stop)
        np.add.at(totals, owner[span], algebra.area(pieces))
    return totals


@dataclass(frozen=True)
class Demand:
    """Runs of key slots that other ranks need: disjoint, sorted by (source, start), all arrays int64 `(n,)`.

    `near` and `far` are the least and the greatest distance `(needing rank - source) mod ranks`, at least 1.
    """

    source: Array
    start: Array
    stop: Array
    near: Array
    far: Array


def demand_of(layout: Layout, mask: Mask) -> Demand:
    """Which rows leave their rank, and how far round the ring the nearest and the farthest rank that needs them is."""
    cut = _demand_of_stripes if layout.step > 1 else _demand_of_spans
    source, start, stop, near, far = cut(layout, mask.array)
    needed = far > 0
    return _flatten(source[needed], start[needed], stop[needed], near[needed], far[needed])


# Tiles


def _clip(bands: Array, column: int, starts: Array, stops: Array) -> tuple[Array, Array]:
    """Clip bands by disjoint sorted spans along queries (`column` 0) or keys (2): trimmed pieces and their span's index."""
    band, span = algebra.overlaps(bands[:, column], bands[:, column + 1], starts, stops)
    pieces = bands[band]
    pieces[:, column] = np.maximum(pieces[:, column], starts[span])
    pieces[:, column + 1] = np.minimum(pieces[:, column + 1], stops[span])
    pieces, kept = algebra.trim(pieces)
    return pieces, span[kept]


def _tiles_of_spans(layout: Layout, bands: Array, rank: int) -> tuple[Array, Array]:
    spans = layout.by_start
    owner, start, stop, slot = spans.T
    own = spans[owner == rank]
    rows, own_span = _clip(bands, 0, own[:, 1], own[:, 2])
    # Keys move with `rows`, so the shift of each row's queries to local slots is carried along by index.
    to_slot = (own[:, 3] - own[:, 1])[own_span]
    row, span = algebra.overlaps(rows[:, 2], rows[:, 3], start, stop)
    tiles = rows[row]
    tiles[:, 2] = np.maximum(tiles[:, 2], start[span])
    tiles[:, 3] = np.minimum(tiles[:, 3], stop[span])
    tiles, kept = algebra.trim(tiles)
    q_shift, k_shift = to_slot[row[kept]], (slot - start)[span[kept]]
    tiles += np.stack((q_shift, q_shift, k_shift, k_shift, q_shift - k_shift, q_shift - k_shift), axis=1)
    return tiles, owner[span[kept]]


def _tiles_of_stripe(layout: Layout, bands: Array, rank: int) -> tuple[Array, Array]:
    step = layout.step
    q0, q1, k0, k1, lo, hi = bands.T
    slot0, slot1 = _ceil(q0 - rank, step), _ceil(q1 - rank, step)
    first, last = rank + step * slot0, rank + step * (slot1 - 1)
    rows, _ = algebra.trim(np.stack((np.maximum(q0, first), np.minimum(q1, last + 1), k0, k1, lo, hi), axis=1))
    q0, q1, k0, k1, lo, hi = rows.T
    row, key = algebra.expand(k0, np.minimum(step, k1 - k0))
    source = key % step
    q0, q1, k0, k1, lo, hi = rows[row].T
    away = rank - source
    columns = (
        _ceil(q0 - rank, step),
        _ceil(q1 - rank, step),
        _ceil(k0 - source, step),
        _ceil(k1 - source, step),
        _ceil(lo - away, step),
        (hi - away) // step,
    )
    tiles, kept = algebra.trim(np.stack(columns, axis=1))
    return tiles, source[kept]


def _ceil(a: Array, b: int) -> Array:
    return -(-a // b)


# Demand: key `j` of a band is seen by the queries `max(q0, j + lo) .. min(q1 - 1, j + hi)`, an interval that slides with `j`.


def _demand_of_spans(layout: Layout, bands: Array) -> tuple[Array, ...]:
    owner, start, stop, slot = layout.by_start.T
    pieces, span = _clip(bands, 2, start, stop)
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
    """Nearest and farthest distance from `source` to an owner of spans `first..last`, 0 where all are `source` itself.

    Spans whose owners count up or down by one form a run (zigzag has two), and a run's owners are an interval.
    """
    change = np.diff(owner)
    run = np.concatenate(([0], np.cumsum(_starts_run(change))))
    run_first = np.flatnonzero(np.concatenate(([True], run[1:] != run[:-1])))
    run_last = np.append(run_first[1:], len(owner)) - 1
    query, index = algebra.expand(run[first], run[last] - run[first] + 1)
    a, b = owner[np.maximum(first[query], run_first[index])], owner[np.minimum(last[query], run_last[index])]
    near, far = _spread((np.minimum(a, b) - source[query]) % ranks, np.abs(a - b) + 1, ranks)
    if len(query) == len(first):
        return near, far
    begins = np.flatnonzero(np.concatenate(([True], query[1:] != query[:-1])))
    near = np.minimum.reduceat(np.where(near == 0, ranks, near), begins)
    far = np.maximum.reduceat(far, begins)
    return np.where(far == 0, 0, near), far


def _starts_run(change: Array) -> Array:
    """Where a new run of owners begins: steps other than +1 or -1, or a turn. A turn of a turn is a run of its own."""
    steady = np.abs(change) == 1
    return ~steady | np.concatenate(([False], steady[:-1] & (change[1:] != change[:-1])))


def _spread(first: Array, length: Array, ranks: int) -> tuple[Array, Array]:
    """Least and greatest of the distances `first, first + 1, ... (mod ranks)`, `length` of them, leaving out 0; 0 if none."""
    last = first + np.minimum(length, ranks) - 1
    far = np.where(last >= ranks, ranks - 1, last)
    near = np.where((first == 0) | (last > ranks), np.minimum(1, far), first)
    return near, far


def _demand_of_stripes(layout: Layout, bands: Array) -> tuple[Array, ...]:
    step = layout.step
    band, key = algebra.expand(bands[:, 2], np.minimum(step, bands[:, 3] - bands[:, 2]))
    source = key % step
    q0, q1, k0, k1, lo, hi = bands[band].T
    # The ends of the interval stand still or slide; between these keys its first rank and min(length, ranks) are fixed,
    # but for keys seen by fewer than `ranks` queries, of which a source has at most one.
    edges = np.stack((k0, k1, q0 - lo, q1 - 1 - hi, q1 - lo - step + 1, q0 + step - 1 - hi), axis=1)
    slots = np.sort(_ceil(np.clip(edges, k0[:, None], k1[:, None]) - source[:, None], step), axis=1)
    start, stop = slots[:, :-1].ravel(), slots[:, 1:].ravel()
    some = np.flatnonzero(start < stop)
    start, stop, index = start[some], stop[some], some // (edges.shape[1] - 1)
    source, q0, q1, lo, hi = source[index], q0[index], q1[index], lo[index], hi[index]
    key = source + step * start
    first_query, last_query = np.maximum(q0, key + lo), np.minimum(q1 - 1, key + hi)
    near, far = _spread((first_query - source) % step, last_query - first_query + 1, step)
    return source, start, stop, near, far


def _flatten(source: Array, start: Array, stop: Array, near: Array, far: Array) -> Demand:
    """Make runs disjoint: a row in several bands has the least `near` and the greatest `far` of them."""
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
