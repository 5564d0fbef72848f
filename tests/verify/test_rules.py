"""Breaking any one rule of DESIGN.md section 2 makes `verify` fail; breaking none does not."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from longspan.data import Batch, Loader
from longspan.train.train_config import TrainConfig
from longspan.verify.baseline import run_baseline
from longspan.verify.evidence import Evidence
from longspan.verify.judge import Verdict, judge
from longspan.verify.replay import run_replay
from tests.oracle import raised
from tests.ranks import run_ranks
from tests.train.tiny import make_config, make_meshes, write_corpus
from tests.verify.faults import FAULTS, breaking

STEPS = 2
INPUT_FAULTS = (
    "shift_after_sharding", "shift_twice", "a_target_across_documents", "local_positions", "positions_of_the_row",
)  # fmt: skip


def replay_on_ranks(group: Any, rank: int, config: TrainConfig, steps: int, gradients: Path, fault: str) -> Evidence:
    with breaking(fault):
        return run_replay(config, make_meshes(config), steps, gradients)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rules")
    write_corpus(folder, documents=24)
    return folder


IN_FP32 = ("one_dropped_document_boundary", "mean_of_the_means_of_micro_batches", "positions_of_the_row")
"""Of means, of documents and of positions one each, within the wider bounds of fp32; the others in fp32 are nightly."""
IN_TURN = {("ring", "fp8"), ("exchange", "bf16"), ("usp", "fp8"), ("upipe", "bf16")}
"""Routes and communication dtypes in turn; the other pairs are nightly."""

_baselines: dict[str, Evidence] = {}


def verdict(folder: Path, dtype: str, fault: str, **changes: Any) -> Verdict:
    # Nothing is held out: that split depends on the corpus' path, and some faults on the rows.
    config = make_config(
        folder, dtype=dtype, gradient_accumulation_steps=2, parallel__cp=2, data__heldout_fraction=0.0, **changes
    )

    def baseline(comm_dtype: str | None) -> Evidence:
        key = f"{dtype} dp {config.parallel.dp} {comm_dtype}"
        if key not in _baselines:
            parallel = config.parallel.model_copy(update={"comm_dtype": comm_dtype})
            rounding = config.model_copy(update={"parallel": parallel})
            _baselines[key] = run_baseline(rounding, STEPS, folder / f"baseline-{len(_baselines)}.safetensors")
        return _baselines[key]

    ranks = 2 * (config.parallel.dp or 1)
    seen = run_ranks(ranks, replay_on_ranks, config, STEPS, folder / "replay.safetensors", fault)[0]
    return judge(config, seen, baseline(config.parallel.comm_dtype), baseline(None))


@pytest.mark.parametrize("dtype", ["fp64", "fp32"])
@pytest.mark.parametrize("layout", ["zigzag", "striped", "contiguous"])
def test_nothing_broken_passes(folder: Path, dtype: str, layout: str) -> None:
    found = verdict(folder, dtype, "nothing", parallel__layout=layout)
    assert found.passed, found


@pytest.mark.parametrize(
    ("fault", "dtype"),
    [
        pytest.param(fault, dtype, marks=() if dtype == "fp64" or fault in IN_FP32 else pytest.mark.nightly)
        for fault in FAULTS for dtype in ("fp64", "fp32")
    ],
)  # fmt: skip
def test_a_broken_rule_fails(folder: Path, dtype: str, fault: str) -> None:
    found = verdict(folder, dtype, fault)
    assert not found.passed, found
    assert found.inputs_equal == (fault not in INPUT_FAULTS)
    # Rotary embedding cannot tell where a document begins; every other fault shows in the gradients too.
    assert (found.gradient_error > found.gradient_tolerance) == (fault != "positions_of_the_row")


@pytest.mark.parametrize(
    "fault", [pytest.param(f, marks=() if f.startswith(("mean", "average")) else pytest.mark.nightly) for f in FAULTS]
)
def test_a_broken_rule_fails_under_ddp(folder: Path, fault: str) -> None:
    """DDP averages gradients in a way of its own."""
    found = verdict(folder, "fp64", fault, parallel__wrapper="ddp")
    assert not found.passed, found


@pytest.mark.parametrize(
    "route", ["allgather", "rotate", "exchange", "ulysses", "upipe", "usp", "ulysses-ring", "auto"]
)
@pytest.mark.parametrize("layout", ["zigzag", pytest.param("striped", marks=pytest.mark.nightly)])
def test_nothing_broken_passes_on_every_route(folder: Path, route: str, layout: str) -> None:
    found = verdict(folder, "fp64", "nothing", parallel__layout=layout, parallel__route=route)
    assert found.passed, found
    assert found.route == route


@pytest.mark.parametrize("route", ["exchange", pytest.param("rotate", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.startswith(("gradient", "partial", "dropped"))])
def test_a_broken_rule_fails_on_other_routes(folder: Path, route: str, fault: str) -> None:
    assert not verdict(folder, "fp64", fault, parallel__route=route).passed


@pytest.mark.parametrize(
    ("route", "comm_dtype"),
    [
        pytest.param(route, comm_dtype, marks=() if (route, comm_dtype) in IN_TURN else pytest.mark.nightly)
        for route in ("ring", "exchange", "usp", "upipe") for comm_dtype in ("bf16", "fp8")
    ],
)  # fmt: skip
def test_rounding_on_the_wire_passes_and_hides_no_fault(folder: Path, route: str, comm_dtype: str) -> None:
    how = {"parallel__route": route, "parallel__comm_dtype": comm_dtype}
    found = verdict(folder, "fp32", "nothing", **how)
    assert found.passed, found
    assert 1e-4 < found.gradient_error < found.gradient_tolerance < 1, found
    assert not verdict(folder, "fp32", "dropped_document_boundaries", **how).passed


def test_nothing_broken_passes_under_ddp_and_over_dp(folder: Path) -> None:
    assert verdict(folder, "fp64", "nothing", parallel__wrapper="ddp").passed
    assert verdict(folder, "fp64", "nothing", parallel__dp=2).passed


def load_shared_prompts(config: TrainConfig, store: Any, dp_rank: int, dp_size: int) -> Iterator[Batch]:
    """In the place of `longspan.train.run_loader.make_loader`: prompts with responses, in other numbers each time."""
    for index in itertools.count():
        responses = [[index % 7, *range(5 + r)] for r in range(1 + index % 3)]
        yield Batch.concat([Batch.from_shared_prompt(range(9, 20), responses), Batch.from_documents([range(6)])])


def replay_shared_prompts(group: Any, rank: int, config: TrainConfig, gradients: Path, fault: str) -> Evidence:
    with patch("longspan.verify.replay.make_loader", load_shared_prompts):
        return replay_on_ranks(group, rank, config, STEPS, gradients, fault)


@pytest.mark.parametrize("fault", ["nothing", "dropped_document_boundaries", "one_dropped_document_boundary"])
@pytest.mark.parametrize("windows", [None, [5, None]])
def test_shared_prompts_are_verified(
    folder: Path, tmp_path: Path, fault: str, windows: list[int | None] | None
) -> None:
    changes = {} if windows is None else {"model__windows": windows}
    config = make_config(folder, gradient_accumulation_steps=2, parallel__cp=2, **changes)
    with patch("longspan.verify.baseline.make_loader", load_shared_prompts):
        right = run_baseline(config, STEPS, tmp_path / "baseline.safetensors")
    seen = run_ranks(2, replay_shared_prompts, config, tmp_path / "replay.safetensors", fault)[0]
    assert judge(config, seen, right, right).passed == (fault == "nothing")


def read_by_the_global_rank(group: Any, rank: int, config: TrainConfig, gradients: Path) -> tuple[str, str]:
    """The loader is keyed by the rank in the world, so that the ranks of a CP group read different samples."""

    def make_loader(config: TrainConfig, store: Any, dp_rank: int, dp_size: int) -> Loader:
        return Loader(store, seq_len=config.data.seq_len, dp_rank=rank, dp_size=2, seed=0)

    with patch("longspan.verify.replay.make_loader", make_loader):
        return raised(run_replay, config, make_meshes(config), STEPS, gradients)


def test_ranks_of_a_cp_group_that_read_other_samples_are_refused(folder: Path, tmp_path: Path) -> None:
    config = make_config(folder, parallel__cp=2)
    for name, text in run_ranks(2, read_by_the_global_rank, config, tmp_path / "gradients"):
        assert name == "DisagreementError"
        assert "rank 1 differ from rank 0" in text
    assert list(tmp_path.iterdir()) == []
