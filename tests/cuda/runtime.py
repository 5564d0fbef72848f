"""`torch.cuda` as one GPU of this thread has it."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from tests.cuda.streams import DEVICE, Event, Stream, here
from tests.cuda.tensor import CudaTensor, compute

Tensor = torch.Tensor
_NAME = "NVIDIA H100 80GB HBM3"
_MEMORY = 80 * 2**30


def _rms_norm(x: Tensor, normalized_shape: Any, weight: Any = None, eps: Any = None) -> Tensor:
    """One kernel on CUDA: torch chooses it by the device, which is the CPU as far as its C++ sees."""
    if isinstance(x, CudaTensor):
        return _RmsNorm.apply(x, list(normalized_shape), weight, eps)
    return torch.rms_norm(x, normalized_shape, weight, eps)


class _RmsNorm(torch.autograd.Function):
    """`aten::_fused_rms_norm` and its backward, which a CPU takes apart."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.options = shape, eps
        return compute("_fused_rms_norm", torch.rms_norm, x, shape, weight, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx, dweight = compute("_fused_rms_norm_backward", _rms_norm_backward, grad, x, weight, *ctx.options)
        return dx, None, dweight, None


def _rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor | None, shape: list[int], eps: Any) -> tuple[Any, Any]:
    given = [None if t is None else t.detach().requires_grad_() for t in (x, weight)]
    with torch.enable_grad():
        out = torch.rms_norm(given[0], shape, given[1], eps)
    grads = iter(torch.autograd.grad(out, [t for t in given if t is not None], grad))
    return next(grads), None if weight is None else next(grads)


def _pin_memory(x: Tensor, device: Any = None) -> Tensor:
    pinned = x.clone()
    pinned.untyped_storage()._pinned = True
    return pinned


def _to(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`Tensor.to` of a tensor on the host: torch's own asks a CUDA runtime which GPU "cuda" is."""
    name = kwargs.get("device", args[0] if args else None)
    if isinstance(name, str | torch.device) and torch.device(name).type == "cuda":
        args, kwargs = (args[1:], kwargs) if args and args[0] is name else (args, kwargs | {"device": None})
        kwargs.pop("device", None)
        args = (DEVICE, *args)
    elif isinstance(name, Tensor):
        args = (name.device, name.dtype, *args[1:])
    return torch._C.TensorBase.to(x, *args, **kwargs)


def _made_on_host(make: Any) -> Any:
    """`torch.tensor` and its like, whose C++ wants a CUDA of its own: made on the host and copied, as on a GPU."""

    def made(data: Any, *, device: Any = None, requires_grad: bool = False, **keywords: Any) -> Tensor:
        if device is None or torch.device(device).type != "cuda":
            extra = {"requires_grad": True} if requires_grad else {}
            return make(data, device=device, **extra, **keywords)
        return make(data, **keywords).to(device).requires_grad_(requires_grad)

    return made


def patches() -> list[tuple[Any, str, Any]]:
    """What to put in the place of what of torch."""
    from torch.distributed.tensor import DTensor
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    seed = torch.zeros(16, dtype=torch.uint8)
    properties = SimpleNamespace(
        name=_NAME, major=9, minor=0, total_memory=_MEMORY, multi_processor_count=132, warp_size=32
    )
    of_cuda = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": lambda device: nullcontext(),
        "Stream": Stream,
        "Event": Event,
        "stream": lambda stream: here().on(stream),
        "current_stream": lambda device=None: here().stream,
        "default_stream": lambda device=None: here().main,
        "set_stream": lambda stream: setattr(here(), "stream", stream),
        "synchronize": lambda device=None: here().synchronize(),
        "get_device_name": lambda device=None: _NAME,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: properties,
        "is_bf16_supported": lambda including_emulation=True: True,
        "memory_allocated": lambda device=None: here().allocated,
        "memory_reserved": lambda device=None: here().allocated,
        "max_memory_allocated": lambda device=None: here().peak,
        "max_memory_reserved": lambda device=None: here().peak,
        "reset_peak_memory_stats": lambda device=None: setattr(here(), "peak", here().allocated),
        "mem_get_info": lambda device=None: (_MEMORY - here().allocated, _MEMORY),
        "empty_cache": lambda: None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device="cuda": seed,
        "set_rng_state": lambda new_state, device="cuda": None,
    }
    return [
        *((torch.cuda, name, value) for name, value in of_cuda.items()),
        *((torch, name, _made_on_host(getattr(torch, name))) for name in ("tensor", "as_tensor")),
        (Tensor, "to", _to),
        (Tensor, "cuda", lambda x, device=None, non_blocking=False: _to(x, "cuda", non_blocking=non_blocking)),
        (Tensor, "pin_memory", _pin_memory),
        (Tensor, "is_pinned", lambda x, device=None: getattr(x.untyped_storage(), "_pinned", False)),
        (F, "rms_norm", _rms_norm),
        # A parameter is moved by a new one: C++ would find no difference between the old and the new.
        (torch.__future__, "get_overwrite_module_params_on_conversion", lambda: True),
        (DTensor, "device", property(lambda x: x._local_tensor.device)),
        (DTensor, "is_cuda", property(lambda x: x._local_tensor.is_cuda)),
        *(
            (module, "_foreach_supported_types", [*module._foreach_supported_types, CudaTensor])
            for module in (optimizer, _foreach_utils)
        ),
    ]
