"""Run the checks of a stage and return rows. Every check gives a row; only the row of a check that holds has figures."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

Figures = dict[str, Any]
"""Numbers and words by name. Names contain the units: `_ms`, `_mib`, `tflops`."""
SOFT_SECONDS, HARD_SECONDS = 120.0, 180.0
"""Limits of a stage: no check starts after the soft limit; the process is killed at the hard limit."""


class NotHereError(Exception):
    """This machine cannot run the check; the text gives the reason."""


@dataclass(frozen=True)
class Options:
    """Options of the stages. `quick`: small sizes, for tests on a CPU. `folder`: output folder, for files next to the record."""

    device: str = "cuda"
    quick: bool = False
    kernels: tuple[str, ...] = ()
    folder: str = "."

    @property
    def path(self) -> Path:
        return Path(self.folder)


@dataclass(frozen=True)
class Row:
    """The result of one check. `status` "absent": not possible on this machine; "late": not started before the soft limit.
    `error` is the error / limit."""

    stage: int
    name: str
    status: Literal["holds", "fails", "absent", "late"]
    reason: str = ""
    error: float | None = None
    figures: Figures = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.status == "holds" or not self.figures, f"{self.name}: a figure without a check that holds"
        assert self.status == "holds" or self.reason, f"{self.name}: {self.status} without a reason"

    def __str__(self) -> str:
        error = "" if self.error is None else f"{self.error:.2f} of the limit"
        figures = ", ".join(f"{name} {told(value)}" for name, value in self.figures.items() if not _is_long(value))
        return f"{self.status:6} {self.name}: {'; '.join(filter(None, (error, self.reason, figures)))}"


@dataclass(frozen=True)
class Check:
    """A check. `compare` returns the error / limit, or raises. `measure` runs only if error / limit is at most 1."""

    name: str
    compare: Callable[[], float]
    measure: Callable[[], Figures] | None = None

    @classmethod
    def absent(cls, name: str, reason: str) -> "Check":
        """Return a check that this machine cannot run, with the reason."""

        def compare() -> float:
            raise NotHereError(reason)

        return cls(name, compare)


def run_stage(stage: int, checks: Iterable[Check], seconds: float = SOFT_SECONDS) -> Iterator[Row]:
    """Yield a row for each check, in order, and one more if creating the checks raises."""
    began = time.monotonic()
    try:
        for check in checks:
            if time.monotonic() - began > seconds:
                yield Row(stage, check.name, "late", f"the stage's limit of {seconds:.0f} seconds was reached")
            else:
                yield run_check(stage, check)
    except Exception as problem:
        yield Row(stage, "the rest of the stage", "fails", _text(problem))


def run_check(stage: int, check: Check) -> Row:
    """Run one check and return its row. An exception becomes the row's reason."""
    try:
        error = check.compare()
    except Exception as problem:
        return Row(stage, check.name, "absent" if _is_absence(problem) else "fails", _text(problem))
    if not error <= 1:  # NaN fails too
        return Row(stage, check.name, "fails", "the error is above its limit", error)
    try:
        return Row(stage, check.name, "holds", "", error, check.measure() if check.measure else {})
    except Exception as problem:
        status: Literal["holds", "fails"] = "holds" if _is_absence(problem) else "fails"
        return Row(stage, check.name, status, f"correct, but not measured: {_text(problem)}", error)


def told(value: Any) -> str:
    """Format a figure in a few characters."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _is_long(value: Any) -> bool:
    return isinstance(value, list | dict)


def _is_absence(problem: Exception) -> bool:
    """Whether the machine cannot run the check. Out of memory is such a case, and not a wrong result."""
    return isinstance(problem, NotHereError | torch.OutOfMemoryError)


def _text(problem: Exception) -> str:
    first = next(iter(str(problem).splitlines()), "")
    return first if isinstance(problem, NotHereError) else f"{type(problem).__name__}: {first}"
