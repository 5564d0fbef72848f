"""The routes by name: how rows travel, and among which ranks heads are exchanged first.

    ring, rotate, allgather, exchange      rows travel among all ranks
    ulysses, upipe                         heads are exchanged among all ranks; no row travels afterwards
    ring-ulysses (usp), ...-ulysses        heads among `inner` neighbours, rows among the groups of neighbours
    ulysses-ring                           rows among `inner` neighbours, heads across the groups

A name of two parts is outer-inner, as a mesh of two axes is (outer, inner): rank = outer index * inner degree + inner index.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal, Protocol

from longspan.errors import SpecError
from longspan.plan.direct import AllGather, Exchange
from longspan.plan.head_shares import HeadShare, Place, check_head_degree, places_of, share_heads
from longspan.plan.layout import Layout
from longspan.plan.mask import Mask
from longspan.plan.ring import Ring, Rotation
from longspan.plan.steps import Means, RankPlan, Stage

HeadLevel = Literal["none", "all", "inner", "outer"]


class Carrier(Protocol):
    """How rows travel among the ranks of a layout."""

    relays: ClassVar[bool]
    means: ClassVar[Means]

    def stages(self, rank: int) -> tuple[Stage, ...]:
        """The stages of one rank of the layout."""
        ...


@dataclass(frozen=True)
class RouteKind:
    """What a name stands for: the carrier of rows, and the level at which heads are exchanged."""

    carrier: Callable[[Layout, Mask], Carrier]
    heads: HeadLevel = "none"


ROUTES: dict[str, RouteKind] = {
    "ring": RouteKind(Ring),
    "allgather": RouteKind(AllGather),
    "rotate": RouteKind(Rotation),
    "exchange": RouteKind(Exchange),
    "ulysses": RouteKind(Ring, "all"),
    "upipe": RouteKind(Ring, "all"),
    "usp": RouteKind(Ring, "inner"),
    "ring-ulysses": RouteKind(Ring, "inner"),
    "allgather-ulysses": RouteKind(AllGather, "inner"),
    "rotate-ulysses": RouteKind(Rotation, "inner"),
    "exchange-ulysses": RouteKind(Exchange, "inner"),
    "ulysses-ring": RouteKind(Ring, "outer"),
}
AUTO = "auto"
STAGED = "upipe"
"""The route that works on a few heads at a time, from the input of the projections."""


def check_route(name: str) -> str:
    """`name` if it is a route's, else an error."""
    if name not in ROUTES:
        raise SpecError(f"route {name!r} is not known", hint=f"choose one of {AUTO}, {', '.join(ROUTES)}")
    return name


@dataclass(frozen=True)
class Degrees:
    """Ranks that exchange heads, and ranks among which rows travel; their product is the CP degree.

    `adjacent`: those that exchange heads are neighbours. `levels`: outer and inner degree, where the route has two.
    """

    heads: int
    rows: int
    adjacent: bool = True
    levels: tuple[int, int] | None = None

    def without_heads(self) -> "Degrees":
        """The same ranks, none of which exchange heads."""
        return replace(self, heads=1, rows=self.heads * self.rows)

    def group_of(self, rank: int) -> int:
        """Which of the `rows` groups `rank` exchanges heads in."""
        return rank // self.heads if self.adjacent else rank % self.rows

    def members(self, group: int) -> tuple[int, ...]:
        """The ranks of that group."""
        if self.adjacent:
            return tuple(range(group * self.heads, (group + 1) * self.heads))
        return tuple(range(group, self.heads * self.rows, self.rows))


