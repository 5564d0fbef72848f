"""`Plan`: the tiles to compute and the rows to send on every rank, made from a layout, a mask and a route.

A plan is a plain value without torch or process groups. The same plan is executed, verified against a dense mask,
counted and drawn.
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
    """Plan attention under `mask` on sequence shards by `layout`.

    heads: (query heads, KV heads) on one rank of the CP group, after tensor parallelism. Required by routes that move
    heads.
    inner: inner degree of a two-level route. Default: chosen by `routes.inner_degree`.
    comm_dtype: "bf16" or "fp8" rounds keys and values for the transfer to other ranks. Default: no rounding.
    tp: tensor-parallel degree, used only in error messages.

    `longspan.advise.Planner` resolves route "auto", and chooses an inner degree that fits a node. The tiles and
    transfers of a rank are computed on first use. Raises `SpecError` for arguments that do not fit together.
    """
    if layout.seq_len != mask.seq_len:
        raise SpecError(
            f"the layout covers {layout.seq_len} tokens and the mask {mask.seq_len}",
            hint="make document lengths sum to the seq_len of the layout, the global length of the row",
        )
    check_comm_dtype(comm_dtype)
    heads = None if heads is None else check_heads(*_pair(heads))
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


def _pair(heads: Any) -> tuple[int, int]:
    """Return `heads` as two ints. Raises `SpecError` for anything but a pair."""
    if not isinstance(heads, tuple | list) or len(heads) != 2:
        raise SpecError(f"heads={heads!r} is not a pair", hint="give (query heads, KV heads), such as (32, 8)")
    return whole("query heads", heads[0]), whole("KV heads", heads[1])


def check_heads(num_q: int, num_kv: int) -> tuple[int, int]:
    """Return `(num_q, num_kv)`. Raises `SpecError` unless every KV head serves the same number of query heads."""
    if num_q < 1 or num_kv < 1 or num_q % num_kv:
        divisors = [n for n in range(1, num_q + 1) if num_q % n == 0]
        raise SpecError(
            f"{num_q} query heads are not divisible by {num_kv} KV heads",
            hint=f"KV heads may be one of {', '.join(map(str, divisors))}" if divisors else "give at least one head",
        )
    return num_q, num_kv


@dataclass(frozen=True, eq=False)
class Plan:
    """The result of `plan_attention`. The plan of a single rank is computed on first use, then cached."""

    layout: Layout
    mask: Mask
    route: str
    heads: tuple[int, int] | None
    degrees: Degrees
    comm_dtype: str | None = None
    reason: str = ""
    """Why "auto" chose the route, or the one-level route that a two-level route equals; otherwise empty."""

    @property
    def ranks(self) -> int:
        return self.layout.ranks

    @property
    def seq_len(self) -> int:
        return self.layout.seq_len

    @property
    def staged(self) -> bool:
        """Whether attention runs on a few heads at a time: route "upipe"."""
        return ROUTES[self.route].staged

    def rank_plan(self, rank: int) -> RankPlan:
        """Return the tiles and transfers of `rank`, step by step."""
        shares = self._shares
        if rank not in shares:
            shares[rank] = self._work.rank_plan(check_rank(rank, self.ranks))
        return shares[rank]

    def area(self, rank: int) -> float:
        """Visible pairs that `rank` computes, times the rank's share of the heads. An int if the product is integral."""
        return share_of_heads(int(self.areas[check_rank(rank, self.ranks)]), 1, self.degrees.heads)

    def blocks(self, rank: int) -> float:
        """Blocks of 128 x 128 pairs with at least one visible pair on `rank`, times the rank's share of the heads.

        Blocks start at each tile's first row and column. A blockwise kernel computes full blocks, so its overhead is the
        factor `128 * 128 * blocks / area`.
        """
        return share_of_heads(self.rank_plan(rank).blocks, 1, self.degrees.heads)

    def rows_received(self, rank: int) -> int:
        """KV rows that arrive at `rank` in one forward. Includes rows that `rank` only passes on."""
        return self.rank_plan(rank).rows_received

    def bytes(self, rank: int, phase: Phase, head_dim: int | tuple[int, int], itemsize: int) -> int:
        """Bytes that `rank` sends in one phase per batch row: for all heads, or for one KV head if `heads` is None.

        `head_dim` is D, or (D of keys, D of values); `itemsize` is the bytes of an element of q, k and v.

        forward   KV rows in `comm_dtype`, else at `itemsize`. An exchange of heads adds q, k and v, and the returned out.
        backward  the KV rows again, and partial dK and dV in at least 4 bytes an element. An exchange of heads adds
                  dout, and the returned dq, dk and dv at `itemsize`. If KV heads are replicated, dk and dv take at
                  least 4 bytes an element. "upipe" first repeats the exchange of forward.
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
        """The layout of the shards among which rows travel: one shard per group that exchanges heads, else per rank."""
        return self._work.merged

    @cached_property
    def areas(self) -> np.ndarray:
        """Visible pairs of every rank, int64 `(ranks,)`, not scaled by the rank's share of the heads."""
        groups = [self.degrees.group_of(rank) for rank in range(self.ranks)]
        return area_by_rank(self.row_layout, self.mask)[groups]

    @property
    def imbalance(self) -> float:
        """`max / mean` of the ranks' areas. 1.0 is balanced."""
        mean = float(self.areas.mean())
        return float(self.areas.max()) / mean if mean else 1.0

    @cached_property
    def digest(self) -> Digest:
        """SHA-256 of layout, mask, route, heads, degrees and comm_dtype, for comparison between ranks."""
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
        """A cache for the code that executes this plan object. Excluded from comparison and from copies."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the fields alone. Copies recompute cached values."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def _work(self) -> Work:
        return Work.of(self.route, self.layout, self.mask, self.heads, self.degrees)

    @cached_property
    def _shares(self) -> dict[int, RankPlan]:
        return {}


def share_of_heads(pairs: int, heads: int, all_heads: int) -> float:
    """Return `pairs * heads / all_heads`, as an int if integral."""
    return pairs * heads // all_heads if pairs * heads % all_heads == 0 else pairs * heads / all_heads
