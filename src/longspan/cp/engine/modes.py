"""What a call takes over from torch's modes: autocast, as `scaled_dot_product_attention` does; and what it refuses.

autocast bf16       q, k, v in fp32 or less -> bf16; inside, nothing is cast any more
vmap, jvp, grad     of torch.func, and forward-mode tangents: a `SpecError`, since operators would drop them in silence
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.forward_ad import unpack_dual

from longspan.errors import SpecError

Tensor = torch.Tensor


def autocast_like_sdpa(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in autocast's type, where that is on for their device; fp64 stays what it is."""
    kind = tensors[0].device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Types are what the tensors say: products inside are not cast down, in forward or in backward."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def refuse_transforms(*tensors: Tensor | None) -> None:
    """Raise for tensors within `torch.func` transforms and for those that carry forward-mode tangents."""
    if torch.compiler.is_compiling():
        return
    for x in tensors:
        if x is None:
            continue
        if is_functorch_wrapped_tensor(x):
            raise SpecError(
                "attention over ranks was called inside a torch.func transform (vmap, grad, jvp, ...)",
                hint="use torch.autograd.grad or .backward(); put what vmap runs over into the batch dim",
            )
        if unpack_dual(x).tangent is not None:
            raise SpecError(
                "a tensor with a forward-mode tangent was given: attention over ranks has no forward-mode derivative",
                hint="use reverse mode: torch.autograd.grad or .backward()",
            )
