"""Tensors that say that they are on a GPU, and what happens when an operator of torch meets one.

A `CudaTensor` is a tensor in the memory of this machine, storage and all, whose `device` is cuda:0. Below autograd every operator
comes by `run`: it is computed by the CPU's kernel, or for those that CUDA alone has by plain math (`operators.py`), and entered.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cuda.ledger import Copy, Launch, site
from tests.cuda.memory import Place, Use, allocate, memory_of
from tests.cuda.operators import ON_CUDA
from tests.cuda.streams import DEVICE, Stream, here

Tensor = torch.Tensor
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_thread = threading.local()


class CudaTensor(torch.Tensor):
    """A tensor whose elements are in the memory of this machine and whose device is cuda:0."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: DEVICE)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} of a CudaTensor outside stand_in()")

    def get_device(self) -> int:
        return 0

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        if args and isinstance(args[0], Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        copy = kwargs.pop("copy", False)
        device, dtype, non_blocking, form = torch._C._nn._parse_to(*args, **kwargs)
        if device is None or device.type == "cuda":
            keywords = {} if form is None else {"memory_format": form}
            return torch._C.TensorBase.to(self, self.dtype if dtype is None else dtype, copy=copy, **keywords)
        with _leaving():
            return torch.ops.aten._to_copy(
                self, dtype=dtype, device=device, non_blocking=non_blocking, memory_format=form
            )

    def cpu(self) -> Tensor:
        return self.to("cpu")

    def cuda(self, device: Any = None, non_blocking: bool = False) -> Tensor:
        return self

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.detach().cpu().numpy()
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy it to host memory first."
        )

    __array__ = numpy

    def new_tensor(self, data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> Tensor:
        return torch.tensor(data, dtype=dtype or self.dtype, device=device or DEVICE, requires_grad=requires_grad)

    def record_stream(self, stream: Stream) -> None:
        memory_of(self).recorded.add(stream)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"CudaTensor({tuple(self.shape)}, {self.dtype})"


class Mode(TorchDispatchMode):
    """Sees every operator of this thread, also those that make tensors of the device out of none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **(kwargs or {}))  # only shapes are worked out, as DTensor does
        if any(t is not Tensor and not issubclass(t, CudaTensor | Parameter) for t in types):
            return NotImplemented  # a DTensor comes back as operators on what is local
        kwargs = kwargs or {}
        if func.namespace in HANDLERS and name_of(func) != "_wrap_tensor_autograd":
            return HANDLERS[func.namespace](func, args, kwargs)
        if func.namespace not in ("aten", "prims", "prim"):
            with self:  # an operator of Python is made of others
                return func.redispatch(_CPU, *args, **kwargs)
        if _is_composite(func):
            with self:  # it comes whole where autograd has been left, as inside an operator of ours
                return func.decompose(*args, **kwargs)
        return run(func, args, kwargs)


HANDLERS: dict[str, Callable[..., Any]] = {}
"""Namespaces whose operators are not of aten's kind, and what runs them."""

_ALLOCATE = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "empty_permuted",
    "resize_",
    "set_",
}
"""Operators that write nothing."""

_WAIT = {
    "_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique", "_unique2", "unique_dim",
    "unique_consecutive", "bincount",
}  # fmt: skip
"""Operators whose result the host has to see: a number, or a tensor whose size depends on elements."""

_INDEX = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one operator of aten and enter it."""
    name, values = name_of(func), bound(func, args, kwargs)
    target = kwargs.get("device")
    given = tensors((args, kwargs))
    on_device = [x for x in given if isinstance(x, CudaTensor)]
    if (
        on_device
        and target is not None
        and torch.device(target).type == "cpu"
        and not getattr(_thread, "leaving", False)
    ):
        target = None  # see `_leaving`
    makes = target is not None and torch.device(target).type == "cuda"
    if not on_device and not makes:
        return func(*args, **kwargs)
    if name == "copy_" and len(on_device) == 1:
        return _copy(func, args, kwargs, values["src"], values["self"])
    if name == "_to_copy" and target is not None:
        return _copy(func, args, kwargs, values["self"], None)
    if on_device:
        _check_devices(name, given, values)
    if target is not None and not makes:
        return _compute(func, args, kwargs)
    out = on_host(func, args, kwargs | {"device": "cpu"} if makes else kwargs)
    made = [x for x in tensors(out) if isinstance(x, CudaTensor) and allocate(x)]
    if name in _ALLOCATE:
        _spoil(made)
        return out
    written = [x for n in _written(func) for x in tensors(values.get(n)) if isinstance(x, CudaTensor)]
    waits = name in _WAIT or _waits_for_indices(name, values)
    if any(x.numel() for x in (*written, *made)):
        enter(name, on_device, [*written, *made])
    elif waits:
        enter(name, on_device, [], kernel=False)
    if name == "_local_scalar_dense":
        _enter_copy("to host", on_device[0].element_size(), pinned=False)
    if waits:
        here().wait_for(here().stream.clock, name)
    return out


def on_host(function: Any, args: Any, kwargs: Any) -> Any:
    """What an operator makes of tensors of the device, with the CPU's kernels: tensors of the device, not yet allocated."""
    return _wrap(_compute(function, args, kwargs))


