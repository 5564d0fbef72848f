"""Routes on which rows go straight from the rank that holds them to those that want them, and their gradients straight back.

distance   0      1       2, 3         4 .. 7           from rank - distance
exchange   own    few rows of few ranks at a time       exactly the rows that the rank's queries see
allgather  own    everything at once                    every row of every rank
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np

from longspan.plan.cut import demand_of, rows_for, rows_from, tiles_of
from longspan.plan.layout import Layout
from longspan.plan.mask import Mask
from longspan.plan.ring import in_step, renumber
from longspan.plan.steps import Means, Runs, Stage, Step, Tile, Transfer

_MOST_SOURCES = 4
"""Sources of one stage of an exchange, at most: bounds the rows in flight, while stages stay few."""


@dataclass(frozen=True)
class Exchange:
    """The `exchange` route: no row moves that the receiver does not need, and none arrives twice.

    The nearest source comes alone, under the own tiles; later stages hold more of them, each under the tiles of the one before.
    """

    layout: Layout
    mask: Mask
    relays: ClassVar[bool] = False
    means: ClassVar[Means] = "messages"

    def stages(self, rank: int) -> tuple[Stage, ...]:
        """The stages of `rank`; on a mask that needs no exchange there is only the own one."""
        wanted = by_rank(rows_from(self.layout, self.mask, rank), self.layout.ranks)
        given = by_rank(rows_for(self.layout, self.mask, rank), self.layout.ranks)
        return direct_stages(self.layout, self.mask, rank, wanted, given, _distances(self.layout.ranks))


@dataclass(frozen=True)
class AllGather:
    """The `allgather` route: every rank gets every row, unless no query sees a foreign key; gradients are reduce-scattered."""

    layout: Layout
    mask: Mask
    relays: ClassVar[bool] = False
    means: ClassVar[Means] = "messages"

    def stages(self, rank: int) -> tuple[Stage, ...]:
        """The own shard, then all others."""
        ranks, counts = self.layout.ranks, self.layout.counts.tolist()
        whole: list[Runs] = [((0, count),) if count and self._needed else () for count in counts]
        wanted = [() if source == rank else runs for source, runs in enumerate(whole)]
        given = [() if peer == rank else whole[rank] for peer in range(ranks)]
        return direct_stages(self.layout, self.mask, rank, wanted, given, [range(1, ranks)])

    @cached_property
    def _needed(self) -> bool:
        return len(demand_of(self.layout, self.mask).source) > 0


def direct_stages(
    layout: Layout,
    mask: Mask,
    rank: int,
    wanted: Sequence[Runs],
    given: Sequence[Runs],
    groups: Sequence[Sequence[int]],
) -> tuple[Stage, ...]:
    """The own shard, then a stage for each group of distances: rows `wanted` from `rank - d`, rows `given` to `rank + d`."""
    ranks = layout.ranks
    tiles, source = tiles_of(layout, mask, rank)
    bounds = np.searchsorted(source, np.arange(ranks + 1)).tolist()

    def step(holder: int) -> Step:
        runs = wanted[holder]
        rows = sum(stop - start for start, stop in runs)
        all_rows = Transfer(holder, ((0, rows),))
        block = renumber(tiles[bounds[holder] : bounds[holder + 1]], runs)
        return Step(holder, rows, block, runs, recv=all_rows, home_send=all_rows)

    own, slots = tuple(Tile(*row) for row in tiles[bounds[rank] : bounds[rank + 1]].tolist()), layout.num_slots(rank)
    stages = [Stage((Step(rank, slots, own, ((0, slots),)),))]
    for group in groups:
        peers = [(rank + d) % ranks for d in group]
        holders = [(rank - d) % ranks for d in group]
        sends = tuple(Transfer(peer, given[peer]) for peer in peers if given[peer])
        # What a stage needs leaves while the one before it is computed. Its gradients come home after it.
        stages[-1] = replace(stages[-1], sends=sends)
        stages.append(Stage(tuple(step(holder) for holder in holders if wanted[holder]), home_recvs=sends))
    return in_step(stages)


def by_rank(runs: np.ndarray, ranks: int) -> list[Runs]:
    """Rows `(rank, start, stop)`, sorted by rank, as the runs of each rank."""
    bounds = np.searchsorted(runs[:, 0], np.arange(ranks + 1)).tolist()
    pairs = [(start, stop) for _, start, stop in runs.tolist()]
    return [tuple(pairs[bounds[rank] : bounds[rank + 1]]) for rank in range(ranks)]


def _distances(ranks: int) -> list[range]:
    """Distances 1, 2 to 3, 4 to 7, 8 to 11, ..., four at a time from there on."""
    groups, start = [], 1
    while start < ranks:
        stop = min(start + min(start, _MOST_SOURCES), ranks)
        groups.append(range(start, stop))
        start = stop
    return groups
