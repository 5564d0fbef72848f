"""What a run tells, in its metrics file and to TensorBoard, and that counts are the plan's."""

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from longspan import Layout, plan_attention
from longspan.data import Loader, open_store
from longspan.train.flops import Speed
from longspan.train.micro import masks_of
from longspan.train.monitor import Monitor, json_line
from longspan.train.step import StepResult
from longspan.train.train_config import TrainConfig
from longspan.train.usage import BalanceWatch
from tests.train.test_checkpoint import train
from tests.train.test_usage import used
from tests.train.tiny import make_config, write_corpus

STEP_KEYS = {
    "step": int, "loss": float, "grad_norm": float, "learning_rate": float, "targets": int, "tokens": int,
    "skipped": bool, "balance_loss": type(None), "seconds": float, "tokens_per_second": float, "tokens_seen": int,
    "tokens_per_second_per_device": float, "tflops": float, "tflops_full": float, "mfu": type(None),
    "slowest_rank": int, "pairs_imbalance": float, "time_imbalance": float, "ranks": list,
}  # fmt: skip
RANK_KEYS = {
    "rank": int, "targets": int, "pairs": int, "blocks": int, "rows_received": int, "bytes_sent": int,
    "bytes_received": int, "attention_seconds": float, "waiting_seconds": float, "peak_memory_bytes": int,
    "stage": int, "dp": int, "row_pairs": int,
}  # fmt: skip


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainConfig, list[dict[str, Any]]]:
    """A run of four steps on dp2 x cp2 with windows and accumulation, and the lines it told."""
    folder = tmp_path_factory.mktemp("monitor")
    write_corpus(folder)
    config = make_config(
        folder, steps=4, eval_every=3, gradient_accumulation_steps=2, model__windows=[None, 9], dtype="fp32",
        parallel__dp=2, parallel__cp=2, parallel__layout="striped",
    )  # fmt: skip
    train(config)
    return config, [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]


def test_keys_and_types(done: tuple[TrainConfig, list[dict[str, Any]]]) -> None:
    _, lines = done
    assert [sorted(line) for line in lines if "heldout_loss" in line] == [["heldout_loss", "step"]] * 2
    assert [line["step"] for line in lines] == [1, 2, 3, 3, 4, 4]
    steps = [line for line in lines if "heldout_loss" not in line]
    for line in steps:
        assert {key: type(value) for key, value in line.items()} == STEP_KEYS
        assert [usage["rank"] for usage in line["ranks"]] == [0, 1, 2, 3]
        for usage in line["ranks"]:
            assert {key: type(value) for key, value in usage.items()} == RANK_KEYS
            assert usage["peak_memory_bytes"] > 2**24
            assert usage["attention_seconds"] >= usage["waiting_seconds"] >= 0
        worked = [usage["attention_seconds"] - usage["waiting_seconds"] for usage in line["ranks"]]
        pairs = [usage["pairs"] for usage in line["ranks"]]
        assert worked[line["slowest_rank"]] == max(worked)
        assert line["time_imbalance"] == pytest.approx(max(worked) / (sum(worked) / 4))
        assert line["pairs_imbalance"] == pytest.approx(max(pairs) / (sum(pairs) / 4))
        assert sum(usage["targets"] for usage in line["ranks"]) == line["targets"]
    assert [line["tokens"] for line in steps] == [4 * 48] * 4
    assert [line["tokens_seen"] for line in steps] == [192, 384, 576, 768]
    assert all(line["tokens_per_second"] == pytest.approx(192 / line["seconds"]) for line in steps)


