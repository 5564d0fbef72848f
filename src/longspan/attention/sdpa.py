"""PyTorch's own flash attention with its log-sum-exp: private aten operators, kept in this one file.

    CPU    `_scaled_dot_product_flash_attention_for_cpu`: full, causal for square tiles, or an additive mask
    CUDA   `_flash_attention_forward`: full, causal and bands (a window aligned to the bottom right)

Both take grouped heads as they are. Tests hold each mode against plain math; the CUDA calls through a stand-in.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import torch

from longspan.plan import Shape, Tile

Tensor = torch.Tensor
aten = torch.ops.aten

_BAND_ROWS = 128
"""Rows of a band computed at a time on CPU: narrow, so that few hidden pairs are computed beside the diagonal."""


class SdpaKernel:
    """The flash kernels that `scaled_dot_product_attention` itself uses."""

    name = "sdpa"

    def refusal(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        if k.shape[3] != v.shape[3]:
            return f"keys have dim {k.shape[3]} and values {v.shape[3]}; flash attention takes equal ones"
        if q.device.type == "cpu":
            known: tuple[torch.dtype, ...] = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        elif q.device.type == "cuda":
            known = (torch.bfloat16, torch.float16)
        else:
            return f"there is no flash attention on device {q.device.type!r}"
        if q.dtype not in known:
            return f"flash attention on {q.device.type} takes {', '.join(str(d) for d in known)}, not {q.dtype}"
        if q.device.type == "cuda" and (q.shape[3] > 256 or q.shape[3] % 8):
            return f"flash attention on cuda takes head dims that 8 divides up to 256, not {q.shape[3]}"
        return None

    def split(self, tile: Tile, device: torch.device) -> Sequence[Tile]:
        return _split_for_cuda(tile) if device.type == "cuda" else _split_for_cpu(tile)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, shape: Shape, scale: float) -> tuple[Tensor, Tensor]:
        if q.device.type == "cuda":
            return _cuda_forward(q, k, v, shape, scale)
        causal, mask = _cpu_mode(shape, q.dtype)
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, shape: Shape, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if q.device.type == "cuda":
            return _cuda_backward(dout, q, k, v, out, lse, shape, scale)
        causal, mask = _cpu_mode(shape, q.dtype)
        grads: tuple[Tensor, Tensor, Tensor] = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale
        )
        return grads


def _split_for_cpu(tile: Tile) -> Sequence[Tile]:
    """Full and square causal tiles stay; a lower trapezoid is two rectangles and a square; other bands go 128 rows at a time.

    # # | # . .        rows that see every key below, keys that every row sees on the left
    # # | # # .
    # # | # # #
    ---------
    # # # # #
    """
    shape = tile.shape
    num_q, num_k, lo = shape.num_q, shape.num_k, shape.lo
    if not shape.has_hi:
        if not shape.has_lo or (lo == 0 and num_q == num_k):
            return (tile,)
        side = num_k + lo
        parts = [_part(tile, 0, side, 0, -lo), _part(tile, 0, side, -lo, num_k), _part(tile, side, num_q, 0, num_k)]
        return [part for part in parts if part is not None]
    blocks = (_part(tile, row, min(row + _BAND_ROWS, num_q), 0, num_k) for row in range(0, num_q, _BAND_ROWS))
    return [block for block in blocks if block is not None]


def _split_for_cuda(tile: Tile) -> Sequence[Tile]:
    """Windows as they are, unless the tile is taller than wide: the operator takes a side of `num_k` or more for open, and an
    open side for `num_k`. Rows that see every key, and those before and after them, are then tiles at least as wide as tall.
    """
    num_q, num_k, lo, hi = tile.shape
    if num_q <= num_k or not (tile.shape.has_lo or tile.shape.has_hi):
        return (tile,)
    last_key = min(max(num_k - 1 + lo, 0), num_q)  # the first row that sees the last key
    first_key = min(max(hi + 1, last_key), num_q)  # the first row from there on that misses the first key
    edges = (0, last_key, first_key, num_q)
    parts = (_part(tile, start, stop, 0, num_k) for start, stop in pairwise(edges))
    return [part for part in parts if part is not None]


def _part(tile: Tile, q0: int, q1: int, k0: int, k1: int) -> Tile | None:
    """The part of a tile within rows `q0..q1` and columns `k0..k1` counted from its corner, trimmed."""
    q0, q1, k0, k1 = tile.q0 + q0, tile.q0 + q1, tile.k0 + k0, tile.k0 + k1
    q0, q1 = max(q0, k0 + tile.lo), min(q1, k1 + tile.hi)
    k0, k1 = max(k0, q0 - tile.hi), min(k1, q1 - tile.lo)
    if q0 >= q1 or k0 >= k1:
        return None
    return Tile(q0, q1, k0, k1, max(tile.lo, q0 - k1 + 1), min(tile.hi, q1 - 1 - k0))


def _cpu_mode(shape: Shape, dtype: torch.dtype) -> tuple[bool, Tensor | None]:
    """`is_causal` and the additive mask for a tile that `_split_for_cpu` gave."""
    if not shape.has_hi and not shape.has_lo:
        return False, None
    if not shape.has_hi and shape.lo == 0 and shape.num_q == shape.num_k:
        return True, None
    return False, _additive_mask(shape, dtype)


@lru_cache(maxsize=4)
def _additive_mask(shape: Shape, dtype: torch.dtype) -> Tensor:
    """0 where the band sees, -inf elsewhere: `(num_q, num_k)` of at most 128 rows, the same for every block of a window."""
    away = torch.arange(shape.num_q, device="cpu")[:, None] - torch.arange(shape.num_k, device="cpu")
    hidden = (away < shape.lo) | (away > shape.hi)
    return torch.zeros(shape.num_q, shape.num_k, dtype=dtype, device="cpu").masked_fill_(hidden, float("-inf"))


def _window(shape: Shape) -> tuple[int | None, int | None]:
    """The band as a window aligned to the bottom right: keys to the left and right of each row's diagonal, None if open."""
    left = shape.hi + shape.num_k - shape.num_q if shape.has_hi else None
    right = shape.num_q - shape.num_k - shape.lo if shape.has_lo else None
    return left, right


def _cuda_forward(q: Tensor, k: Tensor, v: Tensor, shape: Shape, scale: float) -> tuple[Tensor, Tensor]:
    left, right = _window(shape)
    out, lse, *_ = aten._flash_attention_forward(
        *(x.transpose(1, 2) for x in (q, k, v)), None, None, shape.num_q, shape.num_k, 0.0, False, False,
        scale=scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return out.transpose(1, 2), lse


def _cuda_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, shape: Shape, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    left, right = _window(shape)
    # Without dropout the random state is not read, but the operator wants its two tensors.
    unused = torch.empty(0, dtype=torch.int64, device=q.device)
    grads = aten._flash_attention_backward(
        *(x.transpose(1, 2) for x in (dout, q, k, v, out)), lse.contiguous(), None, None, shape.num_q, shape.num_k,
        0.0, False, unused, unused, scale=scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
    return dq, dk, dv
