"""The flash-attn 2 package, if installed. Its kernels have a soft-cap, which PyTorch's copy lacks.

Calls `flash_attn.flash_attn_interface` (2.7 or later) below its autograd functions, because backward here takes `out`
and `lse` over all keys of the sequence. Not run on a GPU yet; tests use a stand-in with its signatures.
"""

from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from longspan.kernels.capability import AMPERE, capability
from longspan.kernels.protocol import BackwardInputs
from longspan.kernels.scores import ScoreChange
from longspan.kernels.windows import Windowed, flash_refusal, heads_first, rows_first, sequences, window_of
from longspan.plan import Shape

Tensor = torch.Tensor

_OLDEST = (2, 7)


class FlashAttention2Kernel(Windowed):
    """flash-attn's CUDA kernels: bands as windows, successive tiles as sequences of one call, soft-caps."""

    name = "flash2"

    def refusal(self, q: Tensor, k: Tensor, v: Tensor, change: ScoreChange | None = None) -> str | None:
        if change is not None and change.slopes is not None:
            return "flash-attn computes ALiBi distances within a tile, not on the token axis"
        if (reason := flash_refusal("flash-attn", q, k, v, change=None)) is not None:
            return reason
        if (missing := _missing()) is not None:
            return missing
        if capability(q.device)[0] < AMPERE:
            return "flash-attn needs Ampere or later (compute capability 8.0)"
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, shapes: Sequence[Shape], scale: float, change: ScoreChange | None = None
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (rows_first(x, shapes) for x in (q, k, v))
        options = _options(shapes, scale, change)
        if len(shapes) == 1:
            out, lse, *_ = _interface()._flash_attn_forward(q, k, v, **options, return_softmax=False)
            return heads_first(out, shapes), lse
        of_q, of_k, most_q, most_k = sequences(tuple(shapes), q.device)
        out, lse, *_ = _interface()._flash_attn_varlen_forward(q, k, v, of_q, of_k, most_q, most_k, **options)
        return heads_first(out, shapes), lse[None]

    def backward(
        self, saved: BackwardInputs, shapes: Sequence[Shape], scale: float, change: ScoreChange | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out, lse = saved
        dout, q, k, v, out = (rows_first(x, shapes) for x in (dout, q, k, v, out))
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
        options = _options(shapes, scale, change) | {"deterministic": torch.are_deterministic_algorithms_enabled()}
        if len(shapes) == 1:
            _interface()._flash_attn_backward(dout, q, k, v, out, lse.contiguous(), *grads, **options)
        else:
            _interface()._flash_attn_varlen_backward(
                dout, q, k, v, out, lse[0].contiguous(), *grads, *sequences(tuple(shapes), q.device), **options
            )
        dq, dk, dv = (heads_first(grad, shapes) for grad in grads)
        return dq, dk, dv


def _options(shapes: Sequence[Shape], scale: float, change: ScoreChange | None) -> dict[str, Any]:
    left, right = (-1 if side is None else side for side in window_of(shapes[0]))
    return {
        "dropout_p": 0.0, "softmax_scale": scale, "causal": False, "window_size_left": left, "window_size_right": right,
        "softcap": change.softcap or 0.0 if change else 0.0, "alibi_slopes": None,
    }  # fmt: skip


@lru_cache(maxsize=1)
def _missing() -> str | None:
    """Return why the package cannot be used, or None."""
    try:
        found = version("flash-attn")
    except PackageNotFoundError:
        return "the flash-attn package is not installed"
    if tuple(int(part) for part in found.split(".")[:2]) < _OLDEST:
        return f"flash-attn {found} is older than {'.'.join(map(str, _OLDEST))}"
    return None


def _interface() -> Any:
    return import_module("flash_attn.flash_attn_interface")
