"""`longspan doctor`: findings as a table and as JSON, and why a kernel does not run."""

import json
from unittest.mock import patch

import pytest
import torch
from click.testing import CliRunner

from longspan.attention.kernel import KERNELS
from longspan.cli.doctor import doctor, kernels


def test_json() -> None:
    result = CliRunner().invoke(doctor, ["--json"])
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert sorted(found) == ["backends", "cores", "cuda_devices", "kernels", "packages", "python"]
    assert found["packages"]["torch"] == torch.__version__
    assert found["packages"]["longspan"] == "0.1.0"
    assert found["backends"]["gloo"] is True
    assert found["cuda_devices"] == torch.cuda.device_count()
    assert {name.split()[0] for name in found["kernels"]} == set(KERNELS)


def test_table_says_the_same() -> None:
    result = CliRunner().invoke(doctor, [])
    assert (result.exit_code, result.stderr) == (0, "")
    for text in ("python", "cuda devices", "gloo: True", "sdpa cpu float32: runs", "reference cpu float64: runs"):
        assert text in result.stdout


@pytest.mark.parametrize("name", ["sdpa", "reference"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_our_kernels_run_on_the_cpu(name: str, dtype: str) -> None:
    assert kernels()[f"{name} cpu {dtype}"] == "runs"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("cudnn", "cuDNN attention takes bf16 and fp16 on cuda, not torch.bfloat16 on cpu"),
        ("flex", "FlexAttention has a backward for fp32, bf16 and fp16 on cuda, not for torch.bfloat16 on cpu"),
    ],
)
def test_kernels_of_other_devices_say_so(name: str, reason: str) -> None:
    assert kernels()[f"{name} cpu bfloat16"] == reason


def test_a_kernel_that_fails_says_why() -> None:
    kernel = KERNELS["sdpa"]
    with patch.object(type(kernel), "forward", side_effect=RuntimeError("no such operator\nlong trace")):
        assert kernels()["sdpa cpu float32"] == "fails: no such operator"


def test_a_package_that_is_missing_is_said_so() -> None:
    with patch("longspan.cli.doctor._PACKAGES", ("torch", "no-such-package")):
        found = json.loads(CliRunner().invoke(doctor, ["--json"]).stdout)
    assert found["packages"]["no-such-package"] == "not installed"
