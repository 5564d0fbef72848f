"""The plan of one rank, stage by stage: the rows that arrive, the tiles to compute on them, and the rows that leave.

A step computes on one buffer of KV rows from one source. The first step's buffer is the rank's own shard, a row per
slot. A stage is the steps whose rows arrive together, while the stage before is computed. `runs` are half-open row
ranges `((start, stop), ...)`, ascending and not touching.

    stage          0      1      2            3
    ring, rotate   own    r-1    r-2          r-3        one step per stage; a rank passes on the buffer it received
    exchange       own    r-1    r-2, r-3     ...        several steps per stage; each source sends its own shard
    allgather      own    all                            one step per source, in one stage
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from longspan.plan import bands as algebra
from longspan.plan.head_shares import HeadShare

Means = Literal["messages", "collective"]
Runs = tuple[tuple[int, int], ...]


class Tile(NamedTuple):
    """One kernel call: query slots `q0..q1`, buffer rows `k0..k1`, visible where `lo <= slot - row <= hi`; trimmed."""

    q0: int
    q1: int
    k0: int
    k1: int
    lo: int
    hi: int

    @property
    def shape(self) -> "Shape":
        """The tile's shape, with rows and columns counted from the tile's first row and column, as kernels take it."""
        shift = self.q0 - self.k0
        return Shape(self.q1 - self.q0, self.k1 - self.k0, self.lo - shift, self.hi - shift)


class Shape(NamedTuple):
    """A tile of `num_q` rows and `num_k` columns, in which row `i` sees column `j` iff `lo <= i - j <= hi`."""

    num_q: int
    num_k: int
    lo: int
    hi: int

    @property
    def has_lo(self) -> bool:
        return self.lo > 1 - self.num_k

    @property
    def has_hi(self) -> bool:
        return self.hi < self.num_q - 1


@dataclass(frozen=True, slots=True)
class Transfer:
    """Rows sent to or received from `peer`. `runs` are ranges of rows in the buffer that is read or filled.

    `by_head`: the rows are sent as one message per head, because they are part of a head-major buffer.
    """

    peer: int
    runs: Runs
    by_head: bool = False

    @property
    def rows(self) -> int:
        return sum(stop - start for start, stop in self.runs)


@dataclass(frozen=True)
class Step:
    """The tiles on one buffer of `rows` KV rows from `source`, filled by `recv` (None for the own shard or no rows).

    `held`: the slot ranges on `source` that the rows come from. Backward moves keys and values the same way.
    Partial gradients of the buffer arrive from the previous rank (`grad_recv`) and go on to the next (`grad_send`); the
    last rank that adds to these gradients sends them to the owner (`home_send`).
    """

    source: int
    rows: int
    tiles: tuple[Tile, ...]
    held: Runs = ()
    recv: Transfer | None = None
    grad_recv: Transfer | None = None
    grad_send: Transfer | None = None
    home_send: Transfer | None = None

    @cached_property
    def blocks(self) -> int:
        """Blocks of 128 x 128 pairs that hold a visible pair; blocks start at each tile's first row and column."""
        return int(algebra.blocks(np.array(self.tiles, dtype=np.int64).reshape(-1, 6)).sum())


@dataclass(frozen=True, slots=True)
class Stage:
    """Steps whose rows arrive together.

    `sends` leave while the stage is computed, for other ranks' next stage: rows of the step's buffer if the plan
    `relays`, else of the own shard. `home_recvs` are partial gradients of own rows, received after the stage is
    computed. Both ends of a message have the same `number`, and ranks post in the order of numbers.
    """

    steps: tuple[Step, ...]
    sends: tuple[Transfer, ...] = ()
    home_recvs: tuple[Transfer, ...] = ()
    number: int = 0

    @property
    def idle(self) -> bool:
        """Whether nothing is computed, received or sent."""
        return not (self.sends or self.home_recvs or any(step.tiles or step.recv for step in self.steps))


@dataclass(frozen=True)
class RankPlan:
    """All stages of one rank, its own shard first.

    `slots` is the rank's local length, `tokens` the number of slots that hold a token. If `heads` is set, heads are
    exchanged first, and attention runs on `rows` slots and a share of the heads. Otherwise `rows` equals `slots`. `source`
    and `peer` are indices into `ranks`, the ranks of the CP group among which rows travel.
    """

    rank: int
    slots: int
    tokens: int
    rows: int
    ranks: tuple[int, ...]
    stages: tuple[Stage, ...]
    relays: bool = True
    means: Means = "messages"
    heads: HeadShare | None = None

    @property
    def live_rows(self) -> int:
        """Number of rows that hold a token, after the exchange of heads if there is one."""
        return self.tokens if self.heads is None else self.heads.rows

    @property
    def steps(self) -> Iterator[Step]:
        """Iterate over the steps of all stages."""
        return (step for stage in self.stages for step in stage.steps)

    @property
    def blocks(self) -> int:
        """Blocks of 128 x 128 pairs that hold a visible pair, not scaled by the rank's share of the heads."""
        return sum(step.blocks for step in self.steps)

    @property
    def rows_received(self) -> int:
        """KV rows that arrive in one forward, including rows only passed on and rows of the exchange of heads."""
        travelled = sum(step.recv.rows for step in self.steps if step.recv)
        return travelled + self.live_rows - self.tokens

    @property
    def rows_sent(self) -> int:
        """KV rows that leave in one forward, without the exchange of heads."""
        return sum(transfer.rows for stage in self.stages for transfer in stage.sends)

    @property
    def grad_rows_sent(self) -> int:
        """Rows of partial dK, dV sent in one backward, to the next rank or to the owner, without the exchange of heads."""
        return sum(t.rows for step in self.steps for t in (step.grad_send, step.home_send) if t)