def test_counts_of_every_rank_are_those_of_its_plans(done: tuple[TrainConfig, list[dict[str, Any]]]) -> None:
    config, lines = done
    loader = Loader(open_store(config.data), seq_len=48, dp_rank=0, dp_size=1, seed=config.data.seed)
    for line in (line for line in lines if "ranks" in line):
        rows = [next(loader) for _ in range(4)]
        for usage in line["ranks"]:
            dp_rank, cp_rank = divmod(usage["rank"], 2)
            plans = [
                plan_attention(Layout.striped(48, 2), mask, heads=(2, 1))
                for row in rows[dp_rank::2]
                for mask in masks_of(row, config.model.mask_names).values()
            ]
            assert usage["pairs"] == sum(2 * plan.area(cp_rank) for plan in plans)
            assert usage["blocks"] == sum(2 * plan.blocks(cp_rank) for plan in plans)
            assert usage["rows_received"] == sum(2 * plan.rows_received(cp_rank) for plan in plans)
            own = Layout.striped(48, 2).positions(cp_rank)
            assert usage["targets"] == sum(int((row.labels[own] != -100).sum()) for row in rows[dp_rank::2])
            for rank, direction in ((cp_rank, "bytes_sent"), (1 - cp_rank, "bytes_received")):
                assert usage[direction] == sum(
                    plan.bytes(rank, phase, head_dim=8, itemsize=4)
                    for plan in plans
                    for phase in ("forward", "backward")
                )


def scalars(run_dir: Path) -> dict[str, dict[int, float]]:
    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def test_tensorboard_has_the_same_values(done: tuple[TrainConfig, list[dict[str, Any]]]) -> None:
    config, lines = done
    shown = scalars(config.run_dir)
    steps = {line["step"]: line for line in lines if "ranks" in line}
    for name in ("loss", "grad_norm", "learning_rate"):
        assert shown[f"train/{name}"] == pytest.approx({step: line[name] for step, line in steps.items()}, rel=1e-6)
    assert shown["speed/tokens_per_second"] == pytest.approx(
        {step: line["tokens_per_second"] for step, line in steps.items()}, rel=1e-6
    )
    assert shown["heldout/loss"] == pytest.approx(
        {line["step"]: line["heldout_loss"] for line in lines if "heldout_loss" in line}, rel=1e-6
    )
    for name in ("slowest_rank", "pairs_imbalance", "time_imbalance"):
        told = {step: line[name] for step, line in steps.items()}
        assert shown[f"balance/{name}"] == pytest.approx(told, rel=1e-6)
    for name in RANK_KEYS.keys() - {"rank", "stage", "dp", "row_pairs"}:
        of_ranks = {step: [usage[name] for usage in line["ranks"]] for step, line in steps.items()}
        for kind, take in (("min", min), ("mean", statistics.fmean), ("max", max)):
            told = {step: take(values) for step, values in of_ranks.items()}
            assert shown[f"ranks/{name}_{kind}"] == pytest.approx(told, rel=1e-6)


def test_tensorboard_has_as_many_scalars_a_step_for_any_number_of_ranks(tmp_path: Path) -> None:
    names = []
    for number in (2, 64):
        with Monitor(tmp_path / str(number), 1, 0, writes=True, quiet=True) as monitor:
            with patch.object(monitor._board, "add_scalar") as add:
                monitor.step(1, result(1.0), replace(SPEED, mfu=0.4), 8, [used(rank) for rank in range(number)])
            names.append([call.args[0] for call in add.call_args_list])
    # 3 of training, 6 of speed, 3 of balance, and of 9 figures of ranks the least, mean and most.
    assert names[0] == names[1]
    assert len(names[0]) == len(set(names[0])) == 3 + 6 + 3 + 9 * 3


