"""PyTorch's own flash attention with its log-sum-exp: private aten operators, kept in this one file.

    CPU    `_scaled_dot_product_flash_attention_for_cpu`: full, causal for square tiles, or an additive mask, which is slow
    CUDA   `_flash_attention_forward`: full, causal and bands (a window aligned to the bottom right)

Both take grouped heads as they are. Tests hold each mode against plain math; the CUDA calls through a stand-in.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise

import torch

from longspan.plan import Shape, Tile

Tensor = torch.Tensor
aten = torch.ops.aten

_BAND_ROWS, _BAND_COLUMNS, _NARROW = 128, 256, 64
"""Forward computes so many rows of a band at a time, by a mask; backward so many columns, unless the band is narrower still."""
_LEAF, _HALVED = 128, 1024
"""In backward, triangles of up to `_HALVED` rows are cut until they have `_LEAF` or fewer."""
_TALL = 512
"""In backward, a tile of fewer rows than this is computed faster in fp32 than in bf16 or fp16 (on the machines we measured)."""


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

    def split(self, tile: Tile, device: torch.device, backward: bool = False) -> Sequence[Tile]:
        return _split_for_cuda(tile) if device.type == "cuda" else _split_for_cpu(tile, backward)

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
        if shape.num_q < _TALL and q.dtype.itemsize == 2:
            dout, q, k, v, out = (x.float() for x in (dout, q, k, v, out))
        causal, mask = _cpu_mode(shape, q.dtype)
        grads: tuple[Tensor, Tensor, Tensor] = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale
        )
        return grads


def _split_for_cpu(tile: Tile, backward: bool) -> Sequence[Tile]:
    """Into rectangles and lower triangles, for which the operator has modes; the rest goes by masks, as little as can be.

    # # | # . .     a lower trapezoid: rows that see every key below, keys that every row sees on the left, a triangle
    # # | # # .
    # # | # # #
    ---------       # # # # . .     a band: some rows at a time; in backward some keys at a time, all their rows, as an upper
    # # # # #       . # # # # .     triangle, a rectangle and a lower one: tall tiles are faster there, and each is added to
                    . . # # # #     the sums of its keys but once
    """
    shape = tile.shape
    if not shape.has_lo and not shape.has_hi:
        return (tile,)
    if not shape.has_hi:
        return _split_lower(tile, backward)
    if not backward or shape.hi - shape.lo < _NARROW:
        rows = range(0, shape.num_q, _BAND_ROWS)
        return list(_parts(tile, *((row, min(row + _BAND_ROWS, shape.num_q), 0, shape.num_k) for row in rows)))
    if not shape.has_lo:
        return [_turned(part, tile) for part in _split_lower(_turned(tile, tile), backward)]
    return [piece for strip in _strips(tile) for piece in _split_for_cpu(strip, backward)]


def _strips(tile: Tile) -> Iterator[Tile]:
    """A band, some keys at a time, each strip in two parts that only one of its diagonals bounds."""
    shape = tile.shape
    columns = min(_BAND_COLUMNS, shape.hi - shape.lo + 1)
    for start in range(0, shape.num_k, columns):
        stop = min(start + columns, shape.num_k)
        edge = min(max(stop - 1 + shape.lo, 0), shape.num_q)  # from this row on every key of the strip has begun
        yield from _parts(tile, (0, edge, start, stop), (edge, shape.num_q, start, stop))


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
    parts = _parts(tile, *corners)
    return [piece for part in parts for piece in ([part] if not part.shape.has_lo else _split_lower(part, backward))]


def _parts(tile: Tile, *corners: tuple[int, int, int, int]) -> Iterator[Tile]:
    """The parts of a tile within these rows and columns, those that hold a pair."""
    for corner in corners:
        part = _part(tile, *corner)
        if part is not None:
            yield part


def _turned(tile: Tile, within: Tile) -> Tile:
    """The tile after half a turn of `within`: its last row is the first, its last key the first."""
    rows, keys = within.q0 + within.q1 - 1, within.k0 + within.k1 - 1
    q0, q1, k0, k1, lo, hi = tile
    return Tile(rows + 1 - q1, rows + 1 - q0, keys + 1 - k1, keys + 1 - k0, rows - keys - hi, rows - keys - lo)


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


@lru_cache(maxsize=8)
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
