"""`longspan verify`: CP=1 once for each type, then every degree and layout against it."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from longspan.comm.launch import launch
from longspan.train.config import TrainConfig
from longspan.train.run import prepare_corpus
from longspan.verify.baseline import run_baseline
from longspan.verify.config import VerifyConfig
from longspan.verify.evidence import Evidence
from longspan.verify.judge import EXACT, Verdict, judge
from longspan.verify.replay import replay_and_leave


def verify(config: TrainConfig, cases: VerifyConfig, told: Callable[[str], None] = lambda text: None) -> list[Verdict]:
    """Run every case and return its verdict. `told` hears what is being run, for a progress display.

    Each side runs in processes of its own on this machine: one for CP=1, `cp x dp` for a case. A case that the configuration
    does not allow raises before any is run.
    """
    replays = [
        _with(config, dtype=dtype, parallel=_with(config.parallel, cp=cp, layout=layout))
        for dtype in cases.dtypes
        for cp in cases.cp
        for layout in cases.layouts
    ]
    prepare_corpus(config)
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="longspan-verify-") as folder:
        files = _Files(Path(folder))
        baselines: dict[str, Evidence] = {}

        def baseline(dtype: str) -> Evidence:
            if dtype not in baselines:
                told(f"cp=1 {dtype}")
                changed = _with(config, dtype=dtype)
                baselines[dtype] = launch(run_baseline, (changed, cases.steps, files.next()), 1)
            return baselines[dtype]

        for replay in replays:
            dtype, cp, layout = replay.dtype, replay.parallel.cp, replay.parallel.layout
            own, exact = baseline(dtype), baseline(dtype if dtype in EXACT else "fp32")
            told(f"cp={cp} {layout} {dtype}")
            ranks = cp * (replay.parallel.dp or 1)
            seen = launch(replay_and_leave, (replay, cases.steps, files.next()), ranks)
            verdicts.append(judge(cp, layout, dtype, seen, own, exact))
    return verdicts


class _Files:
    """Names for gradient files."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0

    def next(self) -> Path:
        self._count += 1
        return self._folder / f"gradients-{self._count}.safetensors"


def _with(record: Any, **changes: Any) -> Any:
    """A checked copy of a frozen record with some fields changed."""
    return type(record).model_validate(
        {**{name: getattr(record, name) for name in type(record).model_fields}, **changes}
    )
