"""The kernels by name, and the choice between them."""

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
