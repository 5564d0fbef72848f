"""PyTorch's FlexAttention: soft-cap and ALiBi inside fused kernels on CUDA, forward and backward, by its public call.

That call takes no final `out` and `lse`. Backward computes a tile once more, and differentiates the tile's own out_i and lse_i
by what they do to the final ones: out = sum of w_i out_i, lse = log of the sum of exp(lse_i), w_i = exp(lse_i - lse), so

    d out_i = w_i dout        d lse_i = w_i dout . (out_i - out)

It has not run on a GPU (none was at hand): tests call it through a stand-in, and through FlexAttention's plain math on CPU.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from longspan.comm.upload import upload
from longspan.kernels.protocol import BackwardInputs
from longspan.kernels.scores import ScoreChange
from longspan.plan import Shape, Tile

Tensor = torch.Tensor

_BLOCK = 128
"""Rows and keys of a block, which is skipped, computed whole or computed under the mask: what FlexAttention is tuned for."""
_HAS_TRITON = find_spec("triton") is not None


class FlexKernel:
    """`flex_attention`: any band, tiles that follow each other in one call, soft-caps, ALiBi, K and V dims of their own."""

    name = "flex"

    def refusal(self, q: Tensor, k: Tensor, v: Tensor, change: ScoreChange | None = None) -> str | None:
        if q.device.type != "cuda" or q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"FlexAttention has a backward for fp32, bf16 and fp16 on cuda, not for {q.dtype} on {q.device.type}"
        if not _HAS_TRITON:
            return "FlexAttention is compiled by the package triton, which is not installed"
        if not all(16 <= x.shape[3] <= 256 for x in (k, v)):
            return f"FlexAttention takes head dims from 16 to 256, not {k.shape[3]} and {v.shape[3]}"
        return None

    def split(self, tile: Tile, device: torch.device, dtype: torch.dtype, backward: bool = False) -> Sequence[Tile]:
        return (tile,)

    def joins(self, first: Shape, second: Shape, device: torch.device) -> bool:
        return True

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, shapes: Sequence[Shape], scale: float, change: ScoreChange | None = None
    ) -> tuple[Tensor, Tensor]:
        with torch.inference_mode(False), torch.no_grad():  # what is kept of this call serves backward too
            return _attend(_alike(q, k, v), shapes, scale, change)

    def backward(
        self, saved: BackwardInputs, shapes: Sequence[Shape], scale: float, change: ScoreChange | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out, lse = saved
        # Operators run below autograd, where `enable_grad` alone records nothing; to leave inference mode puts autograd back.
        with torch.inference_mode(False), torch.enable_grad():
            qkv = [x.requires_grad_() for x in _alike(q, k, v)]
            own = _attend(qkv, shapes, scale, change)
            dq, dk, dv = torch.autograd.grad(own, qkv, _cotangents(dout, out, lse, *(x.detach() for x in own)))
        return dq, dk, dv


def _alike(*tensors: Tensor) -> list[Tensor]:
    """Apart from the caller's graph, and contiguous: what differs in strides alone would be compiled anew."""
    return [x.detach().contiguous() for x in tensors]


