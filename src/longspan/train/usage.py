"""Work of every rank in a step, and its imbalance.

rank 0   |=== worked ===|-- waiting --|       imbalance: max / mean over ranks of pairs, and of time worked
rank 1   |======== worked ========|---|       slowest rank: 1; the other ranks wait for rank 1
"""

import resource
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from longspan.comm.traffic import Call
from longspan.names import EVEN_LAYOUTS
from longspan.train.train_config import TrainConfig

STAY = 10
"""Number of consecutive imbalanced steps before a warning."""
_WORTH_WARNING = 0.05
"""A step is never imbalanced if the slowest rank spends fewer seconds in attention: timing noise would dominate."""


@dataclass(frozen=True)
class RankUsage:
    """One rank's work in a step, forward and backward."""

    rank: int
    targets: int
    """Valid tokens on the rank's shards."""
    pairs: float
    """Visible (query, key) pairs in attention per batch row, multiplied by the rank's share of the heads."""
    blocks: float
    """128 x 128 blocks of visible pairs, counted like `pairs`."""
    rows_received: int
    """KV rows received in attention."""
    bytes_sent: int
    """Bytes sent in attention."""
    bytes_received: int
    attention_seconds: float
    waiting_seconds: float
    """Part of `attention_seconds` spent waiting for other ranks."""
    peak_memory_bytes: int
    stage: int = 0
    """Pipeline rank. Imbalance compares ranks within a stage, because stages have different layers."""
    dp: int = 0
    """Data-parallel rank. Ranks with equal `dp` share their rows."""
    row_pairs: int = 0
    """Visible pairs of the rank's global rows in all layers: see `visible_pairs`."""

    @property
    def worked_seconds(self) -> float:
        """Seconds in attention, without waiting for other ranks."""
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
    """Sum the attention calls of a step. Peak memory: allocator's peak on CUDA, resident set of the process on CPU."""
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
    """Gather the usage of every rank on every rank. Collective over the world."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, usage)
    return everyone


def pairs_of_step(ranks: Sequence[RankUsage]) -> int:
    """Return the visible pairs of the global batch in all layers. The rows of each dp rank are counted exactly once."""
    return sum({usage.dp: usage.row_pairs for usage in ranks}.values())


@dataclass(frozen=True)
class Balance:
    """Imbalance of a step: max / mean over the ranks of a pipeline stage, then the maximum over stages. 1.0 is balanced."""

    slowest_rank: int
    """Rank with the most time worked in attention."""
    pairs_imbalance: float
    """Imbalance of visible pairs."""
    time_imbalance: float
    """Imbalance of time worked in attention."""

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
    """Warns once when the imbalance exceeds `limit` for `STAY` consecutive steps. A balanced step resets the watch.

    `limit` None disables the warning. Imbalanced pairs cause imbalanced time, so imbalanced time is reported only if pairs
    are balanced. `layouts` are better balanced than the layout in use.
    """

    limit: float | None
    layouts: tuple[str, ...] = ()
    _pairs: list[tuple[int, float]] = field(default_factory=list)
    _time: list[tuple[int, float]] = field(default_factory=list)

    @classmethod
    def of(cls, config: TrainConfig) -> "BalanceWatch":
        known = EVEN_LAYOUTS if config.parallel.cp > 1 else ()
        others = tuple(name for name in known if name != config.parallel.layout)
        return cls(config.imbalance_limit, others)

    def step(self, ranks: Sequence[RankUsage]) -> str | None:
        """Record a step. Returns a warning, or None."""
        if self.limit is None:
            return None
        balance = Balance.of(ranks)
        heaviest = max(ranks, key=lambda usage: usage.pairs).rank
        matters = max(usage.worked_seconds for usage in ranks) >= _WORTH_WARNING
        uneven_pairs = matters and balance.pairs_imbalance > self.limit
        uneven_time = matters and not uneven_pairs and balance.time_imbalance > self.limit
        _note(self._pairs, uneven_pairs, (heaviest, balance.pairs_imbalance))
        _note(self._time, uneven_time, (balance.slowest_rank, balance.time_imbalance))
        if uneven_pairs and len(self._pairs) == STAY:
            layouts = " or ".join(f'"{name}"' for name in self.layouts)
            way_out = f"set parallel.layout={layouts}, or " if layouts else ""
            return self._warning("pairs", self._pairs, f"{way_out}pack rows with similar numbers of visible pairs")
        if uneven_time and len(self._time) == STAY:
            return self._warning(
                "time in attention", self._time, "pairs are balanced: check the device and load of that rank"
            )
        return None

    def _warning(self, what: str, stay: Sequence[tuple[int, float]], hint: str) -> str:
        ranks = [rank for rank, _ in stay]
        most = max(ranks, key=ranks.count)
        mean = sum(imbalance for _, imbalance in stay) / len(stay)
        return (
            f"for {STAY} consecutive steps a rank exceeded {self.limit} x the mean {what}: {mean:.2f} x on average, "
            f"most often rank {most}\nhint: {hint}; or raise imbalance_limit"
        )


def _note(stay: list[tuple[int, float]], uneven: bool, step: tuple[int, float]) -> None:
    if not uneven:
        stay.clear()
    elif len(stay) <= STAY:  # one more than STAY: `step` warns only at a length of exactly STAY
        stay.append(step)


def _over_mean(amounts: Sequence[float]) -> float:
    total = sum(amounts)
    return max(amounts) * len(amounts) / total if total else 1.0
