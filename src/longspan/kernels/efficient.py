"""PyTorch's memory-efficient attention on CUDA: private aten operators, kept in this one file.

    mask type 0    every pair            1    causal from the top left        2    causal from the bottom right

    # . . .     type 1; with window 2:   # . . .         # # # . .     type 2        # # #     turned: rows and keys in
    # # . .     the last 2 keys          # # . .         # # # # .                   . # #     reverse order, then type 1
    # # # .     of each row              . # # .         # # # # #                   . . #     or 2

The kernel for fp32, and where flash attention refuses: K and V dims that differ, devices before Ampere. Facts from
kernel_forward.h and kernel_backward.h, which torch ships: lse is padded to a multiple of 32 rows, with inf in backward; every row
begins on 16 bytes; of several sequences lse is `(sequences, H, rows of the longest)`; backward takes `out` for contiguous; its
window counts from the top left, with type 2 too, so windows go with type 1 alone. Heads are not grouped: those of K and V are
repeated, and their gradients summed in fp32. Backward adds atomically, in any order, unless torch's deterministic algorithms are
on. It has not run on a GPU (none was at hand): tests call it through a stand-in with its schema.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from longspan.comm.upload import upload
from longspan.kernels.capability import AMPERE, capability
from longspan.kernels.protocol import BackwardInputs
from longspan.kernels.scores import ScoreChange
from longspan.kernels.windows import parts_of, sequences
from longspan.plan import Shape, Tile

Tensor = torch.Tensor
aten = torch.ops.aten

_FULL, _TOP_LEFT, _BOTTOM_RIGHT = 0, 1, 2
_LSE_ROWS = 32
_ROW_BYTES = 16
_INF = float("inf")
_INT32 = 2**31 - 1


class Mode(NamedTuple):
    """How the operator shows a band: the type of its mask, keys of a window, whether rows and keys go in reverse order."""

    mask: int
    window: int | None = None
    turned: bool = False


class EfficientKernel:
    """`_efficient_attention_forward` and its backward."""

    name = "efficient"

    def refusal(self, q: Tensor, k: Tensor, v: Tensor, change: ScoreChange | None = None) -> str | None:
        if q.device.type != "cuda" or q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"memory-efficient attention takes fp32, bf16 and fp16 on cuda, not {q.dtype} on {q.device.type}"
        if change is not None:
            return "memory-efficient attention takes scores as they are: no soft-cap, no ALiBi"
        unit = _ROW_BYTES // q.dtype.itemsize
        if k.shape[3] % unit or v.shape[3] % unit:
            return (
                f"memory-efficient attention takes head dims that {unit} divides in {q.dtype}, "
                f"not {k.shape[3]} and {v.shape[3]}"
            )
        if q.dtype == torch.bfloat16 and capability(q.device)[0] < AMPERE:
            return "memory-efficient attention has no bf16 on devices before Ampere"
        return None

    def split(self, tile: Tile, device: torch.device, dtype: torch.dtype, backward: bool = False) -> Sequence[Tile]:
        return _split(tile)

    def joins(self, first: Shape, second: Shape, device: torch.device) -> bool:
        # Rows are padded to the longest of a call, so that tiles of one call are about as long.
        short, long = sorted((first.num_q, second.num_q))
        return long <= max(2 * short, _LSE_ROWS) and _shows(_mode(first), second)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, shapes: Sequence[Shape], scale: float, change: ScoreChange | None = None
    ) -> tuple[Tensor, Tensor]:
        mode, shapes, group = _mode(shapes[0]), tuple(shapes), q.shape[1] // k.shape[1]
        out, lse, *_ = aten._efficient_attention_forward(
            _rows_first(q, mode), _rows_first(k, mode, group), _rows_first(v, mode, group), None,
            *sequences(shapes, q.device), 0.0, mode.mask, True, scale=scale, window_size=mode.window,
        )  # fmt: skip
        return _heads_first(out, mode), _lse_of_rows(lse, shapes, mode)

    def backward(
        self, saved: BackwardInputs, shapes: Sequence[Shape], scale: float, change: ScoreChange | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out, lse = saved
        mode, shapes, group = _mode(shapes[0]), tuple(shapes), q.shape[1] // k.shape[1]
        of_q, of_k, most_q, most_k = sequences(shapes, q.device)
        # Without dropout the random state is not read, but the operator wants its two tensors.
        unused = torch.empty((), dtype=torch.int64, device=q.device)
        dq, dk, dv, _ = aten._efficient_attention_backward(
            _rows_first(dout, mode), _rows_first(q, mode), _rows_first(k, mode, group), _rows_first(v, mode, group), None,
            _rows_first(out, mode).contiguous(), of_q, of_k, most_q, most_k, _padded_lse(lse, shapes, mode),
            0.0, unused, unused, mode.mask, False, scale=scale, window_size=mode.window,
        )  # fmt: skip
        return _heads_first(dq, mode), _heads_first(dk, mode, group), _heads_first(dv, mode, group)


def _mode(shape: Shape) -> Mode:
    found = _find_mode(shape)
    assert found is not None, f"{shape} was not split"
    return found


def _find_mode(shape: Shape) -> Mode | None:
    """None for a band that has to be split."""
    num_q, num_k, lo, hi = shape
    if not shape.has_lo:
        if not shape.has_hi:
            return Mode(_FULL)
        # Row i and key j become num_q - 1 - i and num_k - 1 - j, so the upper bound of i - j becomes a lower one.
        turned = _find_mode(Shape(num_q, num_k, num_q - num_k - hi, num_q))
        return None if turned is None else turned._replace(turned=True)
    if lo == 0:
        return Mode(_TOP_LEFT, hi + 1 if shape.has_hi else None)
    return Mode(_BOTTOM_RIGHT) if lo == num_q - num_k and not shape.has_hi else None


def _shows(mode: Mode, shape: Shape) -> bool:
    """Whether a call in that mode shows exactly the pairs of one more tile. Turned, sequences would change places."""
    num_q, num_k, lo, hi = shape
    if mode.turned:
        return False
    if mode.mask == _FULL:
        return not shape.has_lo and not shape.has_hi
    if mode.mask == _BOTTOM_RIGHT:
        return not shape.has_hi and (lo == num_q - num_k if shape.has_lo else num_q == 1)
    window = hi + 1 if shape.has_hi else None
    open_too = window is None and mode.window is not None and mode.window >= num_q
    return (mode.window == window or open_too) and (lo == 0 if shape.has_lo else num_k == 1)


def _split(tile: Tile) -> Sequence[Tile]:
    """Keys before and behind the lower edge of the first row; and rows before and behind the last that sees the first key.

    # # | # . .       # # | # . .        # # # #
    # # | # # .       . # | # # .        # # # #
    # # | # # #       . . | # # #        -------
                                         . # # #
                                         . . # #
    """
    shape = tile.shape
    if _find_mode(shape) is not None:
        return (tile,)
    num_q, num_k, lo, hi = shape
    by_keys, by_rows = ((0, num_q, 0, -lo), (0, num_q, -lo, num_k)), ((0, hi + 1, 0, num_k), (hi + 1, num_q, 0, num_k))
    corners = by_keys if shape.has_lo else by_rows
    return [piece for part in parts_of(tile, *corners) for piece in _split(part)]


def _rows_first(x: Tensor, mode: Mode, group: int = 1) -> Tensor:
    """`(B, K, T, D)` -> `(B, T, K group, D)`, as the kernels read it."""
    x = (x if group == 1 else x.repeat_interleave(group, dim=1)).transpose(1, 2)
    x = x.flip(1) if mode.turned else x
    unit = _ROW_BYTES // x.element_size()
    even = x.storage_offset() % unit == 0 and all(stride % unit == 0 for stride in x.stride()[:3])
    # Kernels reckon where a head begins in 32 bits.
    near = x.shape[2] * x.stride(2) <= _INT32
    return x if even and near else x.clone(memory_format=torch.contiguous_format)


def _heads_first(x: Tensor, mode: Mode, group: int = 1) -> Tensor:
    """`(B, T, K group, D)` -> `(B, K, T, D)`, heads of a group summed in at least fp32."""
    if group > 1:
        x = x.unflatten(2, (-1, group)).sum(3, dtype=torch.promote_types(x.dtype, torch.float32))
    return (x.flip(1) if mode.turned else x).transpose(1, 2)


def _lse_of_rows(lse: Tensor, shapes: tuple[Shape, ...], mode: Mode) -> Tensor:
    """`(B, H, rows)`, or `(sequences, H, rows)` of the longest, padded -> `(B, H, T)`."""
    if len(shapes) > 1:
        return lse.transpose(0, 1).flatten(1)[None, :, _places(shapes, lse.device)]
    lse = lse[:, :, : shapes[0].num_q]
    return lse.flip(2) if mode.turned else lse


def _padded_lse(lse: Tensor, shapes: tuple[Shape, ...], mode: Mode) -> Tensor:
    """The other way, contiguous; padding is inf, for which a kernel need not look where the rows end."""
    B, H, rows = lse.shape
    if len(shapes) > 1:
        padded = lse.new_full((H, len(shapes) * _longest(shapes)), _INF)
        padded[:, _places(shapes, lse.device)] = lse[0]
        return padded.unflatten(1, (len(shapes), -1)).transpose(0, 1).contiguous()
    padded = lse.new_full((B, H, _longest(shapes)), _INF)
    padded[:, :, :rows] = lse.flip(2) if mode.turned else lse
    return padded


def _longest(shapes: Sequence[Shape]) -> int:
    return -(-max(shape.num_q for shape in shapes) // _LSE_ROWS) * _LSE_ROWS


@lru_cache(maxsize=256)
def _places(shapes: tuple[Shape, ...], device: torch.device) -> Tensor:
    """Where the rows of each sequence lie in those padded to the longest, one sequence after the other."""
    longest = _longest(shapes)
    places = torch.cat([n * longest + torch.arange(shape.num_q) for n, shape in enumerate(shapes)])
    return upload(places, device)
