"""A plan: layout, mask and route made into the work and the traffic of every rank. A plain value, no torch, no group.

Four uses, one meaning: execute it, verify it against a dense mask, count it, draw it.
"""

import hashlib
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal

import numpy as np

from longspan.errors import SpecError
from longspan.names import AUTO, ROUTES
from longspan.plan.arguments import check_rank, whole
from longspan.plan.comm_dtype import check_comm_dtype, row_bytes
from longspan.plan.cut import area_by_rank, demand_of
from longspan.plan.layout import Layout
from longspan.plan.mask import Mask
from longspan.plan.routes import Degrees, Work, comes_down_to, degrees_of
from longspan.plan.steps import RankPlan

Digest = bytes
Phase = Literal["forward", "backward"]
PHASES: tuple[Phase, ...] = ("forward", "backward")


def plan_attention(
    layout: Layout,
    mask: Mask,
    route: str = "ring",
    heads: tuple[int, int] | None = None,
    inner: int | None = None,
    *,
    comm_dtype: str | None = None,
    tp: int = 1,
) -> "Plan":
    """Decide who computes what and which rows travel.

    `heads` is (query heads, KV heads) on one rank of the CP group, after tensor parallelism; routes that move heads need it.
    `inner` is the inner degree of a route of two levels; default: as many ranks as KV heads allow. `comm_dtype` "bf16" or "fp8"
    rounds keys and values on their way to other ranks. `tp` is only named in errors. `longspan.advise.Planner` resolves
    route "auto", and an inner degree that keeps to nodes.

    Costs nothing until a rank's share or a count is asked for. Raises `SpecError` for what cannot be carried out.
    """
    if layout.seq_len != mask.seq_len:
        raise SpecError(
            f"the layout covers {layout.seq_len} tokens and the mask {mask.seq_len}",
            hint="both count the tokens of the global row; document lengths must sum to seq_len",
        )
    check_comm_dtype(comm_dtype)
    heads = None if heads is None else check_heads(*_two(heads))
    inner = None if inner is None else whole("inner", inner)
    if route == AUTO:
        names = ", ".join(ROUTES)
        raise SpecError(
            f"plan_attention takes a named route, not {AUTO!r}",
            hint=f'name one of {names}; or let longspan.advise.Planner(ranks, route="{AUTO}").plans(masks) choose',
        )
    degrees = degrees_of(route, layout.ranks, heads, inner, tp)
    if degrees.heads > 1 and not len(demand_of(layout, mask).source):
        reason = "no query sees another rank's keys: nothing is exchanged"
        return Plan(layout, mask, route, heads, degrees.without_heads(), comm_dtype, reason)
    return Plan(layout, mask, route, heads, degrees, comm_dtype, comes_down_to(route, degrees))


def _two(heads: Any) -> tuple[int, int]:
    """The two numbers of `heads`, else an error."""
    if not isinstance(heads, tuple | list) or len(heads) != 2:
        raise SpecError(f"heads={heads!r} is not a pair", hint="give (query heads, KV heads), such as (32, 8)")
    return whole("query heads", heads[0]), whole("KV heads", heads[1])


def check_heads(num_q: int, num_kv: int) -> tuple[int, int]:
    """`(num_q, num_kv)` if every KV head serves the same number of query heads, else an error."""
    if num_q < 1 or num_kv < 1 or num_q % num_kv:
        divisors = [n for n in range(1, num_q + 1) if num_q % n == 0]
        raise SpecError(
            f"{num_q} query heads are not divisible by {num_kv} KV heads",
            hint=f"KV heads may be one of {', '.join(map(str, divisors))}" if divisors else "give at least one head",
        )
    return num_q, num_kv


