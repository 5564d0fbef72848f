"""The record of a machine: the environment and each stage's rows, in one JSON file."""

import json
import platform
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.device.rows import Row

ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True)
class Stage:
    """The rows of a stage, its duration, and `taken`, the machine's local time."""

    taken: str
    seconds: float
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Record:
    """The results on one machine with one version of all software."""

    environment: dict[str, Any]
    stages: dict[int, Stage]

    @classmethod
    def of(cls, path: Path, environment: dict[str, Any]) -> "Record":
        """Read the record at `path` if its environment is equal; else return a record without stages."""
        if path.exists():
            kept = json.loads(path.read_text())
            if kept["environment"] == json.loads(json.dumps(environment)):
                return cls(environment, {int(number): _stage(**stage) for number, stage in kept["stages"].items()})
        return cls(environment, {})

    def with_stage(self, number: int, rows: Sequence[Row], seconds: float) -> "Record":
        """Replace rows by name. Earlier rows that were not run or not reached this time stay."""
        before = {row.name: row for row in self.stages[number].rows} if number in self.stages else {}
        now = {row.name: row for row in rows if row.status != "late" or row.name not in before}
        stage = Stage(time.strftime("%Y-%m-%d %H:%M"), round(seconds, 1), tuple({**before, **now}.values()))
        return replace(self, stages=dict(sorted({**self.stages, number: stage}.items())))

    @property
    def rows(self) -> list[Row]:
        return [row for stage in self.stages.values() for row in stage.rows]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def environment(device: str, quick: bool) -> dict[str, Any]:
    """Return all versions and devices that figures depend on."""
    found = {
        "device": device,
        "devices": _devices() if device == "cuda" else [platform.processor() or platform.machine()],
        "quick": quick,
        "longspan": version("longspan"),
        "commit": _commit(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version()))
        if device == "cuda" and dist.is_nccl_available()
        else None,
        "python": platform.python_version(),
        "system": platform.platform(),
    }
    return {name: value for name, value in found.items() if value is not None}


def _devices() -> list[str]:
    each = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [f"{p.name}, {p.total_memory / 2**30:.0f} GiB, capability {p.major}.{p.minor}" for p in each]


def _commit() -> str | None:
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _stage(taken: str, seconds: float, rows: list[dict[str, Any]]) -> Stage:
    return Stage(taken, seconds, tuple(Row(**row) for row in rows))
