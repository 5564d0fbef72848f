"""Every case of a verification, on ranks of the pool in place of new processes."""

from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from pydantic import ValidationError

from longspan.train.train_config import TrainConfig
from longspan.verify.baseline import run_baseline
from longspan.verify.evidence import Evidence
from longspan.verify.replay import replay_and_leave
from longspan.verify.run import verify
from longspan.verify.verify_config import VerifyConfig
from tests.ranks import run_ranks
from tests.train.tiny import make_config, write_corpus
from tests.verify.test_rules import replay_on_ranks

pytestmark = pytest.mark.usefixtures("warm")


def launch_here(function: Any, arguments: tuple[TrainConfig, int, Path], ranks: int) -> Evidence:
    """In the place of `longspan.comm.launch.launch`."""
    if function is run_baseline:
        assert ranks == 1
        with patch("os.cpu_count", return_value=1):
            return run_baseline(*arguments)
    assert function is replay_and_leave
    return run_ranks(ranks, replay_on_ranks, *arguments, "nothing")[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify")
    write_corpus(folder)
    return folder


@pytest.mark.parametrize(
    ("changes", "cases"),
    [
        ({}, {"cp": (2, 4), "layouts": ("zigzag", "contiguous"), "dtypes": ("fp64", "fp32"), "steps": 3}),
        (
            {"gradient_accumulation_steps": 2},
            {"cp": (2,), "layouts": ("zigzag", "contiguous"), "dtypes": ("bf16", "fp16"), "steps": 3},
        ),
        (
            {"parallel__dp": 2, "gradient_accumulation_steps": 2, "micro_batch_size": 2},
            {"dtypes": ("fp64", "fp16")},
        ),
        ({"parallel__wrapper": "ddp", "model__windows": [9, None]}, {"cp": (2, 3)}),
        ({"recompute": "block", "model__qk_norm": True, "model__tie_embeddings": True}, {"dtypes": ("fp64", "bf16")}),
        ({}, {"routes": ("exchange", "upipe", "usp"), "dtypes": ("fp64",)}),
        ({"parallel__pad_to_multiple_of": 16, "data__seq_len": 45}, {"cp": (2, 4), "dtypes": ("fp64",)}),
    ],
)
def test_every_case_passes(folder: Path, changes: dict[str, Any], cases: dict[str, Any]) -> None:
    asked = VerifyConfig(**cases)
    dtypes = asked.dtypes or ("fp64", "fp32")  # of a run in fp32 on CPU
    told: list[str] = []
    with patch("longspan.verify.run.launch", launch_here):
        verdicts = verify(make_config(folder, model__init_std=0.1, **changes), asked, told.append)
    assert [(v.dtype, v.cp, v.layout, v.route) for v in verdicts] == [
        (dtype, cp, layout, route)
        for dtype in dtypes for cp in asked.cp for layout in asked.layouts for route in asked.routes
    ]  # fmt: skip
    assert [asdict(v) for v in verdicts if not v.passed] == []
    assert all(len(v.drift) == asked.steps for v in verdicts)
    baselines = dict.fromkeys(x for dtype in dtypes for x in (dtype, *(["fp32"] if dtype[-2:] == "16" else [])))
    assert sorted(line for line in told if line.startswith("cp=1 ")) == sorted(f"cp=1 {dtype}" for dtype in baselines)


def test_cases_that_the_configuration_does_not_allow_are_refused_before_any_runs(folder: Path) -> None:
    config = make_config(folder, dtype="fp32", parallel__wrapper="ddp")
    with patch("longspan.verify.run.launch") as launch, pytest.raises(ValidationError, match="DDP keeps one copy"):
        verify(config, VerifyConfig(dtypes=("fp64", "bf16")))
    launch.assert_not_called()


@pytest.mark.parametrize(
    "values", [{"cp": ()}, {"cp": (0,)}, {"layouts": ("spiral",)}, {"dtypes": ("fp8",)}, {"steps": 0}, {"degree": 2}]
)
def test_cases_that_make_no_sense_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        VerifyConfig(**values)
