"""A plan in numbers: one frozen record for the table, the JSON and the drawings.

All counts are sums over the plan's tiles and transfers; nothing is estimated.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np

from longspan.errors import SpecError
from longspan.names import ROUTES
from longspan.plan import HeadShare, Mask, Plan, RankPlan, Step, Transfer, share_of_heads
from longspan.plan import bands as algebra
from longspan.plan.comm_dtype import row_bytes

Array = np.ndarray
Quantity = Literal["area", "rows_received", "rows_sent", "grad_rows_sent", "bytes_forward", "bytes_backward"]


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step of one rank, on the keys of `source`. If heads are exchanged, `source` is a group rather than a rank.

    `distance` on "ring" and "rotate" is the number of hops from `source`, which equals `stage`. On other routes
    `distance` is `(rank - source) mod ranks`, and a stage may have several steps.

    `rows_sent` and bytes leave during the stage and are counted at the first step of the stage. `rows_received` are the
    KV rows that this step computes on. `grad_rows_sent` counts rows of partial dK and dV, including `grad_rows_home`, the
    rows sent to their owner.
    """

    stage: int
    distance: int
    source: int
    area: float
    rows_received: int
    rows_sent: int
    grad_rows_sent: int
    grad_rows_home: int
    bytes_forward: int
    bytes_backward: int


@dataclass(frozen=True)
class RankReport:
    """Tokens, work and traffic of one rank, in total and by step.

    If heads are exchanged, all ranks of a `group` compute the same pairs, each rank for its own heads. `area` and `blocks`
    (of 128 x 128) are then scaled by the rank's share of the heads. `bytes_heads_...` are sent in the exchange of heads
    and belong to no step.
    """

    rank: int
    group: int
    tokens: int
    slots: int
    area: float
    blocks: float
    share: float
    rows_received: int
    rows_sent: int
    grad_rows_sent: int
    bytes_forward: int
    bytes_backward: int
    bytes_heads_forward: int
    bytes_heads_backward: int
    steps: tuple[StepReport, ...]


@dataclass(frozen=True)
class PlanReport:
    """All ranks of a plan. Bytes are bytes sent per batch row, for all heads, or for one KV head if `heads` is None.

    A plain ring sends every shard to every rank: `plain_ring_rows` is `seq_len * (ranks - 1)` in one forward, and
    `plain_ring_bytes` is the bytes of these rows in the inputs' dtype. `rows_relative` is `rows_sent / plain_ring_rows`,
    and `bytes_relative` is `bytes_forward / plain_ring_bytes`; both are 0 on one rank.
    """

    layout: str
    mask: str
    route: str
    reason: str
    ranks: int
    head_degree: int
    row_degree: int
    inner: int | None
    seq_len: int
    slots: int | None
    heads: tuple[int, int] | None
    head_dim: int
    itemsize: int
    comm_dtype: str | None
    area: int
    blocks: float
    imbalance: float
    rows_sent: int
    grad_rows_sent: int
    plain_ring_rows: int
    rows_relative: float
    plain_ring_bytes: int
    bytes_relative: float
    bytes_forward: int
    bytes_backward: int
    bytes_heads_forward: int
    bytes_heads_backward: int
    per_rank: tuple[RankReport, ...]

    @property
    def num_stages(self) -> int:
        """Number of stages up to the last in which any rank computes or transfers anything."""
        return 1 + max(step.stage for rank in self.per_rank for step in rank.steps)

    def by_stage(self, quantity: Quantity) -> Array:
        """Tabulate one quantity by rank and stage: `(ranks, num_stages)`, int64, or float64 for areas."""
        table = np.zeros((self.ranks, self.num_stages), dtype=np.float64 if quantity == "area" else np.int64)
        for rank in self.per_rank:
            for step in rank.steps:
                table[rank.rank, step.stage] += getattr(step, quantity)
        return table

    def in_exchange(self, quantity: Quantity) -> Array:
        """Part of a quantity that belongs to the exchange of heads, by rank: int64 `(ranks,)`."""
        names = {"bytes_forward": "bytes_heads_forward", "bytes_backward": "bytes_heads_backward"}
        return np.array([getattr(rank, names[quantity]) if quantity in names else 0 for rank in self.per_rank])

    def to_json(self) -> str:
        """Serialise the record as JSON, with the field names as keys."""
        return json.dumps(asdict(self), indent=2)


