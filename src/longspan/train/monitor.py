"""What a run tells: a metrics file, TensorBoard and a progress bar (rank 0), from what every rank measured.

run_dir/metrics.jsonl    one object a step: {"step": 1, "loss": ..., "ranks": [{"pairs": ...}, ...]}
"""

import json
import math
import resource
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

from longspan.comm.traffic import Call
from longspan.train.step import StepResult


@dataclass(frozen=True)
class RankUsage:
    """One rank's share of a step. Bytes are those of attention; pairs count per batch row and as on all heads, backward
    included."""

    rank: int
    peak_memory_bytes: int
    pairs: float
    bytes_sent: int
    bytes_received: int
    attention_seconds: float
    waiting_seconds: float


def measure(rank: int, calls: Sequence[Call]) -> RankUsage:
    """Sum the attention calls of a step. Peak memory is the process's resident set, or on CUDA the allocator's peak."""
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return RankUsage(
        rank,
        peak,
        sum(call.pairs for call in calls),
        sum(call.bytes_sent for call in calls),
        sum(call.bytes_received for call in calls),
        sum(call.seconds_total for call in calls),
        sum(call.seconds_waiting or 0.0 for call in calls),
    )


def gather_usage(usage: RankUsage) -> list[RankUsage]:
    """Every rank's usage, on every rank. Collective over the world."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, usage)
    return everyone


class Monitor:
    """Writes and shows what `step` and `evaluation` are given; on ranks other than 0 does nothing."""

    def __init__(self, run_dir: Path, steps: int, done: int, *, writes: bool, quiet: bool) -> None:
        self._writes = writes
        if not writes:
            return
        run_dir.mkdir(parents=True, exist_ok=True)
        _forget_after(run_dir / "metrics.jsonl", done)
        self._file = (run_dir / "metrics.jsonl").open("a", buffering=1)
        self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=done + 1)
        self._console = Console(stderr=True)
        self._quiet = quiet
        self._bar = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[told]}"), TimeRemainingColumn(),
            console=self._console, disable=quiet,
        )  # fmt: skip
        self._task = self._bar.add_task("train", total=steps, completed=done, told="")

    def __enter__(self) -> Self:
        if self._writes:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writes:
            if not self._quiet:  # rich ends a log with an empty line, of a bar that was never shown too
                self._bar.stop()
            self._board.close()
            self._file.close()

    def step(self, step: int, result: StepResult, seconds: float, tokens_seen: int, ranks: Sequence[RankUsage]) -> None:
        """One optimizer step; `step` counts from 1."""
        if not self._writes:
            return
        speed = result.tokens / seconds
        record = {
            "step": step,
            **asdict(result),
            "seconds": seconds,
            "tokens_per_second": speed,
            "tokens_seen": tokens_seen,
            "ranks": [asdict(usage) for usage in ranks],
        }
        self._file.write(json_line(record) + "\n")
        for name in ("loss", "grad_norm", "learning_rate"):
            self._board.add_scalar(f"train/{name}", record[name], step)
        self._board.add_scalar("speed/tokens_per_second", speed, step)
        for usage in ranks:
            for name, value in asdict(usage).items():
                if name != "rank":
                    self._board.add_scalar(f"rank{usage.rank}/{name}", value, step)
        note = "  step skipped: gradients overflowed" if result.skipped else ""
        self._bar.update(self._task, completed=step, told=f"loss {result.loss:.4f}  {speed:,.0f} tokens/s{note}")

    def evaluation(self, step: int, loss: float) -> None:
        """Mean held-out loss after `step` steps."""
        if not self._writes:
            return
        self._file.write(json_line({"step": step, "heldout_loss": loss}) + "\n")
        self._board.add_scalar("heldout/loss", loss, step)
        self._bar.console.print(f"step {step}: held-out loss {loss:.4f} nats per token")


def _forget_after(metrics: Path, done: int) -> None:
    """Drop what was told of steps after `done`, which this run does (again), and a line that was cut short."""
    if not metrics.exists():
        return
    lines = [line for line in metrics.read_text().splitlines(keepends=True) if line.endswith("}\n")]
    metrics.write_text("".join(line for line in lines if json.loads(line)["step"] <= done))


def json_line(record: Any) -> str:
    """`record` as JSON on one line. JSON has no NaN and no infinity: a float that is not finite becomes null."""
    return json.dumps(_finite(record), allow_nan=False)


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: _finite(entry) for key, entry in value.items()}
        case list() | tuple():
            return [_finite(entry) for entry in value]
    return value
