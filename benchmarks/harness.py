"""What the benchmarks share: whether other programs used the cores, medians with their spread, the printed record."""

import json
import os
import resource
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

FOREIGN_LIMIT = 0.03
"""A repeat counts only if programs other than ours used less than this share of the cores while it ran."""


@dataclass(frozen=True)
class Usage:
    """CPU seconds so far: of the whole machine, and of this process."""

    machine: float
    own: float

    @classmethod
    def now(cls) -> "Usage":
        fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        busy = sum(fields) - fields[3] - fields[4]  # all but idle and iowait; steal counts as foreign
        used = resource.getrusage(resource.RUSAGE_SELF)
        return cls(busy / os.sysconf("SC_CLK_TCK"), used.ru_utime + used.ru_stime)


def foreign_share(before: Usage, seconds: float) -> float:
    """The share of all cores that other programs used since `before`; `seconds` is the wall time. Collective."""
    after = Usage.now()
    own = torch.tensor(after.own - before.own, dtype=torch.float64)
    dist.all_reduce(own)
    return max(0.0, after.machine - before.machine - float(own)) / (seconds * (os.cpu_count() or 1))


@dataclass(frozen=True)
class Spread:
    """Median, and the quartiles around it, of some repeats."""

    median: float
    low: float
    high: float
    repeats: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        if len(values) < 2:
            return cls(*[values[0] if values else float("nan")] * 3, len(values))
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high, len(values))

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f}, n={self.repeats})"


def save(path: Path | None, record: Any) -> None:
    """Write a JSON record where asked for."""
    if path is not None:
        path.write_text(json.dumps(record, indent=1, default=vars) + "\n")
