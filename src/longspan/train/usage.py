"""What every rank did in a step, and how even that was.

rank 0   |=== worked ===|-- waiting --|       imbalance: the most over the mean, of pairs and of the time worked
rank 1   |======== worked ========|---|       slowest rank: 1, for which the others waited
"""

import resource
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
import torch.distributed as dist

from longspan.comm.traffic import Call
from longspan.train.train_config import LayoutName, TrainConfig

STAY = 10
"""Steps in a row that have to be uneven before it is told."""
_WORTH_TELLING = 0.05
"""Seconds in attention of the slowest rank: below them, evening out gains nothing, and the clock is mostly noise."""
_EVEN_LAYOUTS = ("balanced", "zigzag")


@dataclass(frozen=True)
class RankUsage:
    """One rank's share of a step, backward included. `targets` are the valid tokens of its shards. What follows is attention's:
    `pairs` and `blocks` (of 128 x 128) per batch row and as on all heads, rows of keys and values, bytes, seconds."""

    rank: int
    targets: int
    pairs: float
    blocks: float
    rows_received: int
    bytes_sent: int
    bytes_received: int
    attention_seconds: float
    waiting_seconds: float
    peak_memory_bytes: int
    stage: int = 0
    """Of the pipeline. Stages have other layers, so ranks are compared within theirs."""
    dp: int = 0
    """Index on the axis dp: ranks of one index share their rows."""
    row_pairs: int = 0
    """Visible pairs of those rows in all layers of the model, each once: see `visible_pairs`."""

    @property
    def worked_seconds(self) -> float:
        """In attention, without the time spent waiting for other ranks."""
        return self.attention_seconds - self.waiting_seconds


def measure(
    rank: int,
    targets: int,
    calls: Sequence[Call],
    stage: int = 0,
    dp: int = 0,
    row_pairs: int = 0,
    *,
    device: torch.device,
) -> RankUsage:
    """Sum the attention calls of a step. Peak memory is the process's resident set, or on CUDA the allocator's peak."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return RankUsage(
        rank,
        targets,
        sum(call.pairs for call in calls),
        sum(call.blocks for call in calls),
        sum(call.rows_received for call in calls),
        sum(call.bytes_sent for call in calls),
        sum(call.bytes_received for call in calls),
        sum(call.seconds_total for call in calls),
        sum(call.seconds_waiting for call in calls),
        peak,
        stage,
        dp,
        row_pairs,
    )


def gather_usage(usage: RankUsage) -> list[RankUsage]:
    """Every rank's usage, on every rank. Collective over the world."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, usage)
    return everyone


def pairs_of_step(ranks: Sequence[RankUsage]) -> int:
    """Visible pairs of the global batch in all layers: the rows of each dp index once."""
    return sum({usage.dp: usage.row_pairs for usage in ranks}.values())


@dataclass(frozen=True)
class Balance:
    """How even a step was: greatest over mean of all ranks of a pipeline's stage, 1.0 is even; of several stages the least even.
    Time is that worked in attention."""

    slowest_rank: int
    pairs_imbalance: float
    time_imbalance: float

    @classmethod
    def of(cls, ranks: Sequence[RankUsage]) -> "Balance":
        slowest = max(ranks, key=lambda usage: usage.worked_seconds)
        stages = [[usage for usage in ranks if usage.stage == stage] for stage in {usage.stage for usage in ranks}]
        return cls(
            slowest.rank,
            max(_over_mean([usage.pairs for usage in stage]) for stage in stages),
            max(_over_mean([usage.worked_seconds for usage in stage]) for stage in stages),
        )


@dataclass
class BalanceWatch:
    """Says so when the imbalance has been over `limit` (None: never) for `STAY` steps in a row: once, until a step was even.

    Uneven pairs make uneven times, so time counts where pairs are even: then it is a rank that is slow. `layouts` are those
    that would share out pairs more evenly than the one in use.
    """

    limit: float | None
    layouts: tuple[str, ...] = ()
    _pairs: list[tuple[int, float]] = field(default_factory=list)
    _time: list[tuple[int, float]] = field(default_factory=list)

    @classmethod
    def of(cls, config: TrainConfig) -> "BalanceWatch":
        known = get_args(LayoutName) if config.parallel.cp > 1 else ()
        others = tuple(name for name in _EVEN_LAYOUTS if name in known and name != config.parallel.layout)
        return cls(config.imbalance_limit, others)

    def step(self, ranks: Sequence[RankUsage]) -> str | None:
        """Take note of a step; what there is to warn of, if anything."""
        if self.limit is None:
            return None
        balance = Balance.of(ranks)
        heaviest = max(ranks, key=lambda usage: usage.pairs).rank
        matters = max(usage.worked_seconds for usage in ranks) >= _WORTH_TELLING
        uneven_pairs = matters and balance.pairs_imbalance > self.limit
        uneven_time = matters and not uneven_pairs and balance.time_imbalance > self.limit
        _note(self._pairs, uneven_pairs, (heaviest, balance.pairs_imbalance))
        _note(self._time, uneven_time, (balance.slowest_rank, balance.time_imbalance))
        if uneven_pairs and len(self._pairs) == STAY:
            layouts = " or ".join(f'"{name}"' for name in self.layouts)
            way_out = f"set parallel.layout={layouts}, or " if layouts else ""
            return self._told("pairs", self._pairs, f"{way_out}pack documents so that rows have about as many pairs")
        if uneven_time and len(self._time) == STAY:
            return self._told(
                "time in attention", self._time, "pairs are even: look at that rank's device and its load"
            )
        return None

    def _told(self, what: str, stay: Sequence[tuple[int, float]], hint: str) -> str:
        ranks = [rank for rank, _ in stay]
        most = max(ranks, key=ranks.count)
        mean = sum(imbalance for _, imbalance in stay) / len(stay)
        return (
            f"{STAY} steps in a row a rank had more than {self.limit} times the mean {what}: {mean:.2f} times on average, "
            f"most often rank {most}\nhint: {hint}; imbalance_limit sets the limit"
        )


def _note(stay: list[tuple[int, float]], uneven: bool, step: tuple[int, float]) -> None:
    if not uneven:
        stay.clear()
    elif len(stay) <= STAY:  # one more than is told of: by its length a stay that goes on is told once
        stay.append(step)


def _over_mean(amounts: Sequence[float]) -> float:
    total = sum(amounts)
    return max(amounts) * len(amounts) / total if total else 1.0
