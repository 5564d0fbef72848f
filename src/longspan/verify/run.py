"""`longspan verify`: run CP=1 once per dtype, then compare every degree, layout and route with CP=1."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from longspan.comm.devices import device_type
from longspan.comm.launch import launch
from longspan.train.axes import topology_of
from longspan.train.run import check_ranks, prepare_corpus
from longspan.train.step import check_plan
from longspan.train.train_config import TrainConfig, model_config
from longspan.train.transformers_micro import probe_model
from longspan.verify.baseline import run_baseline
from longspan.verify.cut import cut
from longspan.verify.evidence import Evidence
from longspan.verify.judge import EXACT, Verdict, judge
from longspan.verify.replay import replay_and_leave
from longspan.verify.verify_config import VerifyConfig, default_dtypes


def verify(config: TrainConfig, cases: VerifyConfig, told: Callable[[str], None] = lambda text: None) -> list[Verdict]:
    """Run every case and return its verdict. `told(text)` is called before each side runs, for a progress display.

    Each side runs in new processes on this machine: one for CP=1, the world size of all axes for a case. An invalid case
    raises before any case runs. If `cases.layers` or `cases.tokens` is set, all sides run the cut configuration (see `cut`).
    """
    config = cut(config, cases)
    replays = [
        _with(
            config,
            dtype=dtype,
            parallel=_with(config.parallel, cp=cp, layout=layout, **_route(config, route), comm_dtype=comm_dtype),
        )
        for dtype in cases.dtypes or default_dtypes(config.dtype, device_type(config.parallel.device))
        for comm_dtype in cases.comm_dtypes
        for cp in cases.cp
        for layout in cases.layouts
        for route in cases.routes
    ]
    for replay in replays:
        check_plan(replay, model_config(replay))
        check_ranks(replay)
    probe_model(config, model_config(config))
    prepare_corpus(config)
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="longspan-verify-") as folder:
        files = _Files(Path(folder))
        baselines: dict[tuple[str, str | None], Evidence] = {}

        def baseline(dtype: str, comm_dtype: str | None) -> Evidence:
            if (dtype, comm_dtype) not in baselines:
                told(f"cp=1 {dtype}{_rounded(comm_dtype)}")
                parallel = _with(config.parallel, cp=1, route="ring", inner=None, heads_per_stage=None, costs=None)
                changed = _with(config, dtype=dtype, parallel=_with(parallel, comm_dtype=comm_dtype))
                baselines[dtype, comm_dtype] = launch(run_baseline, (changed, cases.steps, files.next()), 1)
            return baselines[dtype, comm_dtype]

        for replay in replays:
            dtype, parallel = replay.dtype, replay.parallel
            own, exact = baseline(dtype, parallel.comm_dtype), baseline(dtype if dtype in EXACT else "fp32", None)
            told(f"cp={parallel.cp} {parallel.layout} {parallel.route} {dtype}{_rounded(parallel.comm_dtype)}")
            seen = launch(replay_and_leave, (replay, cases.steps, files.next()), topology_of(replay).world)
            verdicts.append(judge(replay, seen, own, exact))
    return verdicts


def _route(config: TrainConfig, route: str) -> dict[str, Any]:
    """Return the changes that set `route`: none for the configured route, else the route with its options reset."""
    if route == config.parallel.route:
        return {}
    return {"route": route, "inner": None, "heads_per_stage": None, "costs": None}


def _rounded(comm_dtype: str | None) -> str:
    return "" if comm_dtype is None else f", {comm_dtype} in flight"


class _Files:
    """Paths for gradient files."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0

    def next(self) -> Path:
        self._count += 1
        return self._folder / f"gradients-{self._count}.safetensors"


def _with(record: Any, **changes: Any) -> Any:
    """Return a validated copy of a frozen record with some fields changed."""
    return type(record).model_validate(
        {**{name: getattr(record, name) for name in type(record).model_fields}, **changes}
    )
