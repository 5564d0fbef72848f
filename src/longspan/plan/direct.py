"""The `exchange` and `allgather` routes: KV rows go directly from their owner to the ranks that need them.

In backward, partial gradients of these rows go directly back to the owner.

stage      0          1           2           3                 rows that arrive
exchange   own shard  distance 1  2, 3        4 .. 7            exactly the rows that the rank's queries see
allgather  own shard  all others                                every row of every rank

The source at distance d is rank - d.
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
"""Maximum number of sources per stage of an exchange. Bounds the rows in flight and keeps the stages few."""


@dataclass(frozen=True)
class Exchange:
    """The `exchange` route: a rank receives exactly the rows that its queries see, and receives each row once.

    The rows of a stage arrive while the stage before is computed. After the own shard, stages have 1, 2, 4, 4, ...
    sources.
    """

    layout: Layout
    mask: Mask
    relays: ClassVar[bool] = False
    means: ClassVar[Means] = "messages"

    def stages(self, rank: int) -> tuple[Stage, ...]:
        """Make the stages of `rank`. If the mask needs no exchange, the own shard is the only stage."""
        wanted = by_rank(rows_from(self.layout, self.mask, rank), self.layout.ranks)
        given = by_rank(rows_for(self.layout, self.mask, rank), self.layout.ranks)
        return direct_stages(self.layout, self.mask, rank, wanted, given, _distances(self.layout.ranks))


@dataclass(frozen=True)
class AllGather:
    """The `allgather` route: every rank receives every row, and gradients are reduce-scattered.

    No row moves if no query sees another rank's keys.
    """

    layout: Layout
    mask: Mask
    relays: ClassVar[bool] = False
    means: ClassVar[Means] = "messages"

    def stages(self, rank: int) -> tuple[Stage, ...]:
        """Make the stages of `rank`: one for the own shard, and one for all other shards."""
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
    """Make the own shard's stage, then one stage per group of distances.

    At distance `d` a rank receives the row ranges `wanted[rank - d]` and sends the row ranges `given[rank + d]`.
    """
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
        # Rows of this stage are sent while the stage before is computed; their gradients return after this stage.
        stages[-1] = replace(stages[-1], sends=sends)
        steps = tuple(step(holder) for holder in holders if wanted[holder])
        stages.append(Stage(steps, home_recvs=sends, number=len(stages)))
    return in_step(stages)


def by_rank(runs: np.ndarray, ranks: int) -> list[Runs]:
    """Split rows `(rank, start, stop)`, sorted by rank, into the row ranges of each rank."""
    bounds = np.searchsorted(runs[:, 0], np.arange(ranks + 1)).tolist()
    pairs = [(start, stop) for _, start, stop in runs.tolist()]
    return [tuple(pairs[bounds[rank] : bounds[rank + 1]]) for rank in range(ranks)]


def _distances(ranks: int) -> list[range]:
    """Group the distances: 1, 2..3, 4..7, 8..11, ..., at most four per group."""
    groups, start = [], 1
    while start < ranks:
        stop = min(start + min(start, _MOST_SOURCES), ranks)
        groups.append(range(start, stop))
        start = stop
    return groups
