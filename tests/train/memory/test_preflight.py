"""The step before the first: it leaves no trace, takes all the memory of a real one, and says what did not fit."""

import json
import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from longspan.comm.launch import launch
from longspan.errors import CommError
from longspan.train import checkpoint
from longspan.train.memory.preflight import RankPeak, _held, longest_batch, preflight, tell
from longspan.train.run import expected, run_and_leave
from longspan.train.step import TrainStep
from longspan.train.train_config import TrainConfig
from tests.advise.test_memory import expect
from tests.ranks import run_ranks
from tests.train.test_checkpoint import metrics, run_on_ranks
from tests.train.tiny import MODEL, make_config, make_step, write_corpus


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preflight")
    write_corpus(folder)
    return folder


TOLD = ("loss", "grad_norm", "learning_rate", "targets", "tokens", "heldout_loss")
CP = {"parallel__cp": 2}
RUNS: dict[str, dict[str, Any]] = {
    "fsdp, dropout": {**CP, "dropout": 0.2, "dtype": "fp32"},
    "ddp, recompute": {**CP, "parallel__wrapper": "ddp", "recompute": "block", "dtype": "fp32"},
    "fp16, balanced": {**CP, "dtype": "fp16", "parallel__layout": "balanced"},
    "pipeline": {"parallel__pp": 2, "dropout": 0.2, "dtype": "bf16"},
    "experts": {
        "parallel__dp": 2, "parallel__ep": 2,
        "model": {
            **{name: value for name, value in MODEL.items() if name != "intermediate_size"},
            "experts": {"num_experts": 4, "top_k": 2, "intermediate_size": 8, "balance": 0.1},
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_a_run_with_it_equals_one_without_bit_for_bit(folder: Path, name: str) -> None:
    changes = {
        "steps": 3,
        "gradient_accumulation_steps": 2,
        "eval_every": 2,
        "checkpoint_every": 3,
        "eval_rows": 2,
        **RUNS[name],
    }
    without, with_it = (
        make_config(folder, run_dir=str(folder / f"{name}-{asked}"), preflight=asked, **changes)
        for asked in (False, True)
    )
    summaries = [run_ranks(2, run_on_ranks, config)[0] for config in (without, with_it)]
    for kind in TOLD:
        assert metrics(with_it, kind) == metrics(without, kind), kind
    assert summaries[0]["loss"] == summaries[1]["loss"]
    digests = [run_ranks(2, state_of, config) for config in (without, with_it)]
    assert digests[0] == digests[1]
    assert not (without.run_dir / "preflight.json").exists()
    peaks = json.loads((with_it.run_dir / "preflight.json").read_text())
    assert [peak["rank"] for peak in peaks] == [0, 1]
    assert all(peak["peak"] >= peak["before"] > 2**24 and peak["seconds"] > 0 for peak in peaks)


def state_of(group: Any, rank: int, config: TrainConfig) -> list[bytes]:
    """Every byte of weights and moments of this rank's part of the newest checkpoint."""
    step = make_step(config)
    folder = checkpoint.newest(config.run_dir)
    assert folder is not None
    checkpoint.load(folder, step)
    return [raw(x) for x in tensors_of(step)]


def tensors_of(step: TrainStep) -> list[torch.Tensor]:
    weights = [p for stage in step.stages for p in stage.parameters()]
    states = [state for optimizer in step.optimizers for state in optimizer.state.values()]
    return weights + [state[key] for state in states for key in ("exp_avg", "exp_avg_sq", "step")]


def raw(x: torch.Tensor) -> bytes:
    here = x.to_local() if hasattr(x, "to_local") else x
    return here.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def traces(group: Any, rank: int, config: TrainConfig) -> dict[str, Any]:
    """What a step is before and after, a weight of -0.0 included, and what its moments were in between."""
    assert config.model is not None
    torch.set_num_threads(1)
    step = make_step(config)
    with torch.no_grad():
        next(p for p in step.stages[0].parameters() if p.ndim == 2).to_local().fill_(-0.0)
    before = [raw(x) for x in tensors_of(step)]
    between: list[int] = []
    update = step.update

    def watched(rate: float) -> float:
        norm = update(rate)
        moments = (
            state[key] for o in step.optimizers for state in o.state.values() for key in ("exp_avg", "exp_avg_sq")
        )
        between.append(sum(x.to_local().nbytes for x in moments))
        return norm

    step.update = watched  # type: ignore[method-assign]
    budget = expect(config)
    peaks = preflight(step, budget)
    settings = [group["lr"] for o in step.optimizers for group in o.param_groups]
    gradients = [p.grad for stage in step.stages for p in stage.parameters()]
    return {
        "same": [raw(x) for x in tensors_of(step)] == before,
        "moments": between == [budget.stages[0].moments],
        "rate": set(settings),
        "gradients": set(gradients),
        "scale": (step.scale.value, step.scale.good_steps),
        "peaks": [(peak.rank, peak.pp_rank) for peak in peaks],
        "expected": {peak.expected for peak in peaks},
    }


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_what_it_leaves(dtype: str) -> None:
    config = make_config(parallel__cp=2, dtype=dtype, gradient_accumulation_steps=2)
    stage = expect(config).stages[0]
    for told in run_ranks(2, traces, config):
        assert told == {
            "same": True, "moments": True, "rate": {0.01}, "gradients": {None},
            "scale": (2.0**16 if dtype == "fp16" else 1.0, 0), "peaks": [(0, 0), (1, 0)],
            "expected": {stage.total - stage.parameters},
        }  # fmt: skip


def test_a_run_that_goes_on_is_not_disturbed(folder: Path) -> None:
    """Moments of the checkpoint are loaded after it."""
    changes = {"steps": 4, "parallel__cp": 2, "checkpoint_every": 2}
    through = make_config(folder, run_dir=str(folder / "through"), **changes)
    again = make_config(folder, run_dir=str(folder / "on"), preflight=True, resume=True, **changes)
    run_ranks(2, run_on_ranks, through)
    shutil.copytree(through.run_dir / "checkpoints" / "step-00000002", again.run_dir / "checkpoints" / "step-00000002")
    run_ranks(2, run_on_ranks, again)
    late = {step: loss for step, loss in metrics(through).items() if step > 2}
    assert metrics(again) == late
    assert run_ranks(2, state_of, again) == run_ranks(2, state_of, through)


def test_memory_is_that_of_the_device_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with a GPU a run on the CPU has the CPU's norms and the process's bytes."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    totals = {
        device: expected(make_config(parallel__device=device)).stages[0].total for device in ("auto", "cuda", "cpu")
    }
    assert totals["auto"] == totals["cuda"] < totals["cpu"]
    assert _held(torch.device("cpu")) > 2**24
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert expected(make_config()).stages[0].total == totals["cpu"]


def test_the_longest_row() -> None:
    """Two rows of a micro-batch, each one document: no data of this row length gives more tokens or more pairs."""
    config = make_config(micro_batch_size=2, data__seq_len=5)
    batch = longest_batch(config, vocab_size=4)
    assert (batch.lengths, batch.num_targets) == ((5, 5), 8)
    assert batch.input_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert batch.numbers is not None
    assert np.array_equal(batch.numbers, np.arange(10))


# What does not fit.


def refused(group: Any, rank: int, config: TrainConfig, error: Exception) -> str:
    step = make_step(config)
    with patch.object(step, "backward", side_effect=error):
        try:
            preflight(step, expect(config))
        except Exception as raised:
            return f"{type(raised).__name__}: {raised}"
    return "nothing"


LAST = "parallel.cp higher; or dtype to bf16; or data.seq_len lower; longspan train --dry-run shows the expected memory"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError(), "MemoryError"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB.\nmore"), "CUDA out of memory. Tried 2 GiB."),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes."),
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes.",
        ),
    ],
)  # fmt: skip
def test_out_of_memory_is_named_with_the_ways_out(error: Exception, reason: str) -> None:
    (told,) = run_ranks(1, refused, make_config(dtype="fp32"), error)
    assert told == (
        f"SpecError: preflight: rank 0 ran out of memory in a step with 48 of the 48 tokens of the longest row: {reason}\n\n"
        f'hint: set recompute to "block" or "full"; or {LAST}'
    )


