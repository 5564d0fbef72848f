"""One rank's share of a plan: for each step the tiles to compute, the rows to send and the rows to receive.

A step works on one buffer of key and value rows: step 0 on the rank's own shard (a row per slot), each later step on rows
that a neighbour passed on. `runs` are half-open row ranges `((start, stop), ...)`, ascending, never touching.
"""

from dataclasses import dataclass
from typing import NamedTuple

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


@dataclass(frozen=True, slots=True)
class Step:
    """One buffer of `rows` key rows from `source`: who fills it, what is computed on it, where it goes next.

    Forward uses `recv`, `tiles`, `send`. Backward moves keys and values the same way; the partial gradients of this buffer
    come from the previous rank (`grad_recv`), go on to the next (`grad_send`) and, from the last rank that needs a row,
    straight home (`home_send`). `home_recv` brings rows of the own shard home that were last used at this distance.
    """

    source: int
    rows: int
    tiles: tuple[Tile, ...]
    recv: Transfer | None = None
    send: Transfer | None = None
    grad_recv: Transfer | None = None
    grad_send: Transfer | None = None
    home_send: Transfer | None = None
    home_recv: Transfer | None = None


@dataclass(frozen=True)
class RankPlan:
    """All steps of one rank, its own shard first. `slots` is its local length, `tokens` those that are not dead."""

    rank: int
    slots: int
    tokens: int
    steps: tuple[Step, ...]

    @property
    def rows_received(self) -> int:
        """KV rows that arrive in one forward, rows in transit included."""
        return sum(step.recv.rows for step in self.steps if step.recv)

    @property
    def rows_sent(self) -> int:
        """KV rows that leave in one forward."""
        return sum(step.send.rows for step in self.steps if step.send)

    @property
    def grad_rows_sent(self) -> int:
        """Rows of partial dK, dV that leave in one backward, onwards and home."""
        return sum(t.rows for step in self.steps for t in (step.grad_send, step.home_send) if t)
