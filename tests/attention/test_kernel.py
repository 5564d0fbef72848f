"""The choice of a kernel."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from longspan.attention import flash2, flex
from longspan.attention.kernel import KERNELS, choose_kernel
from longspan.attention.scores import ScoreChange
from longspan.spec import SpecError


def zeros(dim=8, dim_v=8, dtype=torch.float32):
    q = torch.zeros(1, 2, 3, dim, dtype=dtype)
    return q, q, torch.zeros(1, 2, 3, dim_v, dtype=dtype)


@pytest.mark.parametrize(
    ("name", "tensors", "chosen"),
    [
        ("auto", zeros(), "sdpa"),
        ("auto", zeros(6, 4), "reference"),
        ("auto", zeros(dtype=torch.float16), "sdpa"),
        ("sdpa", zeros(), "sdpa"),
        ("reference", zeros(), "reference"),
    ],
)
def test_chosen(name, tensors, chosen):
    assert choose_kernel(name, *tensors).name == chosen
    assert choose_kernel(name, *tensors) is KERNELS[chosen]


@pytest.mark.parametrize(
    ("name", "tensors", "text"),
    [
        (
            "flash9",
            zeros(),
            "kernel 'flash9' is not known\n\nhint: choose one of auto, sdpa, flash2, cudnn, flex, reference",
        ),
        (
            "sdpa",
            zeros(6, 4),
            "kernel 'sdpa' cannot compute this: keys have dim 6 and values 4; flash attention takes equal ones\n\n"
            'hint: use kernel="auto"',
        ),
        (
            "auto",
            zeros(dtype=torch.int64),
            "kernel 'reference' cannot compute this: torch.int64 is not a floating type\n\nhint: use kernel=\"auto\"",
        ),
    ],
)
def test_refusals(name, tensors, text):
    with pytest.raises(SpecError) as error:
        choose_kernel(name, *tensors)
    assert str(error.value) == text


CAP, ALIBI = ScoreChange(30.0), ScoreChange(slopes=torch.ones(2))


@pytest.mark.parametrize(
    ("dtype", "change", "chosen", "beside_flash_attn"),
    [
        (torch.bfloat16, None, "sdpa", "sdpa"),
        (torch.bfloat16, CAP, "flex", "flash2"),
        (torch.bfloat16, ALIBI, "flex", "flex"),
        (torch.float32, None, "flex", "flex"),
        (torch.float32, ALIBI, "flex", "flex"),
        (torch.float64, ALIBI, "reference", "reference"),
    ],
)
def test_chosen_on_cuda(dtype, change, chosen, beside_flash_attn):
    x = SimpleNamespace(dtype=dtype, shape=(1, 2, 3, 64), device=torch.device("cuda"), is_floating_point=lambda: True)
    with patch.object(flex, "_HAS_TRITON", True):
        with patch.object(flash2, "_missing", lambda: "the package flash-attn is not installed"):
            assert choose_kernel("auto", x, x, x, change).name == chosen
        with patch.object(flash2, "_missing", lambda: None):
            assert choose_kernel("auto", x, x, x, change).name == beside_flash_attn
    with patch.object(flex, "_HAS_TRITON", False), patch.object(flash2, "_missing", lambda: "not installed"):
        assert choose_kernel("auto", x, x, x, change).name == ("sdpa" if chosen == "sdpa" else "reference")


@pytest.mark.parametrize("change", [CAP, ALIBI])
def test_changes_of_scores_are_the_reference_kernels_on_cpu(change):
    assert choose_kernel("auto", *zeros(16, 16), change).name == "reference"
