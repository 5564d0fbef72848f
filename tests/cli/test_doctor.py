"""`longspan doctor`: findings as a table and as JSON, and why a kernel does not run."""

import json
from unittest.mock import patch

import pytest
import torch
from click.testing import CliRunner

from longspan.cli.doctor import attention, doctor, kernels
from longspan.kernels.choice import KERNELS
from tests.kernels.test_choice import device


def test_json() -> None:
    result = CliRunner().invoke(doctor, ["--json"])
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert sorted(found) == ["attention", "backends", "cores", "cuda_devices", "kernels", "packages", "python"]
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


def test_the_cpu_has_one_kernel_for_every_type() -> None:
    found = {f"cpu {dtype}": "sdpa" for dtype in ("float64", "float32", "bfloat16", "float16")}
    assert {name: kernel for name, kernel in attention().items() if name.startswith("cpu")} == found


class OnMeta:
    """`torch.empty` on a CUDA device that is not there: as far as the choice of a kernel looks."""

    def __init__(self, *shape: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device

    def is_floating_point(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("major", "active", "dtype", "text"),
    [
        (
            9, None, "bfloat16",
            "cudnn for full and causal tiles, else sdpa (FlashAttention-2); not flash3: not installed",
        ),
        (9, "FA3", "float16", "cudnn for full and causal tiles, else sdpa (FA3); not flash3: not installed"),
        (
            8, None, "bfloat16",
            "sdpa (FlashAttention-2); not flash3: FlashAttention-3 runs only on Hopper (compute capability 9); not cudnn: "
            "cuDNN attention is faster than flash attention only on Hopper and Blackwell",
        ),
        (
            9, None, "float32",
            "efficient; not flash3: FlashAttention-3 takes bf16 and fp16 on cuda, not torch.float32 on cuda; not cudnn: "
            "cuDNN attention takes bf16 and fp16 on cuda, not torch.float32 on cuda; not sdpa: "
            "flash attention takes bf16 and fp16 on cuda, not torch.float32 on cuda; not flash2: "
            "flash-attn takes bf16 and fp16 on cuda, not torch.float32 on cuda",
        ),
    ],
)  # fmt: skip
def test_each_device_has_its_flash_attention_and_why_not_a_faster_one(
    major: int, active: str | None, dtype: str, text: str
) -> None:
    with (
        device(major),
        patch("longspan.cli.doctor.capability", lambda device: (major, 0)),
        patch("longspan.cli.doctor.current_flash_attention_impl", lambda: active),
        patch("torch.cuda.device_count", lambda: 2),
        patch("torch.cuda.get_device_name", lambda device: f"GPU {device.index}"),
        patch("longspan.cli.doctor.torch.empty", OnMeta),
    ):
        found = attention()
    assert found[f"cuda:1 (GPU 1, {major}.0) {dtype}"] == text
    assert len(found) == 12


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
