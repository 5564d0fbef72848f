"""Models of transformers: gradients of every parameter at cp=2 are those of transformers' own attention, a document at a time."""

from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from longspan.verify.run import verify
from longspan.verify.verify_config import VerifyConfig
from tests.ranks import run_ranks
from tests.train.tiny import make_config, write_corpus
from tests.train.transformers_models import section
from tests.verify.test_run import launch_here

pytestmark = pytest.mark.usefixtures("warm")
assert run_ranks  # `launch_here` starts the ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify")
    write_corpus(folder)
    return folder


def check(folder: Path, model_type: str, entries: dict[str, Any], cases: dict[str, Any], **changes: Any) -> None:
    config = make_config(folder, model=section(model_type, **entries), **changes)
    with patch("longspan.verify.run.launch", launch_here):
        verdicts = verify(config, VerifyConfig(**cases))
    assert [asdict(v) for v in verdicts if not v.passed] == []
    if config.dtype == "fp64" and model_type != "gemma3_text":  # Gemma's norms compute in fp32
        assert max(v.gradient_error for v in verdicts) < 1e-9


@pytest.mark.parametrize("model_type", ["qwen3", "gemma3_text", "gpt_oss", "qwen3_moe"])
def test_gradients_equal_cp_1_under_fsdp(folder: Path, model_type: str) -> None:
    check(folder, model_type, {}, {"dtypes": ("fp64",)})


@pytest.mark.parametrize(
    ("model_type", "entries", "changes", "cases"),
    [
        ("qwen3", {"tie_word_embeddings": True}, {"parallel__wrapper": "ddp", "gradient_accumulation_steps": 2}, {}),
        ("gpt_oss", {}, {"recompute": "full", "parallel__wrapper": "ddp"}, {"layouts": ("balanced",)}),
        ("qwen3", {}, {"recompute": "block"}, {"routes": ("ulysses",)}),
        ("gemma3_text", {}, {}, {"dtypes": ("fp32", "bf16")}),
        ("llama", {}, {"data__seq_len": 45}, {"layers": 1, "tokens": 32, "layouts": ("contiguous",)}),
    ],
)
def test_gradients_equal_cp_1_in_other_runs(
    folder: Path, model_type: str, entries: dict[str, Any], changes: dict[str, Any], cases: dict[str, Any]
) -> None:
    check(folder, model_type, entries, {"dtypes": ("fp64",)} | cases, **changes)


def test_the_router_loss_is_that_of_the_whole_micro_batch(folder: Path) -> None:
    entries = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    config = make_config(folder, model=section("qwen3_moe", **entries), gradient_accumulation_steps=2)
    with patch("longspan.verify.run.launch", launch_here):
        (verdict,) = verify(config, VerifyConfig(dtypes=("fp64",)))
    assert verdict.passed, verdict


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", ["qwen3", "gemma3_text", "gpt_oss", "qwen3_moe"])
def test_gradients_equal_cp_1_with_data_parallelism(folder: Path, model_type: str) -> None:
    cases = {"dtypes": ("fp64", "fp32"), "layouts": ("zigzag", "balanced", "striped"), "routes": ("ring", "usp")}
    for dp_replicate in (1, 2):
        check(
            folder,
            model_type,
            {},
            cases,
            parallel__dp=2,
            parallel__dp_replicate=dp_replicate,
            gradient_accumulation_steps=2,
        )