def describe(plan: Plan, head_dim: int, itemsize: int) -> PlanReport:
    """Count the work and traffic of `plan`. `head_dim` is D of keys and of values, `itemsize` the bytes of an element.

    Raises `SpecError` if `head_dim` or `itemsize` is below 1.
    """
    if head_dim < 1 or itemsize < 1:
        raise SpecError(f"head_dim={head_dim}, itemsize={itemsize}: both must be at least 1")
    shares = [plan.rank_plan(rank) for rank in range(plan.ranks)]
    onward, degrees = _direction(shares, plan), plan.degrees
    per_rank = tuple(_rank(plan, share, onward, head_dim, itemsize) for share in shares)
    rows_sent, bytes_forward = sum(rank.rows_sent for rank in per_rank), sum(rank.bytes_forward for rank in per_rank)
    plain = plan.seq_len * (plan.ranks - 1)
    plain_bytes = plain * 2 * head_dim * itemsize * (plan.heads[1] if plan.heads else 1)
    return PlanReport(
        layout=plan.layout.name,
        mask=mask_words(plan.mask),
        route=plan.route,
        reason=plan.reason,
        ranks=plan.ranks,
        head_degree=degrees.heads,
        row_degree=degrees.rows,
        inner={"inner": degrees.heads, "outer": degrees.rows}.get(ROUTES[plan.route].heads),
        seq_len=plan.seq_len,
        slots=plan.layout.slots,
        heads=plan.heads,
        head_dim=head_dim,
        itemsize=itemsize,
        comm_dtype=plan.comm_dtype,
        area=plan.mask.area,
        blocks=share_of_heads(sum(share.blocks for share in shares), 1, degrees.heads),
        imbalance=plan.imbalance,
        rows_sent=rows_sent,
        grad_rows_sent=sum(rank.grad_rows_sent for rank in per_rank),
        plain_ring_rows=plain,
        rows_relative=rows_sent / plain if plain else 0.0,
        plain_ring_bytes=plain_bytes,
        bytes_relative=bytes_forward / plain_bytes if plain else 0.0,
        bytes_forward=bytes_forward,
        bytes_backward=sum(rank.bytes_backward for rank in per_rank),
        bytes_heads_forward=sum(rank.bytes_heads_forward for rank in per_rank),
        bytes_heads_backward=sum(rank.bytes_heads_backward for rank in per_rank),
        per_rank=per_rank,
    )


def _rank(plan: Plan, share: RankPlan, onward: int, head_dim: int, itemsize: int) -> RankReport:
    row = 2 * row_bytes(plan.comm_dtype, head_dim, itemsize)
    num_kv = share.heads.num_kv if share.heads else plan.heads[1] if plan.heads else 1
    steps = tuple(_steps(plan, share, onward, num_kv * row, num_kv * 2 * head_dim * max(itemsize, 4)))
    heads = _heads(share.heads, plan.staged, row, head_dim, itemsize) if share.heads else (0, 0)
    report = RankReport(
        rank=share.rank,
        group=plan.degrees.group_of(share.rank),
        tokens=share.tokens,
        slots=share.slots,
        area=plan.area(share.rank),
        blocks=plan.blocks(share.rank),
        share=plan.area(share.rank) / plan.mask.area if plan.mask.area else 0.0,
        rows_received=plan.rows_received(share.rank),
        rows_sent=share.rows_sent,
        grad_rows_sent=share.grad_rows_sent,
        bytes_forward=heads[0] + sum(step.bytes_forward for step in steps),
        bytes_backward=heads[1] + sum(step.bytes_backward for step in steps),
        bytes_heads_forward=heads[0],
        bytes_heads_backward=heads[1],
        steps=steps,
    )
    planned = [plan.bytes(share.rank, phase, head_dim, itemsize) for phase in ("forward", "backward")]
    assert planned == [report.bytes_forward, report.bytes_backward], "the report and the plan count different bytes"
    return report


