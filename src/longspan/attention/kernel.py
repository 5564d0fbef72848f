"""The protocol behind which every attention kernel stands, and the choice between them.

A kernel computes one tile: `num_q` queries against `num_k` keys, whose visible pairs are a band (`Shape`). A tile is trimmed:
every row sees a key. What a kernel has no mode for it splits into tiles that it has; rows of those merge like any others.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from longspan.attention.reference import ReferenceKernel
from longspan.attention.sdpa import SdpaKernel
from longspan.plan import Shape, Tile
from longspan.spec import SpecError

Tensor = torch.Tensor


class Kernel(Protocol):
    """Attention of one tile. B batch, H query heads, K KV heads (H a multiple of K), D head dim; V may have a dim of its own.

    The executor gives tensors whose last dim is contiguous; other strides are arbitrary.
    """

    @property
    def name(self) -> str: ...

    def refusal(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        """Why tensors of these types, dims and devices cannot be computed, or None."""
        ...

    def split(self, tile: Tile, device: torch.device, backward: bool = False) -> Sequence[Tile]:
        """The tile as tiles for which this kernel has a mode: disjoint, and together the same pairs."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, shape: Shape, scale: float) -> tuple[Tensor, Tensor]:
        """`(B, H, num_q, D), (B, K, num_k, D), (B, K, num_k, Dv)` -> out `(B, H, num_q, Dv)`, lse `(B, H, num_q)`.

        lse is the natural logarithm of the sum of exponentials, in fp32 (fp64 for fp64).
        """
        ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, shape: Shape, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of this tile alone, given the final `out` and `lse` of its rows over all keys of the sequence; in the
        inputs' type or a wider one."""
        ...


KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in (SdpaKernel(), ReferenceKernel())}


def check_kernel_name(name: str) -> str:
    """`name` if it is "auto" or a kernel's, else an error."""
    if name != "auto" and name not in KERNELS:
        raise SpecError(f"kernel {name!r} is not known", hint=f"choose one of auto, {', '.join(KERNELS)}")
    return name


def choose_kernel(name: str, q: Tensor, k: Tensor, v: Tensor) -> Kernel:
    """The kernel of that name, or for "auto" the first that can compute these tensors."""
    if name == "auto":
        for kernel in KERNELS.values():
            if kernel.refusal(q, k, v) is None:
                return kernel
        name = "reference"
    kernel = KERNELS[check_kernel_name(name)]
    if (reason := kernel.refusal(q, k, v)) is not None:
        raise SpecError(f"kernel {kernel.name!r} cannot compute this: {reason}", hint='use kernel="auto"')
    return kernel
