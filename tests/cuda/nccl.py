"""NCCL's rules over gloo: what may travel, on which stream it does, and what `wait` waits for.

A group made inside the stand-in has for its "cuda" part a gloo backend that is called NCCL. A call is posted on the group's own
stream after what the current stream has launched; `Work.wait` makes the current stream wait for it, not the host. The order in
which calls of a group have to be posted is not looked at: gloo moves each pair of ranks by itself.
"""

from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.cuda.nccl
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tests.cuda.ledger import Launch, site
from tests.cuda.memory import allocate, memory_of
from tests.cuda.streams import DEVICE, Clock, here, join
from tests.cuda.tensor import HANDLERS, CudaTensor, bound, enter, name_of, on_host, tensors

Tensor = torch.Tensor

# The map of ncclDataType in torch/csrc/distributed/c10d/NCCLUtils.hpp.
DTYPES = {
    torch.int8, torch.uint8, torch.float32, torch.float64, torch.int32, torch.int64, torch.float16, torch.bool,
    torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
}  # fmt: skip

_WRITTEN: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("send", "barrier"), ()),
    **dict.fromkeys(("recv_", "allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_"), ("tensors",)),
    **dict.fromkeys(("allgather_", "reduce_scatter_", "alltoall_", "gather_", "scatter_"), ("output_tensors",)),
    **dict.fromkeys(("_allgather_base_", "_reduce_scatter_base_"), ("output_tensor",)),
    **dict.fromkeys(("allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_"), ("outputs",)),
    "alltoall_base_": ("output",),
}
"""Operators of c10d, and the arguments that they write."""


class NcclError(RuntimeError):
    """What NCCL, or the process group over it, refuses."""


class _Flight(NamedTuple):
    """A call that nobody has waited for: when it is done, and its tensors, which ProcessGroupNCCL holds until then."""

    work: dist.Work
    clock: Clock
    kept: list[Tensor]


_flights: dict[int, _Flight] = {}
_backends: dict[str, dist.ProcessGroupGloo] = {}
"""Group -> the backend that is called NCCL."""
_without_cpu: set[str] = set()
_batches: dict[str, list[dist.Work]] = {}
"""Group -> messages of the batch that is being put together."""


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a collective, or one side of a message."""
    name, values, given = name_of(func), bound(func, args, kwargs), tensors((args, kwargs))
    group = dist.ProcessGroup.unbox(values["process_group"])
    if not any(isinstance(x, CudaTensor) for x in given) and group.group_name not in _without_cpu:
        return func(*args, **kwargs)
    if name not in _WRITTEN:
        raise NotImplementedError(f"the stand-in does not know {func}")
    written = [x for argument in _WRITTEN[name] for x in tensors(values[argument])]
    done = post(name, group.group_name, [] if name == "barrier" else given, written)
    out = on_host(func, args, kwargs)
    if name == "barrier":
        here().wait_for(done, name)
    work = dist.Work.unbox(out[-1] if isinstance(out, tuple) else out)
    _flights[id(work)] = _Flight(work, done, given)
    if group.group_name in _batches:
        _batches[group.group_name].append(work)
    return out


def run_functional(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a functional collective, whose result is there once `wait_tensor` has been called for it."""
    name, values, given = name_of(func), bound(func, args, kwargs), tensors((args, kwargs))
    if not any(isinstance(x, CudaTensor) for x in given):
        return func(*args, **kwargs)
    out = on_host(func, args, kwargs)
    if name == "wait_tensor":
        memory = memory_of(given[0])
        join(here().stream.clock, memory.arrives[0])
        memory.arrives = ({}, [])
        return out
    group = values["group_name"]
    results = tensors(out)
    made = [x for x in results if allocate(x)]
    done = post(name, group if isinstance(group, str) else group.group_name, [*given, *made], made or results)
    for x in results:
        memory_of(x).arrives = (done, given if made else [])
    return out


