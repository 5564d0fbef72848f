"""The algebra of bands: trim, count and merge many bands at once.

A band is six integers `(q0, q1, k0, k1, lo, hi)`: query `i` sees key `j` iff `q0 <= i < q1`, `k0 <= j < k1`,
`lo <= i - j <= hi`. Bands come as int64 arrays `(n, 6)`. A tile is a band in local indices, so these functions take
either.

      k0        k1
    q0 # # . . .      trimmed: every row sees a key, every column is seen,
       # # # . .      and `lo`, `hi` are the extreme diagonals really present,
    q1 # # # # .      so a full rectangle needs no special value for "unbounded".
"""

import numpy as np

Array = np.ndarray
"""An int64 array; docstrings give the shapes."""

UNBOUNDED = 1 << 60
"""Value of an absent `hi`, negated of an absent `lo`, until `trim` replaces it."""


def trim(bands: Array) -> tuple[Array, Array]:
    """Shrink bands `(n, 6)` to the rows and columns with a pair, and drop empty bands. Returns (bands kept, their indices).

    Row `i` sees keys `i - hi .. i - lo`, so rows outside `[k0 + lo, k1 + hi)` see nothing. Column `j` is seen by rows
    `j + lo .. j + hi`. One pass suffices: no remaining row loses a key when the columns shrink.
    """
    q0, q1, k0, k1, lo, hi = bands.T
    q0, q1 = np.maximum(q0, k0 + lo), np.minimum(q1, k1 + hi)
    k0, k1 = np.maximum(k0, q0 - hi), np.minimum(k1, q1 - lo)
    lo, hi = np.maximum(lo, q0 - k1 + 1), np.minimum(hi, q1 - 1 - k0)
    kept = np.flatnonzero((q0 < q1) & (k0 < k1) & (lo <= hi))
    return np.stack((q0, q1, k0, k1, lo, hi), axis=1)[kept], kept


def area(bands: Array) -> Array:
    """Count the pairs in each band `(n, 6)`, in closed form: int64 `(n,)`."""
    q0, q1, k0, k1, lo, hi = bands.T
    num_q, num_k, shift = q1 - q0, k1 - k0, q0 - k0
    return _pairs_up_to(hi - shift, num_q, num_k) - _pairs_up_to(lo - shift - 1, num_q, num_k)


def tile_area(tile: tuple[int, int, int, int, int, int]) -> int:
    """Count the pairs in one band."""
    return int(area(np.array([tile], dtype=np.int64))[0])


def blocks(bands: Array, size: int = 128) -> Array:
    """Count the blocks of `size x size` with a pair, laid from each trimmed band's corner (q0, k0): int64 `(n,)`.

    # . . .      size 2: block (1, 0) is full, (0, 0) and (1, 1) are partial, (0, 1) is empty: 3 blocks
    # # . .
    # # # .      Blocks `(a, b)` with a pair are a band themselves: `floor(lo / size) <= a - b <= ceil(hi / size)`. The last
    # # # #      blocks may be partial; the count is exact, because every row and column of a trimmed band has a pair.
    """
    q0, q1, k0, k1, lo, hi = bands.T
    shift, first = q0 - k0, np.zeros_like(q0)
    rows, columns = -((q0 - q1) // size), -((k0 - k1) // size)
    return area(np.stack((first, rows, first, columns, (lo - shift) // size, -((shift - hi) // size)), axis=1))


def merge(tiles: Array, group: Array) -> tuple[Array, Array]:
    """Join trimmed, disjoint tiles `(n, 6)` of the same group `(n,)` whose union is one band.

    Two tiles are joined iff the band around the two tiles (hull of the ranges, widest diagonals) holds no other pair,
    that is, iff the area of this band is the sum of the tiles' areas. Neighbours are tried along the keys, then along the
    queries, until none join:

        [causal .     ]        zigzag's own step: a causal tile, a rectangle below it
        [full   causal]   ->   and a causal tile are one causal tile
    """
    while True:
        before = len(tiles)
        for keys in ((2, 0), (0, 2)):
            order = np.lexsort((tiles[:, keys[0]], tiles[:, keys[1]], group))
            tiles, group = _join_neighbours(tiles[order], group[order])
        if len(tiles) == before:
            return tiles, group


def overlaps(starts: Array, stops: Array, sorted_starts: Array, sorted_stops: Array) -> tuple[Array, Array]:
    """Find all pairs (interval, span) that share a token; spans are disjoint and sorted. Returns two index arrays."""
    first = np.searchsorted(sorted_stops, starts, side="right")
    count = np.maximum(np.searchsorted(sorted_starts, stops, side="left") - first, 0)
    return expand(first, count)


def expand(first: Array, count: Array) -> tuple[Array, Array]:
    """Repeat each row number `n` `count[n]` times, and pair the copies with `first[n], first[n] + 1, ...`.

    Returns (row numbers, paired values).
    """
    index = np.repeat(np.arange(len(count)), count)
    within = np.arange(len(index)) - np.repeat(np.cumsum(count) - count, count)
    return index, first[index] + within


def first_overlap(bands: Array) -> tuple[int, int] | None:
    """Return the indices of two trimmed bands `(n, 6)` that share a pair, or None if all are disjoint."""
    order = np.lexsort((bands[:, 2], bands[:, 0]))
    sorted_bands = bands[order]
    later_stop = np.searchsorted(sorted_bands[:, 0], sorted_bands[:, 1], side="left")
    here = np.arange(len(bands))
    i, j = expand(here + 1, np.maximum(later_stop - here - 1, 0))
    a, b = sorted_bands[i], sorted_bands[j]
    common = np.stack([(np.minimum if c in (1, 3, 5) else np.maximum)(a[:, c], b[:, c]) for c in range(6)], axis=1)
    shared, kept = trim(common)
    if not len(shared):
        return None
    return int(order[i[kept[0]]]), int(order[j[kept[0]]])


def _pairs_up_to(bound: Array, num_q: Array, num_k: Array) -> Array:
    """Count the pairs of a `num_q x num_k` rectangle with `i - j <= bound`."""
    return num_q * num_k - _excess(bound, num_q) + _excess(bound + num_k, num_q)


def _excess(bound: Array, num_q: Array) -> Array:
    """Sum `max(0, i - bound)` over `i < num_q`."""
    return _triangle(num_q - 1 - bound) - _triangle(-1 - bound)


def _triangle(n: Array) -> Array:
    n = np.maximum(n, 0)
    return n * (n + 1) // 2


def _join_neighbours(tiles: Array, group: Array) -> tuple[Array, Array]:
    """Join each tile with its successor if their union is one band. A pass halves a series of joinable tiles."""
    while len(tiles) > 1:
        a, b = tiles[:-1], tiles[1:]
        hull = np.stack([(np.maximum if c in (1, 3, 5) else np.minimum)(a[:, c], b[:, c]) for c in range(6)], axis=1)
        sizes = area(tiles)
        fits = (group[:-1] == group[1:]) & (area(hull) == sizes[:-1] + sizes[1:])
        if not fits.any():
            break
        # In a series of joinable tiles, take every other pair, so that no tile is used twice.
        index = np.arange(len(fits))
        run_start = np.maximum.accumulate(np.where(fits, -1, index))
        chosen = fits & ((index - run_start) % 2 == 1)
        tiles = tiles.copy()
        tiles[:-1][chosen] = hull[chosen]
        kept = np.concatenate(([True], ~chosen))
        tiles, group = tiles[kept], group[kept]
    return tiles, group
