"""One rank's share of a plan: stage by stage the rows that arrive, the tiles to compute on them, and the rows that leave.

A step works on one buffer of key and value rows of one source: the first on the rank's own shard (a row per slot). A stage is
the steps whose rows arrive together, while the stage before is computed. `runs` are half-open row ranges
`((start, stop), ...)`, ascending, never touching.

    stage     0        1          2                   ring, rotate: a stage is one step, and passes its own buffer on
    ring      own      r-1        r-2      r-3        exchange: a stage is several sources, each sending from its own shard
    exchange  own      r-1        r-2, r-3            allgather: all sources in one stage
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
    """One band of work: query slots `q0..q1`, buffer rows `k0..k1`, and `lo <= slot - row <= hi`; trimmed."""

    q0: int
    q1: int
    k0: int
    k1: int
    lo: int
    hi: int

    @property
    def shape(self) -> "Shape":
        """The tile without its place: what a kernel needs to know."""
        shift = self.q0 - self.k0
        return Shape(self.q1 - self.q0, self.k1 - self.k0, self.lo - shift, self.hi - shift)


class Shape(NamedTuple):
    """A tile from its own corner: `num_q` rows, `num_k` columns, row `i` sees column `j` iff `lo <= i - j <= hi`."""

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
    """Rows between this rank and `peer`; `runs` number rows of the buffer they leave or enter.

    `by_head`: the rows are one run, but not all, of a buffer that lies head by head, and travel as a message a head.
    """

    peer: int
    runs: Runs
    by_head: bool = False

    @property
    def rows(self) -> int:
        return sum(stop - start for start, stop in self.runs)


@dataclass(frozen=True)
class Step:
    """One buffer of `rows` key rows from `source`, filled by `recv` (None: the own shard, or nothing to fill).

    `held` are the slots of `source` that these rows are.
    Backward moves keys and values the same way. The partial gradients of this buffer come from the previous rank
    (`grad_recv`), go on to the next (`grad_send`) and, from the last rank that adds to them, straight home (`home_send`).
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
        """Blocks of 128 x 128 pairs, each tile's from its own corner, that hold a visible pair."""
        return int(algebra.blocks(np.array(self.tiles, dtype=np.int64).reshape(-1, 6)).sum())


@dataclass(frozen=True, slots=True)
class Stage:
    """Steps whose rows arrive together.

    `sends` leave while the stage is computed, for the next stage of others: rows of the one step's buffer if the plan
    `relays`, else of the own shard. `home_recvs` bring partial gradients of own rows home once the stage is computed. Both ends
    of a message are of one `number`, and ranks post in the order of numbers.
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

    `slots` is the rank's local length, `tokens` those that are not dead. With `heads`, tensors are first exchanged among the
    members of a head group, who then hold `rows` slots of a share of the heads; else `rows` is `slots`. `source` and `peer`
    number the ranks among which rows travel; `ranks` says which ranks of the group these are.
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
        """Rows that are not dead, where attention runs."""
        return self.tokens if self.heads is None else self.heads.rows

    @property
    def steps(self) -> Iterator[Step]:
        """The steps of all stages."""
        return (step for stage in self.stages for step in stage.steps)

    @property
    def blocks(self) -> int:
        """Blocks of 128 x 128 pairs that hold a visible one; of all heads, though the rank may work on a share of these."""
        return sum(step.blocks for step in self.steps)

    @property
    def rows_received(self) -> int:
        """KV rows that arrive in one forward, rows in transit and in the exchange of heads included."""
        travelled = sum(step.recv.rows for step in self.steps if step.recv)
        return travelled + self.live_rows - self.tokens

    @property
    def rows_sent(self) -> int:
        """KV rows that leave in one forward, the exchange of heads apart."""
        return sum(transfer.rows for stage in self.stages for transfer in stage.sends)

    @property
    def grad_rows_sent(self) -> int:
        """Rows of partial dK, dV that leave in one backward, onwards and home, the exchange of heads apart."""
        return sum(t.rows for step in self.steps for t in (step.grad_send, step.home_send) if t)
