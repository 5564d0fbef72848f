"""Random layouts and masks for property tests, each mask beside its definition pair by pair."""

from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st

from longspan.names import BALANCED, LAYOUTS, ROUTES
from longspan.plan import Layout, Mask, plan_attention

DEGREES = (1, 2, 3, 4, 5, 8)
NAMES = tuple(name for name in LAYOUTS if name != BALANCED)
"""Layouts that no mask changes."""

ROWS_MOVE, HEADS_MOVE, INNER_HEADS, OUTER_HEADS = (
    tuple(name for name, route in ROUTES.items() if route.heads == heads) for heads in ("none", "all", "inner", "outer")
)
"""Routes by the ranks that exchange heads."""
HEAD_COUNTS = ((8, 2), (6, 2), (12, 6), (9, 3))

Defined = tuple[Mask, Callable[[int, int], bool]]


def inners_of(route: str, ranks: int) -> list[int | None]:
    """Every inner degree that a route may have: the divisors of `ranks` where it has two levels."""
    two_levels = route in INNER_HEADS + OUTER_HEADS
    return [n for n in range(1, ranks + 1) if ranks % n == 0] if two_levels else [None]


def head_degree(route: str, ranks: int, inner: int | None) -> int:
    """How many ranks exchange heads, as the routes' names say."""
    if inner is None:
        return ranks if route in HEADS_MOVE else 1
    return inner if route in INNER_HEADS else ranks // inner


def carries(route: str, ranks: int, inner: int | None, heads: tuple[int, int]) -> bool:
    """Whether the query heads can be dealt out evenly among those that exchange heads: the one thing a route may lack."""
    return heads[0] % head_degree(route, ranks, inner) == 0


def factored(routes=ROWS_MOVE + HEADS_MOVE + INNER_HEADS + OUTER_HEADS, degrees=DEGREES, heads=HEAD_COUNTS):
    """Any `(route, ranks, inner, heads)` that can be carried out."""
    return st.sampled_from([
        (route, ranks, inner, some)
        for route in routes for ranks in degrees for inner in inners_of(route, ranks) for some in heads
        if carries(route, ranks, inner, some)
    ])  # fmt: skip


@st.composite
def layouts(draw, seq_len: int, degrees=DEGREES, with_slots: bool = False, mask: Mask | None = None) -> Layout:
    """Any layout of that length, balanced for `mask` or for any documents; `with_slots` adds 0 to 3 dead slots to the longest
    rank."""
    name, ranks = draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from(degrees))
    if mask is None and name == "balanced":
        mask = Mask.documents(draw(lengths_of(seq_len)))
    layout = Layout.named(name, seq_len, ranks, masks=[mask])
    extra = draw(st.none() | st.integers(0, 3)) if with_slots else None
    return (
        layout if extra is None else Layout.named(name, seq_len, ranks, int(layout.counts.max()) + extra, masks=[mask])
    )


@st.composite
def lengths_of(draw, total: int, most: int = 6):
    """Document lengths that sum to `total`, zeros included."""
    cuts = sorted(draw(st.lists(st.integers(0, total), max_size=most)))
    return np.diff([0, *cuts, total]).tolist()


@st.composite
def defined_masks(draw, low: int = 1, high: int = 40) -> Defined:
    """A mask of `low..high` tokens and its definition: does query i see key j?"""
    S = draw(st.integers(low, high))
    kind = draw(st.sampled_from(("full", "causal", "documents", "prefix", "shared_prefix", "bands")))
    return draw(_kind(kind, S))


@st.composite
def _kind(draw, kind: str, S: int) -> Defined:
    window = draw(st.none() | st.integers(1, S + 2))
    reach = S + 1 if window is None else window
    if kind == "full":
        return Mask.full(S), lambda i, j: True
    if kind == "causal":
        return Mask.causal(S, window), lambda i, j: 0 <= i - j < reach
    if kind == "prefix":
        n = draw(st.integers(0, S))
        return Mask.prefix(S, n), lambda i, j: j <= i or (i < n and j < n)
    if kind == "bands":
        edges = st.lists(st.integers(0, S), min_size=2, max_size=2).map(sorted)
        (q0, q1), (k0, k1) = draw(edges), draw(edges)
        lo, hi = draw(st.none() | st.integers(-S, S)), draw(st.none() | st.integers(-S, S))
        low, high = -S if lo is None else lo, S if hi is None else hi
        mask = Mask.bands(S, [(q0, q1, k0, k1, lo, hi)])
        return mask, lambda i, j: q0 <= i < q1 and k0 <= j < k1 and low <= i - j <= high
    lengths = draw(lengths_of(S))
    owner = np.repeat(np.arange(len(lengths)), lengths)
    if kind == "documents":
        causal = draw(st.booleans())
        mask = Mask.documents(lengths, causal=causal, window=window)
        return mask, lambda i, j: owner[i] == owner[j] and (j <= i or not causal) and abs(i - j) < reach
    prompt, *responses = lengths
    return Mask.shared_prefix(prompt, responses), lambda i, j: j <= i and (j < prompt or owner[i] == owner[j])


masks = defined_masks().map(lambda pair: pair[0])


@st.composite
def chunked(draw, S: int) -> Mask:
    """Each chunk sees itself, causally, and the whole of the one before it; tokens after the last chunk see nothing."""
    size, covered = draw(st.integers(1, S)), draw(st.integers(0, S))
    bands = []
    for start in range(0, covered, size):
        stop = min(start + size, covered)
        bands.append((start, stop, start, stop, 0, None))
        if start:
            bands.append((start, stop, start - size, start, None, None))
    return Mask.bands(S, bands)


@st.composite
def weighted_masks(draw, low: int = 1, high: int = 60, most: int = 2) -> list[tuple[Mask, int]]:
    """Up to `most` masks over the same tokens, of any kind, with the number of layers that use each."""
    S = draw(st.integers(low, high))
    kinds = st.one_of(defined_masks(S, S).map(lambda pair: pair[0]), chunked(S))
    return [(mask, draw(st.integers(1, 5))) for mask in draw(st.lists(kinds, min_size=1, max_size=most))]


@st.composite
def plans(draw, routes, low: int = 1, high: int = 40, degrees=DEGREES):
    """A plan of one of these routes: any inner degree, layout and mask."""
    route, ranks, inner, heads = draw(factored(routes, degrees))
    layout, mask = draw(layout_and_mask(low, high, (ranks,), with_slots=True))
    return plan_attention(layout, mask, route, heads, inner)


@st.composite
def layout_and_mask(draw, low: int = 1, high: int = 40, degrees=DEGREES, with_slots: bool = False):
    """A layout and a mask over the same tokens; the mask may be the concatenation of two."""
    mask = draw(defined_masks(low, high))[0]
    if draw(st.integers(0, 4)) == 0:
        mask = Mask.concat([mask, draw(defined_masks(1, 8))[0]])
    return draw(layouts(mask.seq_len, degrees, with_slots, mask)), mask
