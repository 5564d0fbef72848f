"""Output of a run on rank 0: a metrics file, TensorBoard events and a progress bar, from measurements of all ranks.

run_dir/metrics.jsonl    one object per step: {"step": 1, "loss": ..., "slowest_rank": 0, ..., "ranks": [...]}
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from torch.utils.tensorboard import SummaryWriter

from longspan.train.flops import Speed
from longspan.train.step import StepResult
from longspan.train.usage import Balance, BalanceWatch, RankUsage

OF_RANKS = (
    "targets", "pairs", "blocks", "rows_received", "bytes_sent", "bytes_received", "attention_seconds", "waiting_seconds",
    "peak_memory_bytes",
)  # fmt: skip
"""Fields of `RankUsage` of which TensorBoard gets the minimum, mean and maximum over ranks."""


class Monitor:
    """Writes and shows the numbers passed to `step` and `evaluation`. Does nothing with `writes=False`, which ranks other
    than 0 pass.

    `steps` is the number of steps of the run, `done` the number completed before a resume.
    """

    def __init__(
        self, run_dir: Path, steps: int, done: int, *, writes: bool, quiet: bool, watch: BalanceWatch | None = None
    ) -> None:
        self._writes, self._watch = writes, watch or BalanceWatch(limit=None)
        if not writes:
            return
        run_dir.mkdir(parents=True, exist_ok=True)
        _forget_after(run_dir / "metrics.jsonl", done)
        self._file = (run_dir / "metrics.jsonl").open("a", buffering=1)
        self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=done + 1)
        self._console = Console(stderr=True)
        self._quiet = quiet
        self._bar = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(10),
            TextColumn("{task.fields[shown]}", table_column=Column(ratio=1, no_wrap=True)), TimeRemainingColumn(),
            console=self._console, disable=quiet, expand=True,
        )  # fmt: skip
        self._task = self._bar.add_task("train", total=steps, completed=done, shown="")

    def __enter__(self) -> Self:
        if self._writes:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writes:
            if not self._quiet:  # stop() prints an empty line even for a disabled bar
                self._bar.stop()
            self._board.close()
            self._file.close()

    def step(self, step: int, result: StepResult, speed: Speed, tokens_seen: int, ranks: Sequence[RankUsage]) -> None:
        """Record one optimizer step. `step` counts from 1, `tokens_seen` from the start of the run."""
        if not self._writes:
            return
        balance = Balance.of(ranks)
        record = {
            "step": step,
            **asdict(result),
            **asdict(speed),
            "tokens_seen": tokens_seen,
            **asdict(balance),
            "ranks": [asdict(usage) for usage in ranks],
        }
        self._file.write(json_line(record) + "\n")
        for name in ("loss", "grad_norm", "learning_rate"):
            self._board.add_scalar(f"train/{name}", record[name], step)
        for name, value in asdict(speed).items():
            if value is not None:
                self._board.add_scalar(f"speed/{name}", value, step)
        for name, value in asdict(balance).items():
            self._board.add_scalar(f"balance/{name}", value, step)
        for name in OF_RANKS:
            values = [getattr(usage, name) for usage in ranks]
            for kind, value in (("min", min(values)), ("mean", sum(values) / len(values)), ("max", max(values))):
                self._board.add_scalar(f"ranks/{name}_{kind}", value, step)
        note = "  step skipped: gradients overflowed" if result.skipped else ""
        shown = f"loss {result.loss:.4f}  {speed_words(speed, brief=True)}{note}{_evenness(balance) if len(ranks) > 1 else ''}"
        self._bar.update(self._task, completed=step, shown=shown)
        if (warning := self._watch.step(ranks)) is not None:
            self._bar.console.print(f"warning: step {step}: {warning}", highlight=False, markup=False, soft_wrap=True)

    def evaluation(self, step: int, loss: float) -> None:
        """Record the mean held-out loss after `step` steps, in nats per token."""
        if not self._writes:
            return
        self._file.write(json_line({"step": step, "heldout_loss": loss}) + "\n")
        self._board.add_scalar("heldout/loss", loss, step)
        self._bar.console.print(f"step {step}: held-out loss {loss:.4f} nats per token")


def speed_words(speed: Speed, brief: bool = False) -> str:
    """Format tokens/s of all devices, of one device unless `brief` (for the progress bar), and MFU if known."""
    one, together = speed.tokens_per_second_per_device, speed.tokens_per_second
    each = "" if brief or one == together or math.isnan(one) else f" ({one:,.0f} a device)"
    return f"{together:,.0f} tokens/s{each}{'' if speed.mfu is None else f'  MFU {speed.mfu:.1%}'}"


def _evenness(balance: Balance) -> str:
    return f"  slowest rank {balance.slowest_rank}: time x{balance.time_imbalance:.2f}, pairs x{balance.pairs_imbalance:.2f}"


def _forget_after(metrics: Path, done: int) -> None:
    """Drop a truncated last line, and the lines of steps after `done`: this run repeats these steps."""
    if not metrics.exists():
        return
    lines = [line for line in metrics.read_text().splitlines(keepends=True) if line.endswith("}\n")]
    metrics.write_text("".join(line for line in lines if json.loads(line)["step"] <= done))


def json_line(record: Any) -> str:
    """Serialise `record` as one line of JSON. NaN and infinity, which JSON lacks, become null."""
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