def degrees_of(
    name: str,
    ranks: int,
    heads: tuple[int, int] | None,
    inner: int | None = None,
    tp: int = 1,
    ranks_per_node: int | None = None,
) -> Degrees:
    """Split `ranks` between heads and rows; `inner` is chosen where a route has two levels and none is given.

    Raises `SpecError` where the route, the ranks and the heads do not fit.
    """
    level = ROUTES[check_route(name)].heads
    if ranks_per_node is not None and ranks_per_node < 1:
        raise SpecError(f"ranks_per_node={ranks_per_node}: a node has at least one rank")
    if level in ("none", "all"):
        if inner is not None:
            raise SpecError(
                f"inner={inner} means nothing to route {name!r}, which has one level", hint="leave inner out"
            )
        if level == "none":
            return Degrees(1, ranks)
        check_head_degree(ranks, heads, name, tp)
        return Degrees(ranks, 1)
    if inner is None:
        inner = _best_inner(level, ranks, heads, ranks_per_node)
    if inner < 1 or ranks % inner:
        fits = [str(n) for n in range(1, ranks + 1) if ranks % n == 0]
        raise SpecError(f"inner={inner} does not divide the {ranks} ranks of the group", hint=f"use {', '.join(fits)}")
    degree = inner if level == "inner" else ranks // inner
    check_head_degree(degree, heads, name, tp, level, ranks)
    return Degrees(degree, ranks // degree, level == "inner", (ranks // inner, inner))


def comes_down_to(name: str, degrees: Degrees) -> str:
    """What a route of two levels is where no heads are exchanged, such as `inner 1: a ring`; else empty."""
    kind = ROUTES[name]
    if degrees.levels is None or degrees.heads > 1 or degrees.rows == 1:
        return ""
    plain = next(other for other, of in ROUTES.items() if of == RouteKind(kind.carrier))
    return f"{kind.heads} 1: {'a ring' if plain == 'ring' else plain}, no heads are exchanged"


def _best_inner(level: HeadLevel, ranks: int, heads: tuple[int, int] | None, ranks_per_node: int | None) -> int:
    """The most heads-exchanging ranks that the KV heads (else the query heads) allow, within a node if that is the inner level.

    Up to the number of KV heads nothing is replicated, and every doubling halves what the rows' route has to move.
    """
    most = min(ranks, ranks_per_node or ranks) if level == "inner" else ranks
    num_q, num_kv = heads or (ranks, ranks)
    fits = [n for n in range(1, most + 1) if ranks % n == 0 and num_q % n == 0]
    unreplicated = [n for n in fits if num_kv % n == 0]
    degree = max(unreplicated) if len(unreplicated) > 1 else max(fits)
    return degree if level == "inner" else ranks // degree


@dataclass(frozen=True)
class Work:
    """Layout, mask and route, from which the share of any rank follows. `heads` is None where none are exchanged."""

    layout: Layout
    heads: tuple[int, int] | None
    degrees: Degrees
    merged: Layout
    carrier: Carrier

    @classmethod
    def of(cls, name: str, layout: Layout, mask: Mask, heads: tuple[int, int] | None, degrees: Degrees) -> "Work":
        # What works in stages of heads does so on one rank too.
        exchanges = degrees.heads > 1 or name == STAGED
        merged = layout.merged(degrees.heads, degrees.adjacent) if exchanges else layout
        return cls(layout, heads if exchanges else None, degrees, merged, ROUTES[name].carrier(merged, mask))

    def rank_plan(self, rank: int) -> RankPlan:
        """The share of one rank of the CP group."""
        group = self.degrees.group_of(rank)
        return RankPlan(
            rank=rank,
            slots=self.layout.num_slots(rank),
            tokens=int(self.layout.counts[rank]),
            rows=self.merged.num_slots(group),
            ranks=self._ranks(rank),
            stages=self.carrier.stages(group),
            relays=self.carrier.relays,
            means=self.carrier.means,
            heads=self._heads(rank),
        )

    def _ranks(self, rank: int) -> tuple[int, ...]:
        """The ranks that work on the same heads as `rank`, one of every group."""
        member = self.degrees.members(self.degrees.group_of(rank)).index(rank)
        return tuple(self.degrees.members(group)[member] for group in range(self.degrees.rows))

    def _heads(self, rank: int) -> HeadShare | None:
        if self.heads is None:
            return None
        group = self.degrees.group_of(rank)
        if group not in self._places:
            members = self.degrees.members(group)
            self._places[group] = tuple(places_of(self.layout, self.merged, member) for member in members)
        return share_heads(self.heads, self.layout, self._places[group], self.degrees.members(group), rank)

    @cached_property
    def _places(self) -> dict[int, tuple[tuple[Place, ...], ...]]:
        """For each group asked for, where its members' rows come to lie."""
        return {}
