"""Splits tiles for operators with three modes: full, causal for square tiles, and a costly additive mask.

These are aten's flash attention on CPU and cuDNN's on CUDA. The sizes below were the fastest on CPU, as measured.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch

from longspan.kernels.windows import parts_of
from longspan.plan import Shape, Tile

Tensor = torch.Tensor

_BAND_ROWS = 64
"""Rows of a band that forward computes at a time with a mask."""
_BAND_COLUMNS = {8: 128, 4: 128, 2: 256}
"""Keys of a band that backward computes at a time, by itemsize."""
_MASKED = 2048
"""Longest part that is masked completely. Longer parts are masked only at their ends."""
_SIDE = 128
"""Divisor of the sides of regular tiles."""
_LEAF, _HALVED = 128, 1024
"""In backward, triangles of up to `_HALVED` rows are halved until they have `_LEAF` or fewer."""


def are_regular(tiles: Iterable[Tile]) -> bool:
    """Whether every tile is full, or causal and square, with sides that are multiples of 128. Such shapes recur in every
    batch, unlike shapes of document tiles; cuDNN builds a graph for each new shape."""
    return all(
        tile.shape.num_q % _SIDE == tile.shape.num_k % _SIDE == 0 and causal_of(tile.shape) is not None
        for tile in tiles
    )


def split_by_modes(tile: Tile, dtype: torch.dtype, backward: bool) -> Sequence[Tile]:
    """Split a tile into rectangles and lower triangles, which have modes, and remaining tiles, which are masked.

    # # | # . .     a lower trapezoid: rows that see every key (below), keys that every row sees (left), a triangle
    # # | # # .
    # # | # # #
    ---------       # # # # . .     with an upper edge: some rows at a time; in backward some keys with all their rows, since
    # # # # #       . # # # # .     tall tiles are faster there, and each is added to the gradients of its keys only once
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
    """Split a tall tile into its ends, which need a mask, and the rows between, which see every key."""
    num_q, num_k, lo, hi = tile.shape
    first, last = max(num_k - 1 + lo, 0), min(hi + 1, num_q)
    if num_q <= _MASKED or first >= last:
        return (tile,)
    return list(parts_of(tile, (0, first, 0, num_k), (first, last, 0, num_k), (last, num_q, 0, num_k)))


def _split_keys(tile: Tile) -> Sequence[Tile]:
    """Split a wide tile into its first and last keys, which need a mask, and the keys between, which every row sees."""
    num_q, num_k, lo, hi = tile.shape
    first, last = max(num_q - 1 - hi, 0), min(1 - lo, num_k)
    if num_k <= _MASKED or first >= last:
        return (tile,)
    return list(parts_of(tile, (0, num_q, 0, first), (0, num_q, first, last), (0, num_q, last, num_k)))


def _split_lower(tile: Tile, backward: bool) -> Sequence[Tile]:
    """Split a lower trapezoid into up to two rectangles and a triangle. In backward, split a triangle of moderate size
    into two triangles and a square: the operator computes most hidden pairs of a small triangle."""
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


def mode_of(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[bool, Tensor | None]:
    """Return `is_causal` and the additive mask for a tile of `split_by_modes`."""
    causal = causal_of(shape)
    return (False, _additive_mask(shape, dtype, device)) if causal is None else (causal, None)


def causal_of(shape: Shape) -> bool | None:
    """Return `is_causal` for a tile that needs no mask, otherwise None."""
    if shape.has_hi or (shape.has_lo and (shape.lo != 0 or shape.num_q != shape.num_k)):
        return None
    return shape.has_lo


@lru_cache(maxsize=16)
def _additive_mask(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the mask `(num_q, num_k)`: 0 in the band, -inf elsewhere. Cached, because tiles of a window share a mask."""
    away = torch.arange(shape.num_q, device=device)[:, None] - torch.arange(shape.num_k, device=device)
    hidden = (away < shape.lo) | (away > shape.hi)
    return torch.zeros(shape.num_q, shape.num_k, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
