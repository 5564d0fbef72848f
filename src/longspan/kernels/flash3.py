"""FlashAttention-3 on Hopper, if its package (flash_attn_3) is installed. Bands and sequences as for FlashAttention-2.

Calls torch's adapter `torch.nn.attention._fa3` directly, without `activate_flash_attention_impl("FA3")`, so that the
program's own `scaled_dot_product_attention` is not changed. The adapter has the signatures of aten's flash operators.
Not run on a GPU yet; tests use a stand-in with those signatures.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn.attention import _fa3

from longspan.kernels.capability import HOPPER, capability
from longspan.kernels.protocol import BackwardInputs
from longspan.kernels.scores import ScoreChange
from longspan.kernels.windows import Windowed, flash_backward, flash_forward, flash_refusal
from longspan.plan import Shape

Tensor = torch.Tensor

_MODULE = "flash_attn_interface"
"""Python module of the package, next to its extension `flash_attn_3`."""
_DETERMINISTIC_DIM = 192
"""Largest head dim with a deterministic backward."""


class FlashAttention3Kernel(Windowed):
    """FlashAttention-3's kernels, for Hopper (compute capability 9) only."""

    name = "flash3"

    def refusal(self, q: Tensor, k: Tensor, v: Tensor, change: ScoreChange | None = None) -> str | None:
        if (reason := flash_refusal("FlashAttention-3", q, k, v, change)) is not None:
            return reason
        if capability(q.device)[0] != HOPPER:
            return "FlashAttention-3 runs only on Hopper (compute capability 9)"
        if (missing := _missing()) is not None:
            return missing
        if q.shape[3] > _DETERMINISTIC_DIM and torch.are_deterministic_algorithms_enabled():
            return f"FlashAttention-3 has no deterministic backward for head dims above {_DETERMINISTIC_DIM}"
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, shapes: Sequence[Shape], scale: float, change: ScoreChange | None = None
    ) -> tuple[Tensor, Tensor]:
        return flash_forward(_operators()[0], q, k, v, shapes, scale)

    def backward(
        self, saved: BackwardInputs, shapes: Sequence[Shape], scale: float, change: ScoreChange | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        return flash_backward(_operators()[1], saved, shapes, scale)


@lru_cache(maxsize=1)
def _missing() -> str | None:
    """Return why the package cannot be used, or None."""
    if find_spec(_MODULE) is None or find_spec("flash_attn_3") is None:
        return "the flash_attn_3 package is not installed"
    try:
        _fa3._fa3_import_module(_MODULE)
    except (ImportError, OSError, RuntimeError) as error:
        return f"the flash_attn_3 package does not load: {str(error).splitlines()[0]}"
    return None


def _operators() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the forward and backward operators. `refusal` must have loaded the package."""
    return _fa3._fa3_flash_attention_forward_impl_default, _fa3._fa3_flash_attention_backward_impl
