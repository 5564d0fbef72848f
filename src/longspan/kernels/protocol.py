"""The protocol of attention kernels, and the calls that compute tiles.

A kernel computes one tile: `num_q` queries against `num_k` keys, whose visible pairs are a band (`Shape`). A tile is
trimmed: every row sees a key. A kernel that has no mode for a tile splits the tile into tiles that have one, and their
results are merged. Successive tiles, such as those of packed documents, go to a kernel in one call if `joins` allows.
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
    """Inputs of a tile's backward. `out` and `lse` of the tile's rows are over all keys of the sequence. Shapes are as in
    `Kernel.forward`; `dout` has the shape of `out`."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor

    def of_heads(self, query: slice, kv: slice) -> "BackwardInputs":
        """Return the inputs of some query heads and of the KV heads that they read."""
        dout, q, k, v, out, lse = self
        return BackwardInputs(dout[:, query], q[:, query], k[:, kv], v[:, kv], out[:, query], lse[:, query])


class Kernel(Protocol):
    """Attention of one tile. B batch, H query heads, K KV heads (H a multiple of K), D head dim of q and k, Dv of v.

    The last dim of the inputs is contiguous; other strides are arbitrary.
    """

    @property
    def name(self) -> str: ...

    def refusal(self, q: Tensor, k: Tensor, v: Tensor, change: ScoreChange | None = None) -> str | None:
        """Return why these dtypes, dims, devices or score changes are not supported, or None."""
        ...

    def split(self, tile: Tile, device: torch.device, dtype: torch.dtype, backward: bool = False) -> Sequence[Tile]:
        """Split the tile into disjoint tiles that cover the same pairs. This kernel has a mode for each of them."""
        ...

    def joins(self, first: Shape, second: Shape, device: torch.device) -> bool:
        """Whether a tile of shape `second` may join a call whose first tile has shape `first`, for a batch of 1."""
        ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, shapes: Sequence[Shape], scale: float, change: ScoreChange | None = None
    ) -> tuple[Tensor, Tensor]:
        """`(B, H, num_q, D), (B, K, num_k, D), (B, K, num_k, Dv)` -> out `(B, H, num_q, Dv)`, lse `(B, H, num_q)`.

        The inputs hold one tile, or several tiles that `joins` allows, concatenated along rows and along keys. Rows see
        only keys of their own tile. lse is the natural logarithm of the sum of exponentials, in fp32 (fp64 for fp64).
        """
        ...

    def backward(
        self, saved: BackwardInputs, shapes: Sequence[Shape], scale: float, change: ScoreChange | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk, dv of these tiles alone, in the inputs' dtype or a wider one."""
        ...


class Launch(NamedTuple):
    """One kernel call, for tiles with successive rows and successive keys."""

    q0: int
    q1: int
    k0: int
    k1: int
    shapes: tuple[Shape, ...]
    pairs: int


def launches(kernel: Kernel, tiles: Sequence[Tile], q: Tensor, backward: bool = False) -> list[Launch]:
    """Return the calls that compute `tiles` for queries like `q`, in order."""
    pieces = [piece for tile in tiles for piece in kernel.split(tile, q.device, q.dtype, backward)]
    runs = list(_runs(kernel, pieces, q)) if q.shape[0] == 1 else [[piece] for piece in pieces]
    areas = algebra.area(np.array(pieces, dtype=np.int64).reshape(-1, 6))
    pairs = np.add.reduceat(areas, np.cumsum([0, *map(len, runs[:-1])])).tolist() if runs else []
    return [
        Launch(run[0].q0, run[-1].q1, run[0].k0, run[-1].k1, tuple(tile.shape for tile in run), total)
        for run, total in zip(runs, pairs, strict=True)
    ]


def _runs(kernel: Kernel, pieces: Sequence[Tile], q: Tensor) -> Iterator[list[Tile]]:
    """Yield lists of successive pieces; each list goes into one call."""
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
