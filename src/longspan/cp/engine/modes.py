"""PyTorch modes around an attention call. Autocast applies as in `scaled_dot_product_attention`; transforms are refused.

autocast bf16       q, k, v in fp32 or less -> bf16; nothing inside the call is cast
torch.func          vmap, jvp, grad, and forward-mode AD: `SpecError`, since our operators would silently ignore these
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.forward_ad import unpack_dual

from longspan.errors import SpecError

Tensor = torch.Tensor


def autocast_like_sdpa(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast the tensors to autocast's dtype if autocast is enabled for their device. fp64 stays fp64."""
    kind = tensors[0].device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Disable autocast, so that products in forward and backward keep the dtypes of their tensors."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def refuse_transforms(*tensors: Tensor | None) -> None:
    """Raise `SpecError` for tensors inside `torch.func` transforms and for tensors with a tangent of forward-mode AD."""
    if torch.compiler.is_compiling():
        return
    for x in tensors:
        if x is None:
            continue
        if is_functorch_wrapped_tensor(x):
            raise SpecError(
                "longspan attention was called inside a torch.func transform (vmap, grad, jvp, ...)",
                hint="use torch.autograd.grad or .backward(); in place of vmap use the batch dim",
            )
        if unpack_dual(x).tangent is not None:
            raise SpecError(
                "an input has a forward-mode tangent; longspan attention has no forward-mode derivative",
                hint="use reverse mode: torch.autograd.grad or .backward()",
            )