def _attend(
    qkv: Sequence[Tensor], shapes: Sequence[Shape], scale: float, change: ScoreChange | None
) -> tuple[Tensor, Tensor]:
    """Out and lse, a natural logarithm, of these tiles."""
    # Of the other backends the one for few rows is one more to compile, and the one of flash-attn cannot differentiate lse.
    out, aux = _compiled()(
        *qkv, change and _score_mod(change, qkv[0]), _block_mask(tuple(shapes), qkv[0].device), scale, enable_gqa=True,
        kernel_options={"BACKEND": "TRITON"}, return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    return out, aux.lse


def _cotangents(dout: Tensor, out: Tensor, lse: Tensor, own_out: Tensor, own_lse: Tensor) -> tuple[Tensor, Tensor]:
    """d out_i and d lse_i; the latter of the former as it was rounded, for they meet again in the derivative of a score,
    `d out_i . (v - out_i) + d lse_i = d out_i . (v - out)`."""
    own_dout = (torch.exp(own_lse - lse).unsqueeze(-1) * dout).to(own_out.dtype)
    return own_dout, (own_dout * (own_out.to(lse.dtype) - out)).sum(-1)


def _score_mod(change: ScoreChange, q: Tensor) -> Callable[..., Tensor]:
    """The change of one score. What it reads are tensors: another cap, or other places, then compile nothing anew."""
    wide = torch.promote_types(q.dtype, torch.float32)
    cap = slopes = rows = keys = None
    if change.softcap is not None:
        cap = torch.full((), change.softcap, dtype=wide, device=q.device)
    if change.slopes is not None:
        assert change.rows is not None, "a tile has places on the token axis"
        assert change.keys is not None, "a tile has places on the token axis"
        slopes, rows, keys = change.slopes.detach().to(wide), change.rows.int(), change.keys.int()

    def modify(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        if slopes is not None and rows is not None and keys is not None:
            score = score - slopes[head] * (rows[row] - keys[key]).abs()
        return score

    return modify


@lru_cache(maxsize=64)
def _block_mask(shapes: tuple[Shape, ...], device: torch.device) -> BlockMask:
    """Tiles that follow each other as a mask of blocks, from their bands: `create_block_mask` would write down every pair.

    A row sees the keys `first` to `last`; from row to row neither goes back, and together the rows leave no key out. So a block
    is seen if the keys of all its rows reach it, and whole if those of its first and those of its last row cover it.
    """
    starts = list(accumulate((shape.num_k for shape in shapes), initial=0))
    tiles = [(start + np.arange(tile.num_q), tile, start) for tile, start in zip(shapes, starts[:-1], strict=True)]
    first = np.concatenate([np.maximum(row - tile.hi, start) for row, tile, start in tiles])
    last = np.concatenate([np.minimum(row - tile.lo, start + tile.num_k - 1) for row, tile, start in tiles])
    lengths = len(first), starts[-1]
    top, left = (np.arange(0, length, _BLOCK)[:, None] for length in lengths)
    bottom, right = (np.minimum(x + _BLOCK, length) - 1 for x, length in zip((top, left), lengths, strict=True))
    seen = (first[top] <= right.T) & (last[bottom] >= left.T)
    whole = (first[bottom] <= left.T) & (last[top] >= right.T)
    whole &= (bottom - top == _BLOCK - 1) & (right - left == _BLOCK - 1).T  # a short block is none
    part, lists = seen & ~whole, dict[str, Any]()
    for name, blocks in {"kv": part, "full_kv": whole, "q": part.T, "full_q": whole.T}.items():
        order = np.argsort(~blocks, axis=1, kind="stable")  # of each row first the columns that count
        lists[f"{name}_num_blocks"], lists[f"{name}_indices"] = (
            upload(torch.from_numpy(x.astype(np.int32, order="C")), device)[None, None] for x in (blocks.sum(1), order)
        )
    from_key, to_key = (upload(torch.from_numpy(x.astype(np.int32)), device) for x in (first, last))

    def sees(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (from_key[row] <= key) & (key <= to_key[row])

    return BlockMask(lengths, **lists, BLOCK_SIZE=(_BLOCK, _BLOCK), mask_mod=sees)


@lru_cache(maxsize=2)
def _compiled(backend: str = "inductor") -> Callable[..., Any]:
    """`flex_attention` compiled, once for all calls: uncompiled, it makes every score of every head.

    A graph serves one length, and from the second on all: `dynamic=True` would save the first, and make the scale a variable.
    Forward and backward, types, heads, changes of scores, and lengths of 1, of one block and of more make some dozens. Beyond
    the limit a call raises: without `fullgraph` it would go on uncompiled, and not say so. They are kept apart from those of
    the user's own `flex_attention`, of which they would use up the limit.
    """
    return torch.compile(  # type: ignore[call-overload]
        flex_attention, fullgraph=True, backend=backend, recompile_limit=128, isolate_recompiles=True
    )
