"""PyTorch's memory-efficient attention on CUDA, by private aten operators that only this file calls.

    mask type 0    every pair            1    causal from the top left        2    causal from the bottom right

    # . . .     type 1; with window 2:   # . . .         # # # . .     type 2        # # #     turned: rows and keys in
    # # . .     the last 2 keys          # # . .         # # # # .                   . # #     reverse order, then type 1
    # # # .     of each row              . # # .         # # # # #                   . . #     or 2

"auto" uses this kernel for fp32, for K and V dims that differ, and on devices before Ampere. For grouped queries,
K and V heads are repeated, and the gradients of the repeats are summed in fp32. Backward adds atomically, in any order,
unless torch's deterministic algorithms are on. Not run on a GPU yet; tests use a stand-in with its
schema. From torch's kernel_forward.h and kernel_backward.h:

- lse is padded to a multiple of 32 rows, with inf in backward; for several sequences `(sequences, H, longest)`.
- Every row starts at a multiple of 16 bytes. Backward assumes that `out` is contiguous.
- The window of backward counts from the top left even for type 2. Windows are therefore used with type 1 only.
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
    """Operator arguments for a band: mask type, window size in keys, and whether rows and keys are reversed."""

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
            return "memory-efficient attention has no soft-cap and no ALiBi"
        unit = _ROW_BYTES // q.dtype.itemsize
        if k.shape[3] % unit or v.shape[3] % unit:
            return (
                f"memory-efficient attention takes head dims that are multiples of {unit} in {q.dtype}, "
                f"not {k.shape[3]} and {v.shape[3]}"
            )
        if q.dtype == torch.bfloat16 and capability(q.device)[0] < AMPERE:
            return "memory-efficient attention has no bf16 on devices before Ampere"
        return None

    def split(self, tile: Tile, device: torch.device, dtype: torch.dtype, backward: bool = False) -> Sequence[Tile]:
        return _split(tile)

    def joins(self, first: Shape, second: Shape, device: torch.device) -> bool:
        # The operator pads rows to the longest tile of a call, so join only tiles of similar length.
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
        # The operator requires the two tensors of random state, though it reads them only for dropout.
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
    """Return the mode of a band, or None if the band must be split."""
    num_q, num_k, lo, hi = shape
    if not shape.has_lo:
        if not shape.has_hi:
            return Mode(_FULL)
        # Reversed, row i is num_q - 1 - i and key j is num_k - 1 - j: the upper bound of i - j becomes a lower one.
        turned = _find_mode(Shape(num_q, num_k, num_q - num_k - hi, num_q))
        return None if turned is None else turned._replace(turned=True)
    if lo == 0:
        return Mode(_TOP_LEFT, hi + 1 if shape.has_hi else None)
    return Mode(_BOTTOM_RIGHT) if lo == num_q - num_k and not shape.has_hi else None


def _shows(mode: Mode, shape: Shape) -> bool:
    """Whether `mode` covers exactly the pairs of one more tile. A turned call takes one tile only: sequences would swap."""
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
    """Split a band into tiles that have modes: at the lower edge of the first row, or after the last row that sees key 0.

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
    """`(B, K, T, D)` -> `(B, T, K group, D)`, the operator's layout, with aligned rows."""
    x = (x if group == 1 else x.repeat_interleave(group, dim=1)).transpose(1, 2)
    x = x.flip(1) if mode.turned else x
    unit = _ROW_BYTES // x.element_size()
    even = x.storage_offset() % unit == 0 and all(stride % unit == 0 for stride in x.stride()[:3])
    # The kernels compute the offset of a head in 32 bits.
    near = x.shape[2] * x.stride(2) <= _INT32
    return x if even and near else x.clone(memory_format=torch.contiguous_format)


def _heads_first(x: Tensor, mode: Mode, group: int = 1) -> Tensor:
    """`(B, T, K group, D)` -> `(B, K, T, D)`, summed over each group in at least fp32."""
    if group > 1:
        x = x.unflatten(2, (-1, group)).sum(3, dtype=torch.promote_types(x.dtype, torch.float32))
    return (x.flip(1) if mode.turned else x).transpose(1, 2)


def _lse_of_rows(lse: Tensor, shapes: tuple[Shape, ...], mode: Mode) -> Tensor:
    """Padded lse `(B, H, rows)`, or `(sequences, H, rows of the longest)` -> `(B, H, T)`."""
    if len(shapes) > 1:
        return lse.transpose(0, 1).flatten(1)[None, :, _places(shapes, lse.device)]
    lse = lse[:, :, : shapes[0].num_q]
    return lse.flip(2) if mode.turned else lse


def _padded_lse(lse: Tensor, shapes: tuple[Shape, ...], mode: Mode) -> Tensor:
    """Invert `_lse_of_rows`. The result is contiguous; padding is inf, so that the weights of padded rows become 0."""
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
    """Return the indices of all rows in the concatenation of sequences padded to the longest."""
    longest = _longest(shapes)
    places = torch.cat([n * longest + torch.arange(shape.num_q) for n, shape in enumerate(shapes)])
    return upload(places, device)
