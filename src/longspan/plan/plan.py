"""A plan: layout, mask and route made into the work and the traffic of every rank. A plain value, no torch, no group.

Four uses, one meaning: execute it, verify it against a dense mask, count it, draw it.
"""

import hashlib
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal

import numpy as np

from longspan.plan.cut import area_by_rank
from longspan.plan.layout import Layout, check_rank
from longspan.plan.mask import Mask
from longspan.plan.ring import Ring
from longspan.plan.steps import RankPlan
from longspan.spec import SpecError

Digest = bytes
Phase = Literal["forward", "backward"]
ROUTES = {"ring": Ring}


def plan_attention(
    layout: Layout,
    mask: Mask,
    route: str = "ring",
    heads: tuple[int, int] | None = None,
    inner: int | None = None,
) -> "Plan":
    """Decide who computes what and which rows travel.

    `heads` is (query heads, KV heads) on one rank of the CP group, after tensor parallelism. `inner` is the inner degree of
    a route with two levels. Costs nothing until a rank's share or a count is asked for. Raises `SpecError` for what cannot
    be carried out.
    """
    if route not in ROUTES:
        raise SpecError(f"route {route!r} is not available", hint=f"choose one of {', '.join(ROUTES)}")
    if inner is not None:
        raise SpecError(f"inner={inner} means nothing to route {route!r}, which has one level", hint="leave inner out")
    if layout.seq_len != mask.seq_len:
        raise SpecError(
            f"the layout covers {layout.seq_len} tokens and the mask {mask.seq_len}",
            hint="both count the tokens of the global row; document lengths must sum to seq_len",
        )
    return Plan(layout, mask, route, None if heads is None else check_heads(*heads))


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
    heads: tuple[int, int] | None = None

    @property
    def ranks(self) -> int:
        return self.layout.ranks

    @property
    def seq_len(self) -> int:
        return self.layout.seq_len

    def rank_plan(self, rank: int) -> RankPlan:
        """Tiles and transfers of `rank`, step by step."""
        shares = self._shares
        if rank not in shares:
            shares[rank] = self._route.rank_plan(check_rank(rank, self.ranks))
        return shares[rank]

    def area(self, rank: int) -> int:
        """Visible pairs that `rank` computes."""
        return int(self.areas[check_rank(rank, self.ranks)])

    def rows_received(self, rank: int) -> int:
        """KV rows that arrive at `rank` in one forward, rows in transit included."""
        return self.rank_plan(rank).rows_received

    def bytes(self, rank: int, phase: Phase, head_dim: int | tuple[int, int], itemsize: int) -> int:
        """Bytes that `rank` sends in one phase, per batch row: of all KV heads, or of one if the plan knows no `heads`.

        `head_dim` is D, or (D of keys, D of values). Forward sends KV rows at `itemsize` bytes an element. Backward sends
        them again, and partial dK and dV in at least 4 bytes an element.
        """
        share = self.rank_plan(rank)
        width = sum(head_dim) if isinstance(head_dim, tuple) else 2 * head_dim
        width *= self.heads[1] if self.heads else 1
        match phase:
            case "forward":
                return share.rows_sent * width * itemsize
            case "backward":
                return width * (share.rows_sent * itemsize + share.grad_rows_sent * max(itemsize, 4))
        raise SpecError(f"phase {phase!r} is not known", hint='choose "forward" or "backward"')

    @cached_property
    def areas(self) -> np.ndarray:
        """Visible pairs of every rank, int64 `(ranks,)`."""
        return area_by_rank(self.layout, self.mask)

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
        made_from.update(f"route {self.route} heads {self.heads}".encode())
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
    def _route(self) -> Ring:
        return ROUTES[self.route](self.layout, self.mask)

    @cached_property
    def _shares(self) -> dict[int, RankPlan]:
        return {}
