"""The operators that CUDA alone has, by plain math, with the signatures and checks of the real ones."""

from collections.abc import Callable
from typing import Any

import torch

from tests.kernels.test_efficient import EfficientOnCuda
from tests.kernels.test_sdpa import FlashOnCuda

aten = torch.ops.aten
_flash, _efficient = FlashOnCuda(), EfficientOnCuda()

ON_CUDA: dict[Any, Callable[..., Any]] = {
    aten._flash_attention_forward.default: _flash._flash_attention_forward,
    aten._flash_attention_backward.default: _flash._flash_attention_backward,
    aten._efficient_attention_forward.default: _efficient._efficient_attention_forward,
    aten._efficient_attention_backward.default: _efficient._efficient_attention_backward,
}
"""Called with the arguments of the operator, outside every mode; gives tensors of this machine. One that is not here is computed
by its kernel on the CPU."""
