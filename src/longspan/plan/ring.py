"""The `ring` and `rotate` routes: KV rows hop from rank to rank, each row only as far as the last rank that needs it.

distance   0        1        2        3           `direction` +1 sends to rank + 1, -1 to rank - 1
forward    KV  ->   KV  ->   KV  ->   KV          a row stops at the farthest rank that needs it
backward            dKV ->   dKV ->   dKV         partial gradients start at the nearest rank that needs the row,
           dKV <---------------------- '          and return to the owner in one message from the farthest

`rotate` has the same schedule, but each hop is one all-to-all of all ranks.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from longspan.plan.cut import Demand, demand_of, tiles_of
from longspan.plan.layout import Layout
from longspan.plan.mask import Mask
from longspan.plan.steps import Means, Stage, Step, Tile, Transfer

_Row = tuple[int, int, int, int]
"""A range of key slots `(start, stop, near, far)`, with the distances to the nearest and farthest rank that need it."""


@dataclass(frozen=True)
class Ring:
    """The `ring` route over one layout and mask."""

    layout: Layout
    mask: Mask
    relays: ClassVar[bool] = True
    means: ClassVar[Means] = "messages"

    @cached_property
    def direction(self) -> int:
        """+1 or -1: the direction that sends fewer rows in total; +1 if equal."""
        demand, ranks = self._demand, self.layout.ranks
        length = demand.stop - demand.start
        upwards, downwards = (length * demand.far).sum(), (length * (ranks - demand.near)).sum()
        return 1 if upwards <= downwards else -1

    def stages(self, rank: int) -> tuple[Stage, ...]:
        """Make the stages of `rank`, one step each."""
        return in_step(self._all_stages(rank, self.layout.ranks))

    def _all_stages(self, rank: int, number: int) -> Iterator[Stage]:
        tiles, source = tiles_of(self.layout, self.mask, rank)
        bounds = np.searchsorted(source, np.arange(self.layout.ranks + 1)).tolist()
        for distance in range(number):
            holder = (rank - self.direction * distance) % self.layout.ranks
            yield self._stage(rank, distance, holder, tiles[bounds[holder] : bounds[holder + 1]])

    @cached_property
    def _demand(self) -> Demand:
        return demand_of(self.layout, self.mask)

    @cached_property
    def _rows(self) -> Sequence[Sequence[_Row]]:
        """For each source, the slot ranges that leave the source. Distances count along `direction`."""
        demand, ranks = self._demand, self.layout.ranks
        near, far = demand.near, demand.far
        if self.direction < 0:
            near, far = ranks - far, ranks - near
        table = np.stack((demand.start, demand.stop, near, far), axis=1).tolist()
        bounds = np.searchsorted(demand.source, np.arange(ranks + 1)).tolist()
        return [[tuple(row) for row in table[bounds[s] : bounds[s + 1]]] for s in range(ranks)]

    def _stage(self, rank: int, distance: int, source: int, block: np.ndarray) -> Stage:
        ranks, onward = self.layout.ranks, self.direction
        following, previous = (rank + onward) % ranks, (rank - onward) % ranks
        own = self._rows[rank]
        if distance == 0:
            tiles = tuple(Tile(*row) for row in block.tolist())
            sends = _transfer(following, own, False, lambda near, far: far > 0)
            slots = self.layout.num_slots(rank)
            return Stage((Step(source, slots, tiles, ((0, slots),)),), as_tuple(sends))
        before = [row for row in self._rows[source] if row[3] >= distance - 1]
        here = [row for row in before if row[3] >= distance]
        if not here and all(row[3] != distance for row in own):
            # No row travels this far, and no gradient of this rank returns from this distance.
            return Stage((Step(source, 0, ()),), number=distance)
        held = tuple([row[:2] for row in here])
        rows = sum([stop - start for start, stop in held])
        arrived = _transfer(previous, before, True, lambda near, far: far >= distance, by_head=distance > 1)
        step = Step(
            source,
            rows,
            renumber(block, held),
            held,
            recv=Transfer(previous, ((0, rows),), arrived.by_head) if arrived else None,
            grad_recv=_transfer(previous, here, True, lambda near, far: near < distance),
            grad_send=_transfer(following, here, True, lambda near, far: near <= distance < far),
            home_send=_transfer(source, here, True, lambda near, far: far == distance),
        )
        sends = _transfer(following, here, True, lambda near, far: far > distance, by_head=True)
        home = (rank + onward * distance) % ranks
        homeward = _transfer(home, own, False, lambda near, far: far == distance)
        return Stage((step,), as_tuple(sends), as_tuple(homeward), distance)


class Rotation(Ring):
    """The `rotate` route: every rank takes part in every hop, even with nothing to send."""

    means: ClassVar[Means] = "collective"

    def stages(self, rank: int) -> tuple[Stage, ...]:
        farthest = max((far for rows in self._rows for *_, far in rows), default=0)
        return tuple(self._all_stages(rank, 1 + farthest))


def in_step(stages: Iterable[Stage]) -> tuple[Stage, ...]:
    """Collapse consecutive idle stages into one, and drop idle stages at the end.

    The idle stage that stays makes a rank post a receive after all messages of its earlier stages, as the peer does with
    the send. Backends that finish batches in posting order (NCCL) then cannot deadlock.
    """
    kept: list[Stage] = []
    for stage in stages:
        if not (kept and kept[-1].idle and stage.idle):
            kept.append(stage)
    if len(kept) > 1 and kept[-1].idle:
        kept.pop()
    return tuple(kept)


def as_tuple(transfer: Transfer | None) -> tuple[Transfer, ...]:
    """Wrap a transfer in a tuple; None gives an empty tuple."""
    return () if transfer is None else (transfer,)


def renumber(block: np.ndarray, here: Sequence[tuple[int, int]]) -> tuple[Tile, ...]:
    """Turn tiles over the source's slots into tiles over the rows of a buffer that holds only the slot ranges `here`."""
    starts = [start for start, _ in here]
    shifts, offset = [], 0
    for start, stop in here:
        shifts.append(offset - start)
        offset += stop - start
    tiles = []
    for q0, q1, k0, k1, lo, hi in block.tolist():
        shift = shifts[bisect_right(starts, k0) - 1]
        tiles.append(Tile(q0, q1, k0 + shift, k1 + shift, lo - shift, hi - shift))
    return tuple(tiles)


def _transfer(
    peer: int, rows: Sequence[_Row], packed: bool, wanted: Callable[[int, int], bool], by_head: bool = False
) -> Transfer | None:
    """Make the transfer of all rows for which `wanted(near, far)` holds; None if there are none.

    Rows are numbered by slot, or consecutively in a `packed` buffer. With `by_head`, a single range that is only part of
    the buffer is sent as one message per head.
    """
    runs: list[tuple[int, int]] = []
    offset = 0
    for start, stop, near, far in rows:
        first = offset if packed else start
        offset += stop - start
        if wanted(near, far):
            last = first + stop - start
            if runs and runs[-1][1] == first:
                runs[-1] = (runs[-1][0], last)
            else:
                runs.append((first, last))
    if not runs:
        return None
    return Transfer(peer, tuple(runs), by_head and len(runs) == 1 and runs[0][1] - runs[0][0] < offset)
