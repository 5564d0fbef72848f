"""The choice of a kernel."""

import pytest
import torch

from longspan.attention.kernel import KERNELS, choose_kernel
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
        ("flash9", zeros(), "kernel 'flash9' is not known\n\nhint: choose one of auto, sdpa, flash2, cudnn, reference"),
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
