"""The script of checks for one GPU, on the CPU: the same checks by the same code."""

import pytest
import torch
from click.testing import CliRunner

from benchmarks import device
from longspan.attention import flex
from tests.attention.test_flex import Anywhere, StandIn


@pytest.mark.slow
def test_every_check_holds_on_cpu():
    result = CliRunner().invoke(device.main, ["--device", "cpu"])
    assert result.exit_code == 0, result.output
    *lines, last = result.output.splitlines()
    assert last == f"{sum(line.startswith('holds') for line in lines)} of 63 checks hold"
    assert "flash2 bfloat16: not here: flash-attn takes bf16 and fp16 on cuda, not torch.bfloat16 on cpu" in lines
    assert any(line.startswith("flex float32: not here: FlexAttention has a backward for") for line in lines)
    assert any(line.startswith("holds  reference float32 soft-cap and ALiBi:") for line in lines)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "Error: there is no GPU here: --device cpu checks the kernels that a CPU has"),
        (["--device", "cpu", "--kernel", "flash2"], "0 of 0 checks hold"),
    ],
)
def test_nothing_checked_is_no_success(words, said):
    result = CliRunner().invoke(device.main, words)
    assert result.exit_code == 1
    assert result.output.splitlines()[-1] == said


def test_one_kernel_by_name_with_changes_of_scores(monkeypatch):
    """`flex` through its stand-in: the places of rows and keys in each call, and one call for the documents."""
    calls = StandIn()
    monkeypatch.setattr(flex, "_compiled", lambda: calls)
    monkeypatch.setitem(device.KERNELS, "flex", Anywhere())
    monkeypatch.setattr(device, "LIMIT", {torch.float32: 1e-4})
    result = CliRunner().invoke(device.main, ["--device", "cpu", "--kernel", "flex"])
    assert result.exit_code == 0, result.output
    *lines, last = result.output.splitlines()
    assert last == "11 of 11 checks hold"
    assert [line.split(":")[0] for line in lines[-3:]] == [
        f"holds  flex float32 {kind}" for kind in ("documents", "soft-cap", "soft-cap and ALiBi")
    ]
    assert len(calls.calls) == 2 * 11


def test_a_check_that_fails_is_told_and_counts(monkeypatch):
    monkeypatch.setattr(
        device, "_checks", lambda *_: iter([device._told("a", lambda: 2.0), device._told("b", lambda: 1 / 0)])
    )
    result = CliRunner().invoke(device.main, ["--device", "cpu"])
    assert result.exit_code == 1
    assert result.output.splitlines() == [
        "FAILS  a: 2.00 of the limit", "FAILS  b: ZeroDivisionError: division by zero", "0 of 2 checks hold",
    ]  # fmt: skip
