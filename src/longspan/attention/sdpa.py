"""PyTorch's own flash attention with its log-sum-exp: private aten operators, kept in this one file.

    CPU    `_scaled_dot_product_flash_attention_for_cpu`: full, causal for square tiles, or an additive mask, which is slow
    CUDA   `_flash_attention_forward`: full, causal and bands (a window aligned to the bottom right)

Both take grouped heads as they are. Tests hold each mode against plain math; the CUDA calls through a stand-in.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch

from longspan.attention.scores import ScoreChange
from longspan.attention.windows import (
    heads_first,
    parts_of,
    rows_first,
    sequences,
    shows,
    split_for_windows,
    window_of,
)
from longspan.plan import Shape, Tile

Tensor = torch.Tensor
aten = torch.ops.aten

_BAND_ROWS = 64
"""Forward computes so many rows of a band at a time, by a mask."""
_BAND_COLUMNS = {8: 128, 4: 128, 2: 256}
"""Backward computes so many keys of a band at a time, by the bytes of an element."""
_MASKED = 2048
"""What is masked is at most so long: of longer parts only the ends are."""
_LEAF, _HALVED = 128, 1024
"""In backward, triangles of up to `_HALVED` rows are cut until they have `_LEAF` or fewer."""
_TALL = 512
"""In backward, a tile of fewer rows than this is computed faster in fp32 than in bf16 or fp16 (on the machines we measured)."""


class SdpaKernel:
    """The flash kernels that `scaled_dot_product_attention` itself uses."""

    name = "sdpa"

    def refusal(self, q: Tensor, k: Tensor, v: Tensor, change: ScoreChange | None = None) -> str | None:
        if change is not None:
            return "flash attention takes scores as they are: no soft-cap, no ALiBi"
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

    def split(self, tile: Tile, device: torch.device, dtype: torch.dtype, backward: bool = False) -> Sequence[Tile]:
        return split_for_windows(tile) if device.type == "cuda" else _split_for_cpu(tile, dtype, backward)

    def joins(self, first: Shape, second: Shape, device: torch.device) -> bool:
        # As a batch of equal tiles on CPU; on CUDA as sequences of any length under the window of the first.
        return shows(window_of(first), second) if device.type == "cuda" else first == second

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, shapes: Sequence[Shape], scale: float, change: ScoreChange | None = None
    ) -> tuple[Tensor, Tensor]:
        if q.device.type == "cuda":
            return _cuda_forward(q, k, v, shapes, scale)
        q, k, v = (_as_batch(x, len(shapes)) for x in (q, k, v))
        causal, mask = _cpu_mode(shapes[0], q.dtype)
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
        return _as_rows(out, len(shapes)), _as_rows(lse, len(shapes))

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        shapes: Sequence[Shape],
        scale: float,
        change: ScoreChange | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if q.device.type == "cuda":
            return _cuda_backward(dout, q, k, v, out, lse, shapes, scale)
        if shapes[0].num_q < _TALL and q.dtype.itemsize == 2:
            dout, q, k, v, out = (x.float() for x in (dout, q, k, v, out))
        dout, q, k, v, out, lse = (_as_batch(x, len(shapes)) for x in (dout, q, k, v, out, lse))
        causal, mask = _cpu_mode(shapes[0], q.dtype)
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale
        )
        dq, dk, dv = (_as_rows(grad, len(shapes)) for grad in grads)
        return dq, dk, dv


def _as_batch(x: Tensor, num: int) -> Tensor:
    """`(1, H, num * T, ...)` -> `(num, H, T, ...)`, a view."""
    return x if num == 1 else x.unflatten(2, (num, -1))[0].transpose(0, 1)


def _as_rows(x: Tensor, num: int) -> Tensor:
    """`(num, H, T, ...)` -> `(1, H, num * T, ...)`: a view of what the operator gives, whose rows come before its heads."""
    return x if num == 1 else x.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None]


def _split_for_cpu(tile: Tile, dtype: torch.dtype, backward: bool) -> Sequence[Tile]:
    """Into rectangles and lower triangles, for which the operator has modes; the rest goes by masks, as little as can be.

    # # | # . .     a lower trapezoid: rows that see every key below, keys that every row sees on the left, a triangle
    # # | # # .
    # # | # # #
    ---------       # # # # . .     what has an upper edge: some rows at a time; in backward some keys at a time, all their
    # # # # #       . # # # # .     rows: tall tiles are faster there, and each is added to the sums of its keys but once
                    . . # # # #
    """
    shape = tile.shape
    if not shape.has_lo and not shape.has_hi:
        return (tile,)
    if not shape.has_hi:
        return _split_lower(tile, backward)
    if backward:
        width = min(_BAND_COLUMNS[dtype.itemsize], max(shape.hi - shape.lo + 1, _BAND_ROWS))
        strips = parts_of(tile, *((0, shape.num_q, key, key + width) for key in range(0, shape.num_k, width)))
        return [part for strip in strips for part in _split_rows(strip)]
    blocks = parts_of(tile, *((row, row + _BAND_ROWS, 0, shape.num_k) for row in range(0, shape.num_q, _BAND_ROWS)))
    return [part for block in blocks for part in _split_keys(block)]


def _split_rows(tile: Tile) -> Sequence[Tile]:
    """A tall tile as its ends, which need a mask, and the rows between, which see every key."""
    num_q, num_k, lo, hi = tile.shape
    first, last = max(num_k - 1 + lo, 0), min(hi + 1, num_q)
    if num_q <= _MASKED or first >= last:
        return (tile,)
    return list(parts_of(tile, (0, first, 0, num_k), (first, last, 0, num_k), (last, num_q, 0, num_k)))


def _split_keys(tile: Tile) -> Sequence[Tile]:
    """A wide tile likewise: its first and last keys, and those between, which every row sees."""
    num_q, num_k, lo, hi = tile.shape
    first, last = max(num_q - 1 - hi, 0), min(1 - lo, num_k)
    if num_k <= _MASKED or first >= last:
        return (tile,)
    return list(parts_of(tile, (0, num_q, 0, first), (0, num_q, first, last), (0, num_q, last, num_k)))


def _split_lower(tile: Tile, backward: bool) -> Sequence[Tile]:
    """A lower trapezoid as two rectangles and a triangle, as many of them as there are. In backward a triangle of moderate
    size is cut in two and a square: the operator computes much of what a small one hides."""
    shape = tile.shape
    if shape.lo == 0 and shape.num_q == shape.num_k:
        if not backward or not _LEAF < shape.num_q <= _HALVED:
            return (tile,)
        half, end = shape.num_q // 2, shape.num_q
        corners = ((0, half, 0, half), (half, end, 0, half), (half, end, half, end))
    else:
        side = shape.num_k + shape.lo
        corners = ((0, side, 0, -shape.lo), (0, side, -shape.lo, shape.num_k), (side, shape.num_q, 0, shape.num_k))
    parts = parts_of(tile, *corners)
    return [piece for part in parts for piece in ([part] if not part.shape.has_lo else _split_lower(part, backward))]


def _cpu_mode(shape: Shape, dtype: torch.dtype) -> tuple[bool, Tensor | None]:
    """`is_causal` and the additive mask for a tile that `_split_for_cpu` gave."""
    if not shape.has_hi and not shape.has_lo:
        return False, None
    if not shape.has_hi and shape.lo == 0 and shape.num_q == shape.num_k:
        return True, None
    return False, _additive_mask(shape, dtype)


@lru_cache(maxsize=16)
def _additive_mask(shape: Shape, dtype: torch.dtype) -> Tensor:
    """0 where the band sees, -inf elsewhere: `(num_q, num_k)`, the same for every block of a window."""
    away = torch.arange(shape.num_q, device="cpu")[:, None] - torch.arange(shape.num_k, device="cpu")
    hidden = (away < shape.lo) | (away > shape.hi)
    return torch.zeros(shape.num_q, shape.num_k, dtype=dtype, device="cpu").masked_fill_(hidden, float("-inf"))


def _cuda_forward(q: Tensor, k: Tensor, v: Tensor, shapes: Sequence[Shape], scale: float) -> tuple[Tensor, Tensor]:
    left, right = window_of(shapes[0])
    q, k, v = (rows_first(x, shapes) for x in (q, k, v))
    out, lse, *_ = aten._flash_attention_forward(
        q,
        k,
        v,
        *sequences(shapes, q.device),
        0.0,
        False,
        False,
        scale=scale,
        window_size_left=left,
        window_size_right=right,
    )
    return heads_first(out, shapes), lse if len(shapes) == 1 else lse[None]


def _cuda_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, shapes: Sequence[Shape], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    left, right = window_of(shapes[0])
    dout, q, k, v, out = (rows_first(x, shapes) for x in (dout, q, k, v, out))
    lse = lse.contiguous() if len(shapes) == 1 else lse[0].contiguous()
    # Without dropout the random state is not read, but the operator wants its two tensors.
    unused = torch.empty(0, dtype=torch.int64, device=q.device)
    grads = aten._flash_attention_backward(
        dout, q, k, v, out, lse, *sequences(shapes, q.device), 0.0, False, unused, unused,
        scale=scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    dq, dk, dv = (heads_first(grad, shapes) for grad in grads)
    return dq, dk, dv
