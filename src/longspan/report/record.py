"""A plan in numbers: one frozen record that the table, the JSON and the drawings all read.

Every count is summed from the plan's own tiles and transfers; nothing is modelled here.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np

from longspan.plan import Plan, RankPlan, Step, Transfer
from longspan.plan import bands as algebra
from longspan.report.words import mask_words
from longspan.spec import SpecError

Array = np.ndarray
Quantity = Literal["area", "rows_received", "rows_sent", "grad_rows_sent", "bytes_forward", "bytes_backward"]


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step of one rank. `distance` counts hops between the rank that owns the keys and the one that computes.

    Rows and bytes that are sent leave during this step; `rows_received` arrived for it. `grad_rows_sent` are rows of partial
    dK and dV, those on their last trip (`grad_rows_home`) included.
    """

    distance: int
    source: int
    area: int
    rows_received: int
    rows_sent: int
    grad_rows_sent: int
    grad_rows_home: int
    bytes_forward: int
    bytes_backward: int


@dataclass(frozen=True)
class RankReport:
    """One rank: its tokens, the pairs it computes, their share of all pairs, its traffic, and the same step by step."""

    rank: int
    tokens: int
    slots: int
    area: int
    share: float
    rows_received: int
    rows_sent: int
    grad_rows_sent: int
    bytes_forward: int
    bytes_backward: int
    steps: tuple[StepReport, ...]


@dataclass(frozen=True)
class PlanReport:
    """The whole plan. Bytes are sent bytes per batch row, of all KV heads, or of one if `heads` is None.

    `plain_ring_rows` is what a ring that passes every shard all the way round sends in one forward: `seq_len * (ranks - 1)`;
    `rows_relative` is `rows_sent` over that, 0 where a plain ring sends nothing either.
    """

    layout: str
    mask: str
    route: str
    ranks: int
    seq_len: int
    slots: int | None
    heads: tuple[int, int] | None
    head_dim: int
    itemsize: int
    area: int
    imbalance: float
    rows_sent: int
    grad_rows_sent: int
    plain_ring_rows: int
    rows_relative: float
    bytes_forward: int
    bytes_backward: int
    per_rank: tuple[RankReport, ...]

    @property
    def num_steps(self) -> int:
        """Steps from a rank's own shard to the farthest keys that any rank computes on or passes on."""
        return 1 + max(step.distance for rank in self.per_rank for step in rank.steps)

    def by_step(self, quantity: Quantity) -> Array:
        """One quantity of every rank and step: int64 `(ranks, num_steps)`, 0 where a rank leaves a step out."""
        table = np.zeros((self.ranks, self.num_steps), dtype=np.int64)
        for rank in self.per_rank:
            for step in rank.steps:
                table[rank.rank, step.distance] = getattr(step, quantity)
        return table

    def to_json(self) -> str:
        """The record as JSON; keys are the names of the fields."""
        return json.dumps(asdict(self), indent=2)


def describe(plan: Plan, head_dim: int, itemsize: int) -> PlanReport:
    """Count `plan`: `head_dim` is D of keys and of values, `itemsize` the bytes of one of their elements.

    Raises `SpecError` if either is below 1.
    """
    if head_dim < 1 or itemsize < 1:
        raise SpecError(f"head_dim={head_dim}, itemsize={itemsize}: both must be at least 1")
    shares = [plan.rank_plan(rank) for rank in range(plan.ranks)]
    onward = _direction(shares, plan.ranks)
    per_rank = tuple(_rank(plan, share, onward, head_dim, itemsize) for share in shares)
    rows_sent, plain = sum(rank.rows_sent for rank in per_rank), plan.seq_len * (plan.ranks - 1)
    return PlanReport(
        layout=plan.layout.name,
        mask=mask_words(plan.mask),
        route=plan.route,
        ranks=plan.ranks,
        seq_len=plan.seq_len,
        slots=plan.layout.slots,
        heads=plan.heads,
        head_dim=head_dim,
        itemsize=itemsize,
        area=plan.mask.area,
        imbalance=plan.imbalance,
        rows_sent=rows_sent,
        grad_rows_sent=sum(rank.grad_rows_sent for rank in per_rank),
        plain_ring_rows=plain,
        rows_relative=rows_sent / plain if plain else 0.0,
        bytes_forward=sum(rank.bytes_forward for rank in per_rank),
        bytes_backward=sum(rank.bytes_backward for rank in per_rank),
        per_rank=per_rank,
    )


def _rank(plan: Plan, share: RankPlan, onward: int, head_dim: int, itemsize: int) -> RankReport:
    row = 2 * head_dim * (plan.heads[1] if plan.heads else 1)
    steps = tuple(
        _step(step, area, onward * (share.rank - step.source) % plan.ranks, row, itemsize)
        for step, area in zip(share.steps, _areas(share.steps), strict=True)
    )
    report = RankReport(
        rank=share.rank,
        tokens=share.tokens,
        slots=share.slots,
        area=plan.area(share.rank),
        share=plan.area(share.rank) / plan.mask.area if plan.mask.area else 0.0,
        rows_received=plan.rows_received(share.rank),
        rows_sent=share.rows_sent,
        grad_rows_sent=share.grad_rows_sent,
        bytes_forward=plan.bytes(share.rank, "forward", head_dim, itemsize),
        bytes_backward=plan.bytes(share.rank, "backward", head_dim, itemsize),
        steps=steps,
    )
    assert report.bytes_forward == sum(step.bytes_forward for step in steps), "a row on the wire costs something else"
    assert report.bytes_backward == sum(step.bytes_backward for step in steps), "a row on the wire costs something else"
    return report


def _step(step: Step, area: int, distance: int, row: int, itemsize: int) -> StepReport:
    sent, home = _rows(step.send), _rows(step.home_send)
    grads = _rows(step.grad_send) + home
    return StepReport(
        distance=distance,
        source=step.source,
        area=area,
        rows_received=_rows(step.recv),
        rows_sent=sent,
        grad_rows_sent=grads,
        grad_rows_home=home,
        bytes_forward=row * sent * itemsize,
        bytes_backward=row * (sent * itemsize + grads * max(itemsize, 4)),
    )


def _areas(steps: Iterable[Step]) -> list[int]:
    """Pairs of each step, all tiles counted at once."""
    numbers = [len(step.tiles) for step in steps]
    tiles = np.array([tile for step in steps for tile in step.tiles], dtype=np.int64).reshape(-1, 6)
    totals = np.concatenate(([0], np.cumsum(algebra.area(tiles))))
    return np.diff(totals[np.concatenate(([0], np.cumsum(numbers)))]).tolist()


def _direction(shares: Iterable[RankPlan], ranks: int) -> int:
    """+1 if rows travel to rank + 1, -1 if to rank - 1: read off the first row that is sent."""
    for share in shares:
        for step in share.steps:
            if step.send:
                return 1 if (step.send.peer - share.rank) % ranks == 1 else -1
    return 1


def _rows(transfer: Transfer | None) -> int:
    return transfer.rows if transfer else 0
