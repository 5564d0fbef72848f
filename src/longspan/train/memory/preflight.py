"""Preflight: one full step on the longest row before training, to measure every rank's peak memory.

initial weights -> forward, backward, AdamW at learning rate 0 -> peak memory of all ranks -> drop gradients and moments
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table

from longspan.advise.memory import Budget, StageBudget
from longspan.data import Batch
from longspan.errors import SpecError
from longspan.report.words import short_bytes
from longspan.train.monitor import json_line
from longspan.train.step import TrainStep
from longspan.train.train_config import TrainConfig
from longspan.train.usage import measure

_SHOWN = 16
"""Maximum number of ranks in the table. A larger world shows the highest peak of each pipeline rank."""


@dataclass(frozen=True)
class RankPeak:
    """Measured memory of a rank, in bytes: of the allocator on CUDA, of the process on CPU."""

    rank: int
    pp_rank: int
    before: int
    """Bytes before the step, weights included."""
    peak: int
    """Bytes at the peak of the step."""
    expected: int
    """Bytes that the step adds according to `budget_of`."""
    seconds: float

    @property
    def added(self) -> int:
        """Bytes that the step added."""
        return self.peak - self.before


def preflight(step: TrainStep, budget: Budget) -> list[RankPeak]:
    """Run one step on the longest row and return every rank's peak on every rank. Collective over the world.

    Call before loading a checkpoint: weights are unchanged bit for bit, but optimizer state is dropped. The optimizer
    steps with gradients 0 at learning rate 0, to allocate its moments. Raises `SpecError` on a rank that runs out of
    memory.
    """
    rank, before, scale = dist.get_rank(), _held(step.device), replace(step.scale)
    place: StageBudget = budget.stages[budget.topology.coordinates(rank)["pp"]]
    began = time.perf_counter()
    with _named(step.config, rank, budget):
        step.backward(
            [longest_batch(step.config, step.model_config.vocab_size)] * step.config.gradient_accumulation_steps
        )
        for optimizer in step.optimizers:
            for settings in optimizer.param_groups:
                for parameter in settings["params"]:
                    parameter.grad.zero_()
        step.update(0.0)
    seconds = time.perf_counter() - began
    for optimizer in step.optimizers:
        optimizer.state.clear()
        optimizer.zero_grad()
        for settings in optimizer.param_groups:
            settings["lr"] = step.config.optim.lr
    step.scale, step.own_targets = scale, 0
    # Linux updates both counters in batches of some 100 KiB, so the peak may be below `before`.
    peak = max(before, measure(rank, 0, (), device=step.device).peak_memory_bytes)
    own = RankPeak(rank, place.pp_rank, before, peak, place.total - place.parameters, seconds)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone


def longest_batch(config: TrainConfig, vocab_size: int) -> Batch:
    """Return the micro-batch of `RunShape.longest`, with varied ids, so that a router spreads tokens over experts."""
    lengths = (config.data.seq_len,) * config.micro_batch_size
    ids = np.arange(sum(lengths), dtype=np.int64)
    documents = np.split(ids % vocab_size, np.cumsum(lengths)[:-1])
    return Batch.from_documents(documents, numbers=ids)


def tell(peaks: Sequence[RankPeak], budget: Budget, run_dir: Path, *, quiet: bool) -> None:
    """Write `run_dir/preflight.json` and, unless `quiet`, print a table on stderr."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "preflight.json").write_text(json_line([asdict(peak) for peak in peaks]) + "\n")
    if not quiet:
        console = Console(stderr=True, highlight=False)
        console.print(_headline(peaks, budget))
        console.print(_table(peaks))


def _headline(peaks: Sequence[RankPeak], budget: Budget) -> str:
    seconds, many = max(peak.seconds for peak in peaks), budget.micro_batches
    micros = f" of {many} micro-batches" if many > 1 else ""
    return f"preflight: a step{micros} at the longest row fits; it took {seconds:.1f} s"


def _table(peaks: Sequence[RankPeak]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))
    for name in ("rank", "before", "peak", "added", "expected to be added"):
        table.add_column(name, justify="right", no_wrap=True)
    shown = list(peaks)
    if len(peaks) > _SHOWN:
        shown = [
            max((peak for peak in peaks if peak.pp_rank == place), key=lambda peak: peak.peak)
            for place in sorted({peak.pp_rank for peak in peaks})
        ]
    for peak in shown:
        sizes = (peak.before, peak.peak, peak.added, peak.expected)
        table.add_row(str(peak.rank), *map(short_bytes, sizes))
    return table


def _held(device: torch.device) -> int:
    """Return the bytes in use: of the allocator on CUDA, of the resident set on CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def _named(config: TrainConfig, rank: int, budget: Budget) -> Iterator[None]:
    """Convert an out-of-memory error to a `SpecError` that names the rank and the settings that lower its memory."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise SpecError(
            f"preflight: rank {rank} ran out of memory in a step with {budget.slots:,} of the "
            f"{config.micro_batch_size * config.data.seq_len:,} tokens of the longest row: {reason}",
            hint=_ways_out(config),
        ) from error


def _ways_out(config: TrainConfig) -> str:
    ways = {"none": 'recompute to "block" or "full"', "block": 'recompute to "full"', "full": ""}[config.recompute]
    if config.parallel.is_staged or config.parallel.schedule == "zero-bubble":
        ways = ""
    rows = "micro_batch_size lower" if config.micro_batch_size > 1 else "data.seq_len lower"
    more = ["parallel.cp higher", *(["dtype to bf16"] if config.dtype in ("fp32", "fp64") else [])]
    return f"set {'; or '.join(filter(None, (ways, *more, rows)))}; longspan train --dry-run shows the expected memory"
