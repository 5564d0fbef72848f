"""PyTorch's FlexAttention, by its public API: soft-cap and ALiBi in fused CUDA kernels, forward and backward.

FlexAttention's backward does not accept the final `out` and `lse` of the sequence. So our backward recomputes out_i and
lse_i of tile i, and gives FlexAttention their gradients, which follow from out = sum w_i out_i,
lse = log sum exp(lse_i), w_i = exp(lse_i - lse):

    d out_i = w_i dout        d lse_i = w_i dout . (out_i - out)

Not run on a GPU yet; tests use a stand-in, and FlexAttention's plain math on CPU.
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
"""Rows and keys of a block. A block is skipped, computed without a mask, or masked. FlexAttention is tuned for 128."""
_HAS_TRITON = find_spec("triton") is not None


class FlexKernel:
    """`flex_attention`: any band, several tiles in one call, soft-caps, ALiBi, K and V dims that may differ."""

    name = "flex"

    def refusal(self, q: Tensor, k: Tensor, v: Tensor, change: ScoreChange | None = None) -> str | None:
        if q.device.type != "cuda" or q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"FlexAttention has a backward for fp32, bf16 and fp16 on cuda, not for {q.dtype} on {q.device.type}"
        if not _HAS_TRITON:
            return "FlexAttention needs the triton package, which is not installed"
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
        with torch.inference_mode(False), torch.no_grad():  # tensors cached by this call are used in backward too
            return _attend(_alike(q, k, v), shapes, scale, change)

    def backward(
        self, saved: BackwardInputs, shapes: Sequence[Shape], scale: float, change: ScoreChange | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out, lse = saved
        # Custom operators run below autograd. Leaving inference mode restores recording; `enable_grad` alone does not.
        with torch.inference_mode(False), torch.enable_grad():
            qkv = [x.requires_grad_() for x in _alike(q, k, v)]
            own = _attend(qkv, shapes, scale, change)
            dq, dk, dv = torch.autograd.grad(own, qkv, _cotangents(dout, out, lse, *(x.detach() for x in own)))
        return dq, dk, dv


def _alike(*tensors: Tensor) -> list[Tensor]:
    """Detach the tensors and make them contiguous: other strides would recompile."""
    return [x.detach().contiguous() for x in tensors]


def _attend(
    qkv: Sequence[Tensor], shapes: Sequence[Shape], scale: float, change: ScoreChange | None
) -> tuple[Tensor, Tensor]:
    """Return out and lse (natural logarithm) of these tiles."""
    # Backend TRITON_DECODE, for few rows, would be one more graph to compile. FLASH cannot differentiate lse.
    out, aux = _compiled()(
        *qkv, change and _score_mod(change, qkv[0]), _block_mask(tuple(shapes), qkv[0].device), scale, enable_gqa=True,
        kernel_options={"BACKEND": "TRITON"}, return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    return out, aux.lse


def _cotangents(dout: Tensor, out: Tensor, lse: Tensor, own_out: Tensor, own_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return (d out_i, d lse_i). d lse_i is computed from the rounded d out_i, so that rounding cancels in the derivative
    of a score, `d out_i . (v - out_i) + d lse_i = d out_i . (v - out)`."""
    own_dout = (torch.exp(own_lse - lse).unsqueeze(-1) * dout).to(own_out.dtype)
    return own_dout, (own_dout * (own_out.to(lse.dtype) - out)).sum(-1)


def _score_mod(change: ScoreChange, q: Tensor) -> Callable[..., Tensor]:
    """Return the score_mod. Its parameters are tensors, so that a change of cap or of places does not recompile."""
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
    """Build the block mask of successive tiles from their bands: `create_block_mask` would materialise every pair.

    A row sees keys `first` to `last`; `first` and `last` are non-decreasing over rows, and the rows together see every
    key. So a block is visible if it overlaps the keys from `first` of its first row to `last` of its last row. A block is
    full if its first row and its last row see all its keys.
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
    whole &= (bottom - top == _BLOCK - 1) & (right - left == _BLOCK - 1).T  # a block shorter than 128 needs the mask
    part, lists = seen & ~whole, dict[str, Any]()
    for name, blocks in {"kv": part, "full_kv": whole, "q": part.T, "full_q": whole.T}.items():
        order = np.argsort(~blocks, axis=1, kind="stable")  # in each row, list the columns of its blocks first
        lists[f"{name}_num_blocks"], lists[f"{name}_indices"] = (
            upload(torch.from_numpy(x.astype(np.int32, order="C")), device)[None, None] for x in (blocks.sum(1), order)
        )
    from_key, to_key = (upload(torch.from_numpy(x.astype(np.int32)), device) for x in (first, last))

    def sees(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (from_key[row] <= key) & (key <= to_key[row])

    return BlockMask(lengths, **lists, BLOCK_SIZE=(_BLOCK, _BLOCK), mask_mod=sees)


@lru_cache(maxsize=2)
def _compiled(backend: str = "inductor") -> Callable[..., Any]:
    """Return compiled `flex_attention`, one for all calls. Uncompiled, it materialises the scores of all heads.

    The first graph is for one length, the second for any length. `dynamic=True` would save the first graph, but make
    the scale a variable. Phases, dtypes, heads, score changes, and lengths of 1, of one block and of more make some dozens of
    graphs, hence the higher limit. `fullgraph` makes a call beyond the limit raise instead of silently running
    uncompiled. `isolate_recompiles` keeps these graphs from using up the limit of the user's own `flex_attention`.
    """
    return torch.compile(  # type: ignore[call-overload]
        flex_attention, fullgraph=True, backend=backend, recompile_limit=128, isolate_recompiles=True
    )