@dataclass(frozen=True, eq=False)
class Plan:
    """What `plan_attention` decided. Shares of single ranks are worked out when asked for, then kept."""

    layout: Layout
    mask: Mask
    route: str
    heads: tuple[int, int] | None
    degrees: Degrees
    comm_dtype: str | None = None
    reason: str = ""
    """Why "auto" chose the route, or what one of two levels comes down to; else empty."""

    @property
    def ranks(self) -> int:
        return self.layout.ranks

    @property
    def seq_len(self) -> int:
        return self.layout.seq_len

    @property
    def staged(self) -> bool:
        """Whether attention works on a few heads at a time: route "upipe"."""
        return ROUTES[self.route].staged

    def rank_plan(self, rank: int) -> RankPlan:
        """Tiles and transfers of `rank`, step by step."""
        shares = self._shares
        if rank not in shares:
            shares[rank] = self._work.rank_plan(check_rank(rank, self.ranks))
        return shares[rank]

    def area(self, rank: int) -> float:
        """Visible pairs that `rank` computes, times its share of the heads where heads are exchanged; an int if whole."""
        return share_of_heads(int(self.areas[check_rank(rank, self.ranks)]), 1, self.degrees.heads)

    def blocks(self, rank: int) -> float:
        """Blocks of 128 x 128 pairs that `rank` computes something of, each tile's from its own corner; heads as in `area`.

        A tile cuts blocks at its edges: `128 * 128 * blocks / area` above 1 is work that a blockwise kernel may do for nothing.
        """
        return share_of_heads(self.rank_plan(rank).blocks, 1, self.degrees.heads)

    def rows_received(self, rank: int) -> int:
        """KV rows that arrive at `rank` in one forward, rows in transit included."""
        return self.rank_plan(rank).rows_received

    def bytes(self, rank: int, phase: Phase, head_dim: int | tuple[int, int], itemsize: int) -> int:
        """Bytes that `rank` sends in one phase, per batch row: of all heads, or of one KV head if the plan knows no `heads`.

        `head_dim` is D, or (D of keys, D of values). Forward sends KV rows at `itemsize` bytes an element (or as
        `comm_dtype` says); backward sends them again, and partial dK and dV in at least 4 bytes an element. Where heads are
        exchanged, q, k, v go there and out comes back; in backward d out goes there, and dq, dk, dv come back: in the inputs'
        type, or dk, dv in at least 4 bytes where a KV head is on several ranks; "upipe" repeats its forward first.
        """
        if phase not in PHASES:
            raise SpecError(f"phase {phase!r} is not known", hint='choose "forward" or "backward"')
        share = self.rank_plan(rank)
        dims = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)
        row = sum(row_bytes(self.comm_dtype, dim, itemsize) for dim in dims)
        partial = sum(dims) * max(itemsize, 4)
        num_kv = share.heads.num_kv if share.heads else self.heads[1] if self.heads else 1
        total = num_kv * (share.rows_sent * row + (phase == "backward") * share.grad_rows_sent * partial)
        if share.heads is not None:
            query, out = dims[0] * itemsize, dims[1] * itemsize
            if phase == "forward" or self.staged:
                total += share.heads.bytes_there(query, row) + share.heads.bytes_back(out, 0)
            if phase == "backward":
                grad = partial if share.heads.replicates else sum(dims) * itemsize
                total += share.heads.bytes_there(out, 0) + share.heads.bytes_back(query, grad)
        return total

    @property
    def row_layout(self) -> Layout:
        """The layout among whose shards rows travel: that of the groups that exchange heads, else the plan's own."""
        return self._work.merged

    @cached_property
    def areas(self) -> np.ndarray:
        """Visible pairs of every rank, int64 `(ranks,)`; of all heads, though a rank may work on a share of these."""
        groups = [self.degrees.group_of(rank) for rank in range(self.ranks)]
        return area_by_rank(self.row_layout, self.mask)[groups]

    @property
    def imbalance(self) -> float:
        """Greatest over mean area of the ranks; 1.0 is even."""
        mean = float(self.areas.mean())
        return float(self.areas.max()) / mean if mean else 1.0

    @cached_property
    def digest(self) -> Digest:
        """SHA-256 of what the plan was made from: equal plans, equal bytes, on every rank."""
        made_from = hashlib.sha256(self.layout.fingerprint())
        made_from.update(self.mask.fingerprint())
        made_from.update(f"route {self.route} heads {self.heads} {self.degrees} {self.comm_dtype}".encode())
        return made_from.digest()

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Plan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def attachments(self) -> dict[Any, Any]:
        """What those who run this very plan keep with it, for as long as it lives. No part of its value."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """Only what the plan was made from: copies work the rest out again."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def _work(self) -> Work:
        return Work.of(self.route, self.layout, self.mask, self.heads, self.degrees)

    @cached_property
    def _shares(self) -> dict[int, RankPlan]:
        return {}


def share_of_heads(pairs: int, heads: int, all_heads: int) -> float:
    """`pairs` on `heads` of `all_heads`, as pairs on all heads: an int if whole."""
    return pairs * heads // all_heads if pairs * heads % all_heads == 0 else pairs * heads / all_heads
