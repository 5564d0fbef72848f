"""The kernels by name, and the choice among them."""

import torch

from longspan import names
from longspan.errors import SpecError
from longspan.kernels.capability import BLACKWELL, HOPPER, capability
from longspan.kernels.cudnn import CudnnKernel
from longspan.kernels.efficient import EfficientKernel
from longspan.kernels.flash2 import FlashAttention2Kernel
from longspan.kernels.flash3 import FlashAttention3Kernel
from longspan.kernels.flex import FlexKernel
from longspan.kernels.protocol import Kernel
from longspan.kernels.reference import ReferenceKernel
from longspan.kernels.scores import ScoreChange
from longspan.kernels.sdpa import SdpaKernel
from longspan.names import AUTO, check_name

Tensor = torch.Tensor

_MADE: tuple[Kernel, ...] = (
    FlashAttention3Kernel(), CudnnKernel(), SdpaKernel(), FlashAttention2Kernel(), EfficientKernel(), FlexKernel(),
    ReferenceKernel(),
)  # fmt: skip
KERNELS: dict[str, Kernel] = {name: {kernel.name: kernel for kernel in _MADE}[name] for name in names.KERNELS}
"""Kernels in the order in which "auto" tries them, fastest first."""

_CUDNN = 91501
"""cuDNN 9.15.1: the oldest version for which torch itself prefers cuDNN attention on H100 and B200."""


def check_kernel_name(name: str) -> str:
    """Return `name` if it is "auto" or the name of a kernel. Raises `SpecError` otherwise."""
    return check_name("kernel", name, (AUTO, *KERNELS))


def choose_kernel(
    name: str, q: Tensor, k: Tensor, v: Tensor, change: ScoreChange | None = None, regular: bool = False
) -> Kernel:
    """Return the named kernel, or for "auto" the first that can compute these tensors. Raises `SpecError` if the named
    kernel cannot. `regular`: whether the tiles suit cuDNN (`masked.are_regular`)."""
    if name == AUTO:
        name, _ = choose_auto(q, k, v, change, regular)
    kernel = KERNELS[check_kernel_name(name)]
    if (reason := kernel.refusal(q, k, v, change)) is not None:
        raise SpecError(f"kernel {kernel.name!r} cannot compute this call: {reason}", hint='set kernel="auto"')
    return kernel


def choose_auto(
    q: Tensor, k: Tensor, v: Tensor, change: ScoreChange | None = None, regular: bool = False
) -> tuple[str, dict[str, str]]:
    """Return (kernel that "auto" takes, reason against each kernel tried before). Falls back to "reference"."""
    passed_over: dict[str, str] = {}
    for name, kernel in KERNELS.items():
        reason = kernel.refusal(q, k, v, change) or _reason_to_pass(name, q.device, change, regular)
        if reason is None:
            return name, passed_over
        passed_over[name] = reason
    return "reference", passed_over


def _reason_to_pass(name: str, device: torch.device, change: ScoreChange | None, regular: bool) -> str | None:
    """Return why "auto" skips a kernel that could compute the call, or None."""
    if name == "flex" and change is None:
        return "FlexAttention compiles dozens of graphs, which pays only for soft-caps and ALiBi"
    if name != "cudnn":
        return None
    if capability(device)[0] not in (HOPPER, BLACKWELL):
        return "cuDNN attention is faster than flash attention only on Hopper and Blackwell"
    if (torch.backends.cudnn.version() or 0) < _CUDNN:
        return f"cuDNN {torch.backends.cudnn.version()} is older than {_CUDNN}"
    return None if regular else "cuDNN attention suits plans of full and causal tiles whose sides are multiples of 128"
