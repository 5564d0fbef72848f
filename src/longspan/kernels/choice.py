"""The protocol behind which every attention kernel stands, and the choice between them.

A kernel computes one tile: `num_q` queries against `num_k` keys, whose visible pairs are a band (`Shape`). A tile is trimmed:
every row sees a key. What a kernel has no mode for it splits into tiles that it has; rows of those merge like any others.
Tiles that follow each other, as those of packed documents do, go to it in one call where it can take them together.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from longspan import names
from longspan.errors import SpecError
from longspan.kernels.capability import BLACKWELL, HOPPER, capability
from longspan.kernels.cudnn import CudnnKernel
from longspan.kernels.efficient import EfficientKernel
from longspan.kernels.flash2 import FlashAttention2Kernel
from longspan.kernels.flash3 import FlashAttention3Kernel
from longspan.kernels.flex import FlexKernel
from longspan.kernels.reference import ReferenceKernel
from longspan.kernels.scores import ScoreChange
from longspan.kernels.sdpa import SdpaKernel
from longspan.names import AUTO, check_name
from longspan.plan import Shape, Tile
from longspan.plan import bands as algebra

Tensor = torch.Tensor


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
        """dq, dk, dv of these tiles alone, given the final `out` and `lse` of its rows over all keys of the sequence; in the
        inputs' type or a wider one."""
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


_MADE: tuple[Kernel, ...] = (
    FlashAttention3Kernel(), CudnnKernel(), SdpaKernel(), FlashAttention2Kernel(), EfficientKernel(), FlexKernel(),
    ReferenceKernel(),
)  # fmt: skip
KERNELS: dict[str, Kernel] = dict(zip(names.KERNELS, _MADE, strict=True))
"""In the order in which "auto" tries them: the fastest first."""

_CUDNN = 91501
"""cuDNN 9.15.1, from which on torch prefers cuDNN attention on Hopper and Blackwell (some of it: H100, B200)."""


def check_kernel_name(name: str) -> str:
    """`name` if it is "auto" or a kernel's, else an error."""
    return check_name("kernel", name, (AUTO, *KERNELS))


def choose_kernel(
    name: str, q: Tensor, k: Tensor, v: Tensor, change: ScoreChange | None = None, regular: bool = False
) -> Kernel:
    """The kernel of that name, or for "auto" the first that can compute these tensors. `regular`: the tiles are those for which
    cuDNN is fast (`masked.are_regular`)."""
    if name == AUTO:
        name, _ = choose_auto(q, k, v, change, regular)
    kernel = KERNELS[check_kernel_name(name)]
    if (reason := kernel.refusal(q, k, v, change)) is not None:
        raise SpecError(f"kernel {kernel.name!r} cannot compute this: {reason}", hint='use kernel="auto"')
    return kernel


def choose_auto(
    q: Tensor, k: Tensor, v: Tensor, change: ScoreChange | None = None, regular: bool = False
) -> tuple[str, dict[str, str]]:
    """The kernel that "auto" takes, "reference" if none can; and why not each one that it would rather take."""
    passed_over: dict[str, str] = {}
    for name, kernel in KERNELS.items():
        reason = kernel.refusal(q, k, v, change) or _reason_to_pass(name, q.device, change, regular)
        if reason is None:
            return name, passed_over
        passed_over[name] = reason
    return "reference", passed_over


def _reason_to_pass(name: str, device: torch.device, change: ScoreChange | None, regular: bool) -> str | None:
    """Why "auto" leaves out a kernel that could compute a call, or None."""
    if name == "flex" and change is None:
        return "FlexAttention compiles dozens of graphs: it is for soft-caps and ALiBi"
    if name != "cudnn":
        return None
    if capability(device)[0] not in (HOPPER, BLACKWELL):
        return "cuDNN attention is faster than flash attention on Hopper and Blackwell alone"
    if (torch.backends.cudnn.version() or 0) < _CUDNN:
        return f"cuDNN {torch.backends.cudnn.version()} is older than {_CUDNN}"
    return None if regular else "cuDNN attention is for plans of full and causal tiles whose sides 128 divides"
