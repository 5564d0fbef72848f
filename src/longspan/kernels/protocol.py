"""The protocol behind which every attention kernel stands, and the calls that compute tiles.

A kernel computes one tile: `num_q` queries against `num_k` keys, whose visible pairs are a band (`Shape`). A tile is trimmed:
every row sees a key. A kernel without a mode for a tile splits it into tiles for which it has one; rows of those merge like any
others. Tiles that follow each other, as those of packed documents do, go to a kernel in one call where it can take them together.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from longspan.kernels.scores import ScoreChange
from longspan.plan import Shape, Tile
from longspan.plan import bands as algebra

Tensor = torch.Tensor


class BackwardInputs(NamedTuple):
    """What a tile's backward starts from: the gradient of `out`, the tile's rows and keys, and `out` and `lse` of its rows over
    all keys of the sequence. Shapes as in `Kernel.forward`; dout is shaped like out."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor

    def of_heads(self, query: slice, kv: slice) -> "BackwardInputs":
        """The inputs of some query heads, and of the KV heads that these read."""
        dout, q, k, v, out, lse = self
        return BackwardInputs(dout[:, query], q[:, query], k[:, kv], v[:, kv], out[:, query], lse[:, query])


class Kernel(Protocol):
    """Attention of one tile. B batch, H query heads, K KV heads (H a multiple of K), D head dim; V may have a dim of its own.

    The executor gives tensors whose last dim is contiguous; other strides are arbitrary.
    """

    @property
    def name(self) -> str: ...

    def refusal(self, q: Tensor, k: Tensor, v: Tensor, change: ScoreChange | None = None) -> str | None:
        """Why tensors of these types, dims and devices, or scores changed like this, cannot be computed, or None."""
        ...

    def split(self, tile: Tile, device: torch.device, dtype: torch.dtype, backward: bool = False) -> Sequence[Tile]:
        """The tile as tiles for which this kernel has a mode: disjoint, and together the same pairs."""
        ...

    def joins(self, first: Shape, second: Shape, device: torch.device) -> bool:
        """Whether a tile of the second shape goes into a call whose first is of the first shape, for a batch of 1."""
        ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, shapes: Sequence[Shape], scale: float, change: ScoreChange | None = None
    ) -> tuple[Tensor, Tensor]:
        """`(B, H, num_q, D), (B, K, num_k, D), (B, K, num_k, Dv)` -> out `(B, H, num_q, Dv)`, lse `(B, H, num_q)`.

        Of one tile, or of several that `joins` allows: their rows one after the other, their keys too, and none sees another's.

        lse is the natural logarithm of the sum of exponentials, in fp32 (fp64 for fp64).
        """
        ...

    def backward(
        self, saved: BackwardInputs, shapes: Sequence[Shape], scale: float, change: ScoreChange | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of these tiles alone, in the inputs' type or a wider one."""
        ...


class Launch(NamedTuple):
    """One call of a kernel: tiles whose rows follow each other, and whose keys do."""

    q0: int
    q1: int
    k0: int
    k1: int
    shapes: tuple[Shape, ...]
    pairs: int


def launches(kernel: Kernel, tiles: Sequence[Tile], q: Tensor, backward: bool = False) -> list[Launch]:
    """The calls that compute `tiles` for queries like `q`, in order."""
    pieces = [piece for tile in tiles for piece in kernel.split(tile, q.device, q.dtype, backward)]
    runs = list(_runs(kernel, pieces, q)) if q.shape[0] == 1 else [[piece] for piece in pieces]
    areas = algebra.area(np.array(pieces, dtype=np.int64).reshape(-1, 6))
    pairs = np.add.reduceat(areas, np.cumsum([0, *map(len, runs[:-1])])).tolist() if runs else []
    return [
        Launch(run[0].q0, run[-1].q1, run[0].k0, run[-1].k1, tuple(tile.shape for tile in run), total)
        for run, total in zip(runs, pairs, strict=True)
    ]


def _runs(kernel: Kernel, pieces: Sequence[Tile], q: Tensor) -> Iterator[list[Tile]]:
    """Pieces as runs of those that go together."""
    run: list[Tile] = []
    for piece in pieces:
        if run and not (
            (run[-1].q1, run[-1].k1) == (piece.q0, piece.k0) and kernel.joins(run[0].shape, piece.shape, q.device)
        ):
            yield run
            run = []
        run.append(piece)
    if run:
        yield run
