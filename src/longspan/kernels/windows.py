"""Tiles for flash kernels on CUDA. These kernels take a band as a window aligned to the bottom right, and several
sequences in one call.

    # # . .     right 0            . # # .     left 1, right 1
    # # # .     (open to the       . . # #
    # # # #     left: causal)

Our tensors are heads first, `(B, H, T, D)`. These kernels take rows first, `(B, T, H, D)`, or `(T, H, D)` for several
sequences.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import torch

from longspan.comm.upload import upload
from longspan.kernels.protocol import BackwardInputs
from longspan.kernels.scores import ScoreChange
from longspan.plan import Shape, Tile

Tensor = torch.Tensor
Window = tuple[int | None, int | None]
"""Number of keys left and right of each row's diagonal. None: unbounded."""


def split_for_windows(tile: Tile) -> Sequence[Tile]:
    """Split a banded tile with more rows than keys before and after the rows that see every key. Keep other tiles.

    The operator treats a window side of `num_k` or more as open, and an open side as `num_k`, which is wrong for tiles
    with more rows than keys. The first and the last part have at least as many keys as rows.
    """
    num_q, num_k, lo, hi = tile.shape
    if num_q <= num_k or not (tile.shape.has_lo or tile.shape.has_hi):
        return (tile,)
    last_key = min(max(num_k - 1 + lo, 0), num_q)  # the first row that sees the last key
    first_key = min(max(hi + 1, last_key), num_q)  # the first row at or after `last_key` that misses the first key
    edges = (0, last_key, first_key, num_q)
    parts = (part_of(tile, start, stop, 0, num_k) for start, stop in pairwise(edges))
    return [part for part in parts if part is not None]


def window_of(shape: Shape) -> Window:
    """Return the band as a window."""
    left = shape.hi + shape.num_k - shape.num_q if shape.has_hi else None
    right = shape.num_q - shape.num_k - shape.lo if shape.has_lo else None
    return left, right


def shows(window: Window, shape: Shape) -> bool:
    """Whether the window covers exactly the pairs of a tile. Each side must equal the tile's side, or cover an open side."""
    beyond = (shape.num_k - 1, shape.num_q - 1)
    own = window_of(shape)
    return all(w == o or (o is None and w is not None and w >= b) for w, o, b in zip(window, own, beyond, strict=True))


def flash_forward(
    operator: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, shapes: Sequence[Shape], scale: float
) -> tuple[Tensor, Tensor]:
    """Return out and lse by an operator with the signature of `aten._flash_attention_forward`."""
    left, right = window_of(shapes[0])
    q, k, v = (rows_first(x, shapes) for x in (q, k, v))
    out, lse, *_ = operator(
        q, k, v, *sequences(tuple(shapes), q.device), 0.0, False, False,
        scale=scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return heads_first(out, shapes), lse if len(shapes) == 1 else lse[None]


def flash_backward(
    operator: Callable[..., Any], saved: BackwardInputs, shapes: Sequence[Shape], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv by an operator with the signature of `aten._flash_attention_backward`. The operator
    adds atomically, in any order, unless torch's deterministic algorithms are on."""
    left, right = window_of(shapes[0])
    dout, q, k, v, out = (rows_first(x, shapes) for x in saved[:5])
    lse = saved.lse.contiguous() if len(shapes) == 1 else saved.lse[0].contiguous()
    # The operator requires the two tensors of random state, though it reads them only for dropout.
    unused = torch.empty(0, dtype=torch.int64, device=q.device)
    grads = operator(
        dout, q, k, v, out, lse, *sequences(tuple(shapes), q.device), 0.0, False, unused, unused,
        scale=scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    dq, dk, dv = (heads_first(grad, shapes) for grad in grads)
    return dq, dk, dv


class Windowed:
    """Tiles of a kernel that takes a band as a window, and tiles under one window as sequences of one call."""

    def split(self, tile: Tile, device: torch.device, dtype: torch.dtype, backward: bool = False) -> Sequence[Tile]:
        return split_for_windows(tile)

    def joins(self, first: Shape, second: Shape, device: torch.device) -> bool:
        return shows(window_of(first), second)


def flash_refusal(
    name: str, q: Tensor, k: Tensor, v: Tensor, change: ScoreChange | None, most: int = 256
) -> str | None:
    """Return why the CUDA flash kernel `name`, for head dims up to `most`, cannot compute these tensors, or None."""
    if q.device.type != "cuda" or q.dtype not in (torch.bfloat16, torch.float16):
        return f"{name} takes bf16 and fp16 on cuda, not {q.dtype} on {q.device.type}"
    if change is not None:
        return f"{name} has no soft-cap and no ALiBi"
    if k.shape[3] != v.shape[3] or q.shape[3] > most or q.shape[3] % 8:
        return f"{name} takes equal head dims, multiples of 8 up to {most}, not {k.shape[3]} and {v.shape[3]}"
    return None


def rows_first(x: Tensor, shapes: Sequence[Shape]) -> Tensor:
    """`(B, H, T, D)` -> `(B, T, H, D)`, or `(T, H, D)` for several sequences."""
    return x.transpose(1, 2) if len(shapes) == 1 else x[0].transpose(0, 1)


def heads_first(x: Tensor, shapes: Sequence[Shape]) -> Tensor:
    return x.transpose(1, 2) if len(shapes) == 1 else x.transpose(0, 1)[None]


@lru_cache(maxsize=256)
def sequences(shapes: tuple[Shape, ...], device: torch.device) -> tuple[Tensor | None, Tensor | None, int, int]:
    """Return (cumulative row counts, cumulative key counts, most rows, most keys). Counts are None for one sequence."""
    queries, keys = [shape.num_q for shape in shapes], [shape.num_k for shape in shapes]
    if len(shapes) == 1:
        return None, None, queries[0], keys[0]
    of_queries, of_keys = (
        upload(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device) for lengths in (queries, keys)
    )
    return of_queries, of_keys, max(queries), max(keys)


def parts_of(tile: Tile, *corners: tuple[int, int, int, int]) -> Iterator[Tile]:
    """Yield `part_of` of the tile for each `(q0, q1, k0, k1)`, without empty parts."""
    for corner in corners:
        part = part_of(tile, *corner)
        if part is not None:
            yield part


def part_of(tile: Tile, q0: int, q1: int, k0: int, k1: int) -> Tile | None:
    """Return the trimmed part of a tile within rows `q0..q1` and columns `k0..k1`, or None if the part is empty.

    Rows and columns are counted from the tile's own first row and column.
    """
    q0, q1 = tile.q0 + q0, min(tile.q0 + q1, tile.q1)
    k0, k1 = tile.k0 + k0, min(tile.k0 + k1, tile.k1)
    q0, q1 = max(q0, k0 + tile.lo), min(q1, k1 + tile.hi)
    k0, k1 = max(k0, q0 - tile.hi), min(k1, q1 - tile.lo)
    if q0 >= q1 or k0 >= k1:
        return None
    return Tile(q0, q1, k0, k1, max(tile.lo, q0 - k1 + 1), min(tile.hi, q1 - 1 - k0))