def compute(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """What `function` makes of tensors of this machine, as one launch."""
    with torch._C._DisableTorchDispatch():
        bare = [x.as_subclass(Tensor) if isinstance(x, CudaTensor) else x for x in args]
        out = _wrap(function(*bare))
    enter(name, [x for x in args if isinstance(x, CudaTensor)], [x for x in tensors(out) if allocate(x)])
    return out


def enter(
    name: str, read: list[Tensor], written: list[Tensor], stream: Stream | None = None, *, kernel: bool = True
) -> None:
    """Enter a launch on `stream`, or the current one; if it is no `kernel` only what it touches."""
    device, place = here(), site()
    stream = device.stream if stream is None else stream
    for ledger in device.ledgers if kernel else ():
        ledger.launches.append(Launch(name, stream.name, place))
    number = stream.launch()
    own = {id(x) for x in written}
    for x in (*(x for x in read if id(x) not in own), *written):
        if x.numel():
            memory_of(x).touch(Use(stream, number, name, Place.of(x), place), write=id(x) in own)


def tensors(values: Any) -> list[Tensor]:
    """The tensors among arguments or results."""
    if isinstance(values, Tensor):
        return [values]
    parts = values.values() if isinstance(values, dict) else values if isinstance(values, list | tuple) else ()
    return [x for part in parts for x in tensors(part)]


def name_of(func: Any) -> str:
    """The name of an operator without namespace and overload."""
    name: str = func._schema.name.partition("::")[2]
    return name


def bound(func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name."""
    return {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)} | kwargs


@cache
def _written(func: Any) -> tuple[str, ...]:
    """Names of the arguments that an operator writes."""
    return tuple(a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write)


@cache
def _is_composite(func: Any) -> bool:
    own = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CPU")
    return func.namespace == "aten" and func._can_decompose() and not own


def _compute(function: Any, args: Any, kwargs: Any) -> Any:
    with torch._C._DisableTorchDispatch():
        return ON_CUDA.get(function, function)(*args, **kwargs)


def _wrap(x: Any) -> Any:
    """Results of the CPU's kernels as tensors of the device."""
    if isinstance(x, list | tuple):
        return type(x)(map(_wrap, x))
    return torch.Tensor._make_subclass(CudaTensor, x) if type(x) is Tensor and x.device.type == "cpu" else x


def _spoil(made: list[Tensor]) -> None:
    """What nobody has written holds NaN, so that reading it shows."""
    with torch._C._DisableTorchDispatch():
        for x in made:
            if x.is_floating_point():
                x.fill_(float("nan"))


@contextmanager
def _leaving() -> Iterator[None]:
    """Inside, a copy to the CPU is meant. Torch's C++ takes a `CudaTensor` for one of the CPU, and names that device to operators
    that only change a type or make a tensor like it."""
    _thread.leaving = True
    try:
        yield
    finally:
        _thread.leaving = False


def _copy(func: Any, args: Any, kwargs: dict[str, Any], source: Tensor, into: Tensor | None) -> Any:
    """A copy between host and device. The host waits for it unless it is `non_blocking`: so does aten's cuda/Copy.cu, which
    leaves pageable memory to the driver, that may wait all the same."""
    to_device = not isinstance(source, CudaTensor)
    out = _compute(func, args, kwargs | {"device": "cpu"} if "device" in kwargs else kwargs)
    if to_device:
        out = _wrap(out)
        allocate(out)
    host = source if to_device else into
    pinned = host is not None and getattr(host.untyped_storage(), "_pinned", False)
    enter(name_of(func), [] if to_device else [source], [out] if to_device else [], kernel=False)
    direction = "to device" if to_device else "to host"
    _enter_copy(direction, out.numel() * out.element_size(), pinned)
    if not (args[2] if name_of(func) == "copy_" and len(args) > 2 else kwargs.get("non_blocking")):
        here().wait_for(here().stream.clock, f"copy {direction}")
    return out


def _enter_copy(direction: str, nbytes: int, pinned: bool) -> None:
    for ledger in here().ledgers:
        ledger.copies.append(Copy(direction, nbytes, pinned, site()))


def _check_devices(name: str, given: list[Tensor], values: dict[str, Any]) -> None:
    """Beside tensors of the device an operator takes numbers of the host and, to index with, its tensors."""
    if name in _INDEX:
        given = tensors([values["self"], values.get("values")])
    for x in given:
        if not isinstance(x, CudaTensor) and x.dim():
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and {x.device}! "
                f"({name}, {tuple(x.shape)} {x.dtype})"
            )


def _waits_for_indices(name: str, values: dict[str, Any]) -> bool:
    """Whether indices are a mask, which has to be counted, or on the host, from where they are copied."""
    if name == "repeat_interleave":
        return values.get("output_size") is None
    if name not in _INDEX:
        return False
    indices = tensors(values["indices"])
    masks = [x for x in indices if x.dtype in (torch.bool, torch.uint8)]
    # A single number is put where a mask says without counting.
    filled = "values" in values and values["values"].numel() == 1 and len(indices) == 1
    return (bool(masks) and not filled) or any(not isinstance(x, CudaTensor) for x in indices)