def test_mfu_is_shown_where_it_is_known(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    ranks, known = [used(0), used(1)], replace(SPEED, tokens_per_second_per_device=8.0, mfu=0.412)
    for speed, words in ((known, "16 tokens/s  MFU 41.2%  slowest"), (SPEED, "16 tokens/s  slowest")):
        with Monitor(tmp_path, 1, 0, writes=True, quiet=False) as monitor:
            monitor.step(1, result(1.25), speed, 8, ranks)
        assert f"loss 1.2500  {words}" in capsys.readouterr().err


def result(loss: float, skipped: bool = False) -> StepResult:
    return StepResult(loss, float("inf") if skipped else 1.0, 0.1, targets=7, tokens=8, skipped=skipped)


USAGE = [used(0)]
SPEED = Speed(0.5, tokens_per_second=16.0, tokens_per_second_per_device=16.0, tflops=1.5, tflops_full=2.5, mfu=None)


def test_tensorboard_of_a_resumed_run_keeps_what_was_before_it(tmp_path: Path) -> None:
    """Resumed at step 2, a run forgets its old steps 3 and 4, and no other."""
    with Monitor(tmp_path, 4, 0, writes=True, quiet=True) as monitor:
        for step in (1, 2, 3, 4):
            monitor.step(step, result(10.0 + step), SPEED, 8 * step, USAGE)
    with Monitor(tmp_path, 4, 2, writes=True, quiet=True) as monitor:
        monitor.step(3, result(20.0), SPEED, 24, USAGE)
    assert scalars(tmp_path)["train/loss"] == {1: 11.0, 2: 12.0, 3: 20.0}
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {line["step"]: line["loss"] for line in lines} == {1: 11.0, 2: 12.0, 3: 20.0}


def test_every_line_is_json_even_of_a_step_that_overflowed(tmp_path: Path) -> None:
    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    with Monitor(tmp_path, 1, 0, writes=True, quiet=True) as monitor:
        monitor.step(1, result(float("nan"), skipped=True), SPEED, 8, USAGE)
        monitor.evaluation(1, float("nan"))
    first, second = (tmp_path / "metrics.jsonl").read_text().splitlines()
    line = json.loads(first, parse_constant=refuse)
    assert (line["loss"], line["grad_norm"], line["skipped"]) == (None, None, True)
    assert json.loads(second, parse_constant=refuse) == {"step": 1, "heldout_loss": None}


def test_json_line() -> None:
    record = {"a": [1.5, float("inf"), {"b": (float("nan"), -float("inf"), None, True, "x", 3)}]}
    assert json_line(record) == '{"a": [1.5, null, {"b": [null, null, null, true, "x", 3]}]}'


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    with Monitor(tmp_path / "run", 4, 0, writes=False, quiet=False) as monitor:
        monitor.step(1, result(1.0), SPEED, 8, USAGE)
        monitor.evaluation(1, 1.0)
    assert list(tmp_path.iterdir()) == []


def test_progress_goes_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Monitor(tmp_path, 2, 0, writes=True, quiet=False) as monitor:
        monitor.step(1, result(1.25), SPEED, 8, USAGE)
        monitor.step(2, result(1.0, skipped=True), SPEED, 16, USAGE)
        monitor.evaluation(2, 0.75)
    told = capsys.readouterr()
    assert told.out == ""
    assert "step 2: held-out loss 0.7500 nats per token" in told.err
    assert "loss 1.0000" in told.err
    assert "16 tokens/s" in told.err


def test_progress_names_the_slowest_rank_and_the_imbalance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    ranks = [used(0, pairs=10, worked=1.0), used(1, pairs=20, worked=3.0, waiting=0.5)]
    with Monitor(tmp_path, 1, 0, writes=True, quiet=False) as monitor:
        monitor.step(1, result(1.25), SPEED, 8, ranks)
    assert "loss 1.2500  16 tokens/s  slowest rank 1: time x1.50, pairs x1.33" in capsys.readouterr().err
    (line,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (line["slowest_rank"], line["time_imbalance"], line["pairs_imbalance"]) == (1, 1.5, 20 / 15)


@pytest.mark.parametrize("quiet", [True, False])
def test_a_warning_goes_to_stderr_once(tmp_path: Path, capsys: pytest.CaptureFixture[str], quiet: bool) -> None:
    ranks = [used(0, pairs=10), used(1, pairs=20)]
    with Monitor(tmp_path, 15, 0, writes=True, quiet=quiet, watch=BalanceWatch(1.25, ("zigzag",))) as monitor:
        for step in range(1, 16):
            monitor.step(step, result(1.0), SPEED, 8, ranks)
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("warning") == 1
    assert (
        "warning: step 10: for 10 consecutive steps a rank exceeded 1.25 x the mean pairs: 1.33 x on average, "
        "most often rank 1\n"
        'hint: set parallel.layout="zigzag", or pack rows with similar numbers of visible pairs; '
        "or raise imbalance_limit\n"
    ) in told.err


def test_quiet_tells_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Monitor(tmp_path, 1, 0, writes=True, quiet=True) as monitor:
        monitor.step(1, result(1.0), SPEED, 8, USAGE)
    assert capsys.readouterr() == ("", "")