def _steps(plan: Plan, share: RankPlan, onward: int, row: int, partial: int) -> Iterator[StepReport]:
    """Report the steps of a rank. `row` is the bytes of a KV row, `partial` the bytes of a row of partial gradients."""
    group, groups = plan.degrees.group_of(share.rank), plan.degrees.rows
    # A stage without steps may still send rows of the own shard: report those at an empty step.
    stages = [(stage, stage.steps or (Step(group, 0, ()),)) for stage in share.stages]
    areas = iter(_areas([step for _, steps in stages for step in steps]))
    for stage, steps in stages:
        sent = sum(transfer.rows for transfer in stage.sends)
        for step in steps:
            area, distance, home = next(areas), onward * (group - step.source) % groups, _rows(step.home_send)
            if (stage.number and stage.idle) or not (stage.steps or sent):
                continue
            grads = _rows(step.grad_send) + home
            yield StepReport(
                stage=stage.number,
                distance=distance,
                source=step.source,
                area=share_of_heads(area, 1, plan.degrees.heads),
                rows_received=_rows(step.recv),
                rows_sent=sent,
                grad_rows_sent=grads,
                grad_rows_home=home,
                bytes_forward=row * sent,
                bytes_backward=row * sent + partial * grads,
            )
            sent = 0


def _heads(share: HeadShare, staged: bool, row: int, head_dim: int, itemsize: int) -> tuple[int, int]:
    """Return the bytes sent in the exchange of heads: (forward, backward).

    Forward exchanges q, k and v, and returns out. Backward exchanges dout, and returns dq, dk and dv. If `staged`,
    backward first repeats the exchange of forward.
    """
    size = head_dim * itemsize
    grads = 2 * head_dim * (max(itemsize, 4) if share.replicates else itemsize)
    forward = share.bytes_there(size, row) + share.bytes_back(size, 0)
    return forward, staged * forward + share.bytes_there(size, 0) + share.bytes_back(size, grads)


def _areas(steps: Sequence[Step]) -> list[int]:
    """Count the pairs of each step, all tiles at once."""
    numbers = [len(step.tiles) for step in steps]
    tiles = np.array([tile for step in steps for tile in step.tiles], dtype=np.int64).reshape(-1, 6)
    totals = np.concatenate(([0], np.cumsum(algebra.area(tiles))))
    return np.diff(totals[np.concatenate(([0], np.cumsum(numbers)))]).tolist()


def _direction(shares: Iterable[RankPlan], plan: Plan) -> int:
    """Direction of the ring: -1 if rows hop from each group to the group before, else +1."""
    for share in shares:
        for stage in share.stages:
            if share.relays and stage.sends:
                hop = stage.sends[0].peer - plan.degrees.group_of(share.rank)
                return 1 if hop % plan.degrees.rows == 1 else -1
    return 1


def _rows(transfer: Transfer | None) -> int:
    return transfer.rows if transfer else 0


def mask_words(mask: Mask) -> str:
    """Describe a mask: `causal mask`, `causal window of 4,096`, `prefix of 512`, `3 causal documents`, `mask of 7 bands`."""
    q0, q1, k0, k1, lo, hi = mask.array.T
    number = len(mask.array)
    if not number:
        return "empty mask"
    size, reach = q1 - q0, int(hi.max()) + 1
    documents = np.array_equal(q0, k0) and np.array_equal(q1, k1) and np.array_equal(hi, np.minimum(size, reach) - 1)
    if documents and int(size.sum()) == mask.seq_len and ((lo == 0).all() or np.array_equal(lo, -hi)):
        causal, windowed = bool((lo == 0).all()), reach < int(size.max())
        kind = "causal" if causal else "two-sided" if windowed else "full"
        if number > 1:
            return f"{number:,} {kind} documents" + f", window {reach:,}" * windowed
        return f"{kind} window of {reach:,}" if windowed else f"{kind} mask"
    if mask == Mask.prefix(mask.seq_len, int(q1[0])):
        return f"prefix of {int(q1[0]):,}"
    return f"mask of {number:,} band{'s' * (number != 1)}"
