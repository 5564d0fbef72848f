"""PyTorch's cuDNN attention on CUDA, with its log-sum-exp, by private aten operators that only this file calls.

Modes: full, causal for square tiles, or an additive mask. Tiles are split as for the CPU operator, which has the same
modes. "auto" chooses cuDNN on Hopper and Blackwell, where it is faster than FlashAttention-2, for plans whose tiles
need no mask. Not run on a GPU yet; tests use a stand-in with its schema.
"""

from collections.abc import Sequence

import torch

from longspan.kernels.masked import causal_of, mode_of, split_by_modes
from longspan.kernels.protocol import BackwardInputs
from longspan.kernels.scores import ScoreChange
from longspan.kernels.windows import flash_refusal
from longspan.plan import Shape, Tile

Tensor = torch.Tensor
aten = torch.ops.aten


class CudnnKernel:
    """`_scaled_dot_product_cudnn_attention` and its backward. Takes grouped heads."""

    name = "cudnn"

    def refusal(self, q: Tensor, k: Tensor, v: Tensor, change: ScoreChange | None = None) -> str | None:
        if (reason := flash_refusal("cuDNN attention", q, k, v, change, most=128)) is not None:
            return reason
        if torch.are_deterministic_algorithms_enabled():
            return "cuDNN attention has no deterministic backward"
        return None

    def split(self, tile: Tile, device: torch.device, dtype: torch.dtype, backward: bool = False) -> Sequence[Tile]:
        return (tile,) if causal_of(tile.shape) is not None else split_by_modes(tile, dtype, backward)

    def joins(self, first: Shape, second: Shape, device: torch.device) -> bool:
        return False

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, shapes: Sequence[Shape], scale: float, change: ScoreChange | None = None
    ) -> tuple[Tensor, Tensor]:
        causal, bias = mode_of(shapes[0], q.dtype, q.device)
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, bias, True, 0.0, causal, False, scale=scale)
        return out, lse[..., 0]

    def backward(
        self, saved: BackwardInputs, shapes: Sequence[Shape], scale: float, change: ScoreChange | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out, lse = saved
        causal, bias = mode_of(shapes[0], q.dtype, q.device)
        # The operator requires the two tensors of random state, though it reads them only for dropout.
        unused = torch.zeros((), dtype=torch.int64, device=q.device)
        grads: tuple[Tensor, Tensor, Tensor] = aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse[..., None].contiguous(), unused, unused, bias, None, None,
            shapes[0].num_q, shapes[0].num_k, 0.0, causal, scale=scale,
        )  # fmt: skip
        return grads