def post(name: str, group: str, given: list[Tensor], written: list[Tensor]) -> Clock:
    """Enter a call of NCCL on the group's stream, after what the current stream has launched. Gives when it is done.

    `given` are all tensors of the call, and `written` those that it fills. Raises `NcclError` for what may not travel.
    """
    for x in given:
        _check(name, x)
    device, own = here(), {id(x) for x in written}
    stream = device.communicator(group)
    join(stream.clock, device.stream.clock)
    enter(name, [x for x in given if id(x) not in own], written, stream, kernel=False)
    for ledger in device.ledgers:
        ledger.collectives.append(Launch(name, stream.name, site()))
    return dict(stream.clock)


def _check(name: str, x: Tensor) -> None:
    what = f"{name} of {tuple(x.shape)} {x.dtype} on {x.device}"
    if not isinstance(x, CudaTensor):
        raise NcclError(f"{what}: No backend type associated with device type {x.device.type}")
    if not x.is_contiguous():
        raise NcclError(f"{what}: Tensors must be contiguous")
    if x.dtype not in DTYPES:
        raise NcclError(f"{what}: Input tensor data type is not supported for NCCL process group")


class ProcessGroupNCCL(dist.ProcessGroupGloo):
    """Gloo under the name of NCCL."""

    supports_coalescing = True

    class Options:
        _timeout = timedelta(minutes=10)
        is_high_priority_stream = False

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        super().__init__(store, rank, size, timeout=options._timeout)
        # A backend that Python lets go of comes back from C++ as gloo's own.
        _backends[options.group_name] = self


class _Batch(NamedTuple):
    """Messages posted together, for all of which NCCL answers with one work."""

    works: list[dist.Work]

    def wait(self, *timeout: Any) -> bool:
        for work in self.works:
            work.wait(*timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)


def patches() -> list[tuple[Any, str, Any]]:
    """What to put in the place of what of torch.distributed."""
    wait, make = dist.Work.wait, c10d._new_process_group_helper
    start, end = dist.ProcessGroup._start_coalescing, dist.ProcessGroup._end_coalescing

    def wait_on_stream(work: dist.Work, *timeout: Any) -> bool:
        flight = _flights.pop(id(work), None)
        with torch._C._DisableTorchDispatch():  # gloo finishes some of its work here
            done = wait(work, *timeout)
        if flight is not None:
            join(here().stream.clock, flight.clock)
        return done

    def make_group(*args: Any, **kwargs: Any) -> Any:
        group, store = make(*args, **kwargs)
        if not isinstance(group, dist.ProcessGroup):
            return group, store
        _without_cpu.discard(group.group_name)  # an earlier world numbered its groups alike
        if group._device_types == [torch.device("cuda")]:
            # Messages travel by kernels of the CPU: they need a backend there, which tensors of the host are refused.
            backend = _backends[group.group_name]
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
            _without_cpu.add(group.group_name)
        return group, store

    def start_coalescing(group: dist.ProcessGroup, device: torch.device) -> None:
        if device.type != DEVICE.type:
            return start(group, device)
        _batches[group.group_name] = []

    def end_coalescing(group: dist.ProcessGroup, device: torch.device) -> Any:
        return end(group, device) if device.type != DEVICE.type else _Batch(_batches.pop(group.group_name))

    return [
        (dist.Work, "wait", wait_on_stream),
        (dist.ProcessGroup, "_start_coalescing", start_coalescing),
        (dist.ProcessGroup, "_end_coalescing", end_coalescing),
        (c10d, "_new_process_group_helper", make_group),
        (torch.cuda.nccl, "version", lambda: (2, 27, 5)),
        *((module, "is_nccl_available", lambda: True) for module in (c10d, dist)),
        *((module, "ProcessGroupNCCL", ProcessGroupNCCL) for module in (c10d, dist)),
    ]


HANDLERS.update(c10d=run, _c10d_functional=run_functional)
