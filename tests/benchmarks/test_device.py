"""The script of checks for one GPU, on the CPU: the same checks by the same code."""

import pytest
from click.testing import CliRunner

from benchmarks import device


@pytest.mark.slow
def test_every_check_holds_on_cpu():
    result = CliRunner().invoke(device.main, ["--device", "cpu"])
    assert result.exit_code == 0, result.output
    *lines, last = result.output.splitlines()
    assert last == f"{sum(line.startswith('holds') for line in lines)} of 60 checks hold"
    assert "flash2 bfloat16: not here: the package flash-attn is not installed" in lines


def test_a_check_that_fails_is_told_and_counts(monkeypatch):
    monkeypatch.setattr(
        device, "_checks", lambda _: iter([device._told("a", lambda: 2.0), device._told("b", lambda: 1 / 0)])
    )
    result = CliRunner().invoke(device.main, ["--device", "cpu"])
    assert result.exit_code == 1
    assert result.output.splitlines() == [
        "FAILS  a: 2.00 of the limit", "FAILS  b: ZeroDivisionError: division by zero", "0 of 2 checks hold",
    ]  # fmt: skip