def test_ways_out_that_are_taken_are_not_named() -> None:
    config = make_config(dtype="bf16", recompute="full", micro_batch_size=2)
    (told,) = run_ranks(1, refused, config, MemoryError())
    assert told.endswith(
        "hint: set parallel.cp higher; or micro_batch_size lower; longspan train --dry-run shows the expected memory"
    )


def test_other_errors_stay_what_they_are() -> None:
    (told,) = run_ranks(1, refused, make_config(), RuntimeError("something else"))
    assert told == "RuntimeError: something else"


def run_without_memory(config: TrainConfig) -> None:
    """Rank 1 has none."""
    if os.environ["RANK"] == "1":
        with patch.object(TrainStep, "backward", side_effect=MemoryError):
            run_and_leave(config, True)
    run_and_leave(config, True)


@pytest.mark.usefixtures("warm")
def test_a_rank_that_fails_takes_the_run_down(folder: Path) -> None:
    config = make_config(folder, run_dir=str(folder / "down"), preflight=True, parallel__cp=2, parallel__threads=1)
    with pytest.raises(
        CommError, match=r"rank 1 of 2 failed: .*preflight: rank 1 ran out of memory in a step"
    ) as error:
        launch(run_without_memory, (config,), 2)
    assert 'set recompute to "block" or "full"' in str(error.value)
    assert not (config.run_dir / "metrics.jsonl").exists()


# What is told.


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peaks = [
        RankPeak(rank, 0, before=300 * 2**20, peak=(512 + rank) * 2**20, expected=2**28, seconds=1.25)
        for rank in range(2)
    ]
    budget = expect(make_config(parallel__cp=2, gradient_accumulation_steps=3))
    tell(peaks, budget, tmp_path / "run", quiet=False)
    told = capsys.readouterr()
    assert told.out == ""
    headline, columns, _, *rows = told.err.splitlines()
    assert headline == "preflight: a step of 3 micro-batches at the longest row fits; it took 1.2 s"
    assert columns.split() == ["rank", "before", "peak", "added", "expected", "to", "be", "added"]
    assert [row.split() for row in rows] == [
        [*["0", "300", "MiB", "512", "MiB", "212", "MiB", "256", "MiB"]],
        [*["1", "300", "MiB", "513", "MiB", "213", "MiB", "256", "MiB"]],
    ]
    tell(peaks, budget, tmp_path / "run", quiet=True)
    assert capsys.readouterr().err == ""
    assert [peak["peak"] for peak in json.loads((tmp_path / "run" / "preflight.json").read_text())] == [
        512 * 2**20, 513 * 2**20,
    ]  # fmt: skip


def test_of_many_ranks_the_table_has_the_highest_of_each_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peaks = [RankPeak(rank, rank // 16, 0, 2**30 + (rank == 7) + (rank == 20), 2**30, 1.0) for rank in range(32)]
    tell(peaks, expect(make_config()), tmp_path, quiet=False)
    rows = capsys.readouterr().err.splitlines()[3:]
    assert [row.split()[0] for row in rows] == ["7", "20"]
    assert len(json.loads((tmp_path / "preflight.json").read_text())) == 32
