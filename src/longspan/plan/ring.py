"""The ring: key and value rows hop from rank to rank, each row only as far as a rank that needs it.

distance   0        1        2        3           `direction` +1 sends to rank + 1, -1 to rank - 1
forward    KV  ->   KV  ->   KV  ->   KV          a row stops at its farthest needing rank
backward            dKV ->   dKV ->   dKV         partial gradients start at the nearest needing rank,
           dKV <---------------------- '          and go home in one message from the farthest
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from longspan.plan.cut import Demand, demand_of, tiles_of
from longspan.plan.layout import Layout
from longspan.plan.mask import Mask
from longspan.plan.steps import RankPlan, Step, Tile, Transfer

_Row = tuple[int, int, int, int]
"""A run of key slots `(start, stop, near, far)`, distances along the chosen direction."""


@dataclass(frozen=True)
class Ring:
    """The `ring` route over one layout and mask."""

    layout: Layout
    mask: Mask

    @cached_property
    def direction(self) -> int:
        """+1 or -1: the way round that sends fewer rows in total; +1 where both send the same."""
        demand, ranks = self._demand, self.layout.ranks
        length = demand.stop - demand.start
        upwards, downwards = (length * demand.far).sum(), (length * (ranks - demand.near)).sum()
        return 1 if upwards <= downwards else -1

    def rank_plan(self, rank: int) -> RankPlan:
        """The steps of `rank`, without those that neither compute nor carry anything."""
        ranks = self.layout.ranks
        tiles, source = tiles_of(self.layout, self.mask, rank)
        bounds = np.searchsorted(source, np.arange(ranks + 1)).tolist()
        slots = self.layout.num_slots(rank)
        steps = []
        for distance in range(ranks):
            holder = (rank - self.direction * distance) % ranks
            block = tiles[bounds[holder] : bounds[holder + 1]]
            step = self._step(rank, distance, holder, block, slots)
            if distance == 0 or step != Step(holder, 0, ()):
                steps.append(step)
        return RankPlan(rank, slots, int(self.layout.counts[rank]), tuple(steps))

    @cached_property
    def _demand(self) -> Demand:
        return demand_of(self.layout, self.mask)

    @cached_property
    def _rows(self) -> Sequence[Sequence[_Row]]:
        """For each source its runs `(start, stop, near, far)`, distances counted along the direction."""
        demand, ranks = self._demand, self.layout.ranks
        near, far = demand.near, demand.far
        if self.direction < 0:
            near, far = ranks - far, ranks - near
        table = np.stack((demand.start, demand.stop, near, far), axis=1).tolist()
        bounds = np.searchsorted(demand.source, np.arange(ranks + 1)).tolist()
        return [[tuple(row) for row in table[bounds[s] : bounds[s + 1]]] for s in range(ranks)]

    def _step(self, rank: int, distance: int, source: int, block: np.ndarray, slots: int) -> Step:
        ranks, onward = self.layout.ranks, self.direction
        following, previous = (rank + onward) % ranks, (rank - onward) % ranks
        own = self._rows[rank]
        if distance == 0:
            tiles = tuple(Tile(*row) for row in block.tolist())
            return Step(source, slots, tiles, send=_transfer(following, own, False, lambda near, far: far > 0))
        before = [row for row in self._rows[source] if row[3] >= distance - 1]
        here = [row for row in before if row[3] >= distance]
        if not here and all(row[3] != distance for row in own):
            return Step(source, 0, ())  # Nothing comes this far, and nothing comes home from there.
        rows = sum([row[1] - row[0] for row in here])
        arrived = _transfer(previous, before, True, lambda near, far: far >= distance, by_head=distance > 1)
        home = (rank + onward * distance) % ranks
        return Step(
            source,
            rows,
            _renumber(block, here),
            recv=Transfer(previous, ((0, rows),), arrived.by_head) if arrived else None,
            send=_transfer(following, here, True, lambda near, far: far > distance, by_head=True),
            grad_recv=_transfer(previous, here, True, lambda near, far: near < distance),
            grad_send=_transfer(following, here, True, lambda near, far: near <= distance < far),
            home_send=_transfer(source, here, True, lambda near, far: far == distance),
            home_recv=_transfer(home, own, False, lambda near, far: far == distance),
        )


def _transfer(
    peer: int, rows: Sequence[_Row], packed: bool, wanted: Callable[[int, int], bool], by_head: bool = False
) -> Transfer | None:
    """The rows that are `wanted`, numbered by slot or, in a `packed` buffer, one after the other.

    With `by_head`, one run that is not all of the buffer travels as a message a head.
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


def _renumber(block: np.ndarray, here: Sequence[_Row]) -> tuple[Tile, ...]:
    """Tiles over the source's slots -> over the rows of a buffer that holds only the runs `here`."""
    starts = [row[0] for row in here]
    shifts, offset = [], 0
    for start, stop, _, _ in here:
        shifts.append(offset - start)
        offset += stop - start
    tiles = []
    for q0, q1, k0, k1, lo, hi in block.tolist():
        shift = shifts[bisect_right(starts, k0) - 1]
        tiles.append(Tile(q0, q1, k0 + shift, k1 + shift, lo - shift, hi - shift))
    return tuple(tiles)
