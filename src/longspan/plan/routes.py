"""The routes by name. A route has one or two levels: an exchange of heads (Ulysses), travel of KV rows, or both.

    ring, rotate, allgather, exchange      rows travel among all ranks
    ulysses, upipe                         heads are exchanged among all ranks; no row travels
    usp, allgather-ulysses, ...            heads are exchanged within groups of `inner` neighbours; rows travel across groups
    ulysses-ring                           rows travel within groups of `inner` neighbours; heads are exchanged across groups

On two levels, `inner` neighbouring ranks form a group, and rank = group * inner + index in the group. A name of two parts
is outer-inner, like a 2-D mesh (outer, inner).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Protocol

from longspan.errors import SpecError
from longspan.names import AUTO, ROUTES, Route, Rows, check_name
from longspan.plan.direct import AllGather, Exchange
from longspan.plan.head_shares import HeadShare, Place, check_head_degree, places_of, share_heads
from longspan.plan.layout import Layout
from longspan.plan.mask import Mask
from longspan.plan.ring import Ring, Rotation
from longspan.plan.steps import Means, RankPlan, Stage


class Carrier(Protocol):
    """How rows travel among the ranks of a layout."""

    relays: ClassVar[bool]
    means: ClassVar[Means]

    def stages(self, rank: int) -> tuple[Stage, ...]:
        """The stages of one rank of the layout."""
        ...


_CARRIERS: dict[Rows, Callable[[Layout, Mask], Carrier]] = {
    Rows.RING: Ring,
    Rows.ROTATE: Rotation,
    Rows.ALLGATHER: AllGather,
    Rows.EXCHANGE: Exchange,
}


def route_of(name: str) -> Route:
    """Return the route called `name`. Raises `SpecError` for an unknown name."""
    return ROUTES[check_name("route", name, (AUTO, *ROUTES))]


@dataclass(frozen=True)
class Degrees:
    """Ulysses degree (`heads`) and ring degree (`rows`); their product is the CP degree.

    `adjacent`: whether the ranks that exchange heads are neighbours. `levels`: (outer, inner) degrees of a two-level
    route, None for one level.
    """

    heads: int
    rows: int
    adjacent: bool = True
    levels: tuple[int, int] | None = None

    def without_heads(self) -> "Degrees":
        """Return the degrees of the same ranks without an exchange of heads."""
        return replace(self, heads=1, rows=self.heads * self.rows)

    def group_of(self, rank: int) -> int:
        """Index of the group in which `rank` exchanges heads, one of `rows` groups."""
        return rank // self.heads if self.adjacent else rank % self.rows

    def members(self, group: int) -> tuple[int, ...]:
        """List the ranks of a group that exchanges heads."""
        if self.adjacent:
            return tuple(range(group * self.heads, (group + 1) * self.heads))
        return tuple(range(group, self.heads * self.rows, self.rows))


def degrees_of(
    name: str,
    ranks: int,
    heads: tuple[int, int] | None,
    inner: int | None = None,
    tp: int = 1,
) -> Degrees:
    """Split `ranks` into ulysses degree and ring degree. Default `inner` of a two-level route: chosen by `inner_degree`.

    Raises `SpecError` if the route, the ranks and the heads do not fit.
    """
    level = route_of(name).heads
    if level in ("none", "all"):
        if inner is not None:
            raise SpecError(
                f"inner={inner} does not apply to route {name!r}, which has one level", hint="leave inner out"
            )
        if level == "none":
            return Degrees(1, ranks)
        check_head_degree(ranks, heads, name, tp)
        return Degrees(ranks, 1)
    if inner is None:
        inner = inner_degree(name, ranks, heads)
    if inner < 1 or ranks % inner:
        fits = [str(n) for n in range(1, ranks + 1) if ranks % n == 0]
        raise SpecError(f"inner={inner} does not divide the {ranks} ranks of the group", hint=f"use {', '.join(fits)}")
    degree = inner if level == "inner" else ranks // inner
    check_head_degree(degree, heads, name, tp, level, ranks)
    return Degrees(degree, ranks // degree, level == "inner", (ranks // inner, inner))


def comes_down_to(name: str, degrees: Degrees) -> str:
    """If the ulysses degree is 1, name the one-level route that a two-level route equals, such as `inner 1: ring, ...`.

    Otherwise returns an empty string.
    """
    route = ROUTES[name]
    if degrees.levels is None or degrees.heads > 1 or degrees.rows == 1:
        return ""
    plain = next(other for other, of in ROUTES.items() if of.rows is route.rows and of.heads == "none")
    return f"{route.heads} 1: {plain}, no heads are exchanged"


def inner_degree(name: str, ranks: int, heads: tuple[int, int] | None, ranks_per_node: int | None = None) -> int:
    """Choose the inner degree of a two-level route: the largest ulysses degree that replicates no KV head.

    If heads are exchanged on the inner level, the degree also stays within a node of `ranks_per_node` ranks. Each
    doubling of the ulysses degree halves the rows that travel.
    """
    if ranks_per_node is not None and ranks_per_node < 1:
        raise SpecError(f"ranks_per_node={ranks_per_node} is below 1: a node has at least one rank")
    inside = ROUTES[name].heads == "inner"
    most = min(ranks, ranks_per_node or ranks) if inside else ranks
    num_q, num_kv = heads or (ranks, ranks)
    fits = [n for n in range(1, most + 1) if ranks % n == 0 and num_q % n == 0]
    unreplicated = [n for n in fits if num_kv % n == 0]
    degree = max(unreplicated) if len(unreplicated) > 1 else max(fits)
    return degree if inside else ranks // degree


@dataclass(frozen=True)
class Work:
    """Everything needed to make the plan of any rank. `heads` is None if no heads are exchanged."""

    layout: Layout
    heads: tuple[int, int] | None
    degrees: Degrees
    merged: Layout
    carrier: Carrier

    @classmethod
    def of(cls, name: str, layout: Layout, mask: Mask, heads: tuple[int, int] | None, degrees: Degrees) -> "Work":
        # A staged route (upipe) runs its stages of heads even on one rank.
        exchanges = degrees.heads > 1 or ROUTES[name].staged
        merged = layout.merged(degrees.heads, degrees.adjacent) if exchanges else layout
        return cls(layout, heads if exchanges else None, degrees, merged, _CARRIERS[ROUTES[name].rows](merged, mask))

    def rank_plan(self, rank: int) -> RankPlan:
        """Make the plan of one rank of the CP group."""
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
        """Ranks that attend with the same heads as `rank`, one of every group."""
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
        """Cache by group: the places of each member's rows after the exchange of heads."""
        return {}
