"""Tiles for operators that know full, causal for square tiles, and an additive mask, which costs: aten's flash attention on CPU,
cuDNN's on CUDA. Sizes are those that measured best on CPU.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch

from longspan.kernels.windows import parts_of
from longspan.plan import Shape, Tile

Tensor = torch.Tensor

_BAND_ROWS = 64
"""Forward computes so many rows of a band at a time, by a mask."""
_BAND_COLUMNS = {8: 128, 4: 128, 2: 256}
"""Backward computes so many keys of a band at a time, by the bytes of an element."""
_MASKED = 2048
"""What is masked is at most so long: of longer parts only the ends are."""
_SIDE = 128
"""Divides the sides of tiles that are regular."""
_LEAF, _HALVED = 128, 1024
"""In backward, triangles of up to `_HALVED` rows are cut until they have `_LEAF` or fewer."""


def are_regular(tiles: Iterable[Tile]) -> bool:
    """Whether all are full, or causal and square, with sides that 128 divides. Such shapes are a layout's and return with every
    batch; those of documents do not, and cuDNN builds a graph for each new one."""
    return all(
        tile.shape.num_q % _SIDE == tile.shape.num_k % _SIDE == 0 and causal_of(tile.shape) is not None
        for tile in tiles
    )


def split_by_modes(tile: Tile, dtype: torch.dtype, backward: bool) -> Sequence[Tile]:
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


def mode_of(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[bool, Tensor | None]:
    """`is_causal` and the additive mask for a tile that `split_by_modes` gave."""
    causal = causal_of(shape)
    return (False, _additive_mask(shape, dtype, device)) if causal is None else (causal, None)


def causal_of(shape: Shape) -> bool | None:
    """`is_causal` of the operator where it has the shape, else None."""
    if shape.has_hi or (shape.has_lo and (shape.lo != 0 or shape.num_q != shape.num_k)):
        return None
    return shape.has_lo


@lru_cache(maxsize=16)
def _additive_mask(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
    """0 where the band sees, -inf elsewhere: `(num_q, num_k)`, the same for every block of a window."""
    away = torch.arange(shape.num_q, device=device)[:, None] - torch.arange(shape.num_k, device=device)
    hidden = (away < shape.lo) | (away > shape.hi)
    return torch.zeros(shape.num_q, shape.num_k, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
