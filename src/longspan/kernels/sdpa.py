"""PyTorch's own flash attention with its log-sum-exp, by private aten operators that only this file calls.

    CPU    `_scaled_dot_product_flash_attention_for_cpu`: full, causal for square tiles, or an additive mask, which is slow
    CUDA   `_flash_attention_forward`: full, causal and bands (a window aligned to the bottom right). FlashAttention-2 on every
           device, also on Hopper, unless the program activated another (`activate_flash_attention_impl`)

Both operators take grouped heads. Tests compare each mode with plain math, and the CUDA calls through a stand-in.
"""

from collections.abc import Sequence

import torch

from longspan.kernels.capability import AMPERE, capability
from longspan.kernels.masked import mode_of, split_by_modes
from longspan.kernels.own_calls import own_kernel
from longspan.kernels.protocol import BackwardInputs
from longspan.kernels.scores import ScoreChange
from longspan.kernels.windows import flash_backward, flash_forward, flash_refusal, shows, split_for_windows, window_of
from longspan.plan import Shape, Tile

Tensor = torch.Tensor
aten = torch.ops.aten

_TALL = 512
"""On CPU, backward of a tile with fewer rows is faster in fp32 than in bf16 or fp16, as measured."""

_CPU_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class SdpaKernel:
    """The flash kernels that `scaled_dot_product_attention` itself uses."""

    name = "sdpa"

    def refusal(self, q: Tensor, k: Tensor, v: Tensor, change: ScoreChange | None = None) -> str | None:
        if q.device.type == "cuda":
            if (reason := flash_refusal("flash attention", q, k, v, change)) is not None:
                return reason
            old = capability(q.device)[0] < AMPERE
            return "flash attention on cuda needs Ampere or later (compute capability 8.0)" if old else None
        if q.device.type != "cpu":
            return f"there is no flash attention on device {q.device.type!r}"
        if change is not None:
            return "flash attention has no soft-cap and no ALiBi"
        if k.shape[3] != v.shape[3]:
            return f"keys have dim {k.shape[3]} and values {v.shape[3]}; flash attention takes equal dims"
        return (
            None if q.dtype in _CPU_DTYPES else f"flash attention on cpu takes fp64, fp32, bf16 and fp16, not {q.dtype}"
        )

    def split(self, tile: Tile, device: torch.device, dtype: torch.dtype, backward: bool = False) -> Sequence[Tile]:
        return split_for_windows(tile) if device.type == "cuda" else split_by_modes(tile, dtype, backward)

    def joins(self, first: Shape, second: Shape, device: torch.device) -> bool:
        # On CPU, tiles of equal shape form a batch. On CUDA, sequences of any length share the window of the first tile.
        return shows(window_of(first), second) if device.type == "cuda" else first == second

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, shapes: Sequence[Shape], scale: float, change: ScoreChange | None = None
    ) -> tuple[Tensor, Tensor]:
        if q.device.type == "cuda":
            return _cuda_forward(q, k, v, shapes, scale)
        q, k, v = (_as_batch(x, len(shapes)) for x in (q, k, v))
        causal, mask = mode_of(shapes[0], q.dtype, q.device)
        with own_kernel():
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, causal, attn_mask=mask, scale=scale
            )
        return _as_rows(out, len(shapes)), _as_rows(lse, len(shapes))

    def backward(
        self, saved: BackwardInputs, shapes: Sequence[Shape], scale: float, change: ScoreChange | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out, lse = saved
        if q.device.type == "cuda":
            return _cuda_backward(saved, shapes, scale)
        if shapes[0].num_q < _TALL and q.dtype.itemsize == 2:
            dout, q, k, v, out = (x.float() for x in (dout, q, k, v, out))
        dout, q, k, v, out, lse = (_as_batch(x, len(shapes)) for x in (dout, q, k, v, out, lse))
        causal, mask = mode_of(shapes[0], q.dtype, q.device)
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale
        )
        dq, dk, dv = (_as_rows(grad, len(shapes)) for grad in grads)
        return dq, dk, dv


def _as_batch(x: Tensor, num: int) -> Tensor:
    """`(1, H, num * T, ...)` -> `(num, H, T, ...)`, a view."""
    return x if num == 1 else x.unflatten(2, (num, -1))[0].transpose(0, 1)


def _as_rows(x: Tensor, num: int) -> Tensor:
    """`(num, H, T, ...)` -> `(1, H, num * T, ...)`, a view of the operator's results, which are laid out rows first."""
    return x if num == 1 else x.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None]


def _cuda_forward(q: Tensor, k: Tensor, v: Tensor, shapes: Sequence[Shape], scale: float) -> tuple[Tensor, Tensor]:
    return flash_forward(aten._flash_attention_forward, q, k, v, shapes, scale)


def _cuda_backward(saved: BackwardInputs, shapes: Sequence[Shape], scale: float) -> tuple[Tensor, Tensor, Tensor]:
    return flash_backward(aten._flash_attention_backward, saved, shapes, scale)
