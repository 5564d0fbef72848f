"""Count what a rank sends over each axis of a run, in FSDP2, DTensor, pipelining and longspan's hops.

with census(meshes) as traffic:
    step(batches, 0)
traffic.by_axis["tp"].elements_sent; traffic.by_kind["cp", "send"].calls
traffic.by_issuer["shard", "torch.distributed.fsdp"].bytes_sent
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from longspan.advise.volumes import product_axis
from longspan.comm.meshes import Meshes


@dataclass(frozen=True)
class Counts:
    """Number of collectives and messages, and what this rank sent in them, as exact fractions."""

    calls: int = 0
    elements_sent: Fraction = Fraction(0)
    bytes_sent: Fraction = Fraction(0)

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            self.calls + other.calls, self.elements_sent + other.elements_sent, self.bytes_sent + other.bytes_sent
        )


class Sent(NamedTuple):
    """One call: axis, kind ("all-gather", "send", ...), issuing module and counts."""

    axis: str
    kind: str
    issuer: str
    counts: Counts


class Census(list[Sent]):
    """The calls of this rank in groups of several ranks, in order, without receives."""

    @property
    def by_axis(self) -> dict[str, Counts]:
        """Axis or product of axes -> counts."""
        return self._sums(lambda sent: sent.axis)

    @property
    def by_kind(self) -> dict[tuple[str, str], Counts]:
        """(axis, kind) -> counts."""
        return self._sums(lambda sent: (sent.axis, sent.kind))

    @property
    def by_issuer(self) -> dict[tuple[str, str], Counts]:
        """(axis, module) -> counts."""
        return self._sums(lambda sent: (sent.axis, sent.issuer))

    def _sums(self, key: Callable[[Sent], Any]) -> dict[Any, Counts]:
        sums: dict[Any, Counts] = {}
        for sent in self:
            sums[key(sent)] = sums.get(key(sent), Counts()) + sent.counts
        return sums


@contextmanager
def census(meshes: Meshes) -> Iterator[Census]:
    """Count what this rank sends inside the block, forward and backward.

    An axis is named after the ranks of the group: tp, cp, dp, pp, or the product along which they differ, such as "tp-cp";
    "world" if that product is all ranks. Groups of FSDP2 are named "shard", "replica" and "edp" ("edp" becomes "shard" if the
    groups are equal). The group of rows sent to experts is named "ep", even if another axis has the same ranks. Groups of one
    rank are left out.

    Elements sent are those of an optimal algorithm, such as a ring, over P ranks. All-gather of n per rank: (P - 1) n.
    Reduce-scatter to n per rank: (P - 1) n. All-reduce of n: 2 n (P - 1) / P. All-to-all: elements for other ranks. Message:
    the message's elements. Broadcast and scatter (on the root), gather and reduce (on the other ranks): as messages to each peer.

    The census counts operators of c10d and of functional collectives that this thread calls, or the autograd thread that runs
    its backward (torch passes the dispatch mode on). It does not count graphs compiled or captured before, or direct calls of
    NCCL. Raises NotImplementedError: an unknown collective.
    """
    traffic = Census()
    with _Census(meshes, traffic):
        yield traffic


class _Census(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, meshes: Meshes, traffic: Census) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names, self.traffic = _Names(meshes), traffic

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor dispatches again, on local tensors
        space = getattr(func, "namespace", "")
        if space == "longspan":
            # longspan's operators communicate inside, where the mode is off unless it is entered again.
            device = next(x.device.type for x in args if isinstance(x, Tensor))
            with self:
                return func.redispatch(torch._C.DispatchKeySet(_KEYS[device]), *args, **kwargs)
        if space in _SPACES and (name := func.name().partition(".")[0].partition("::")[2]) not in _SILENT:
            self._count(name, {**_bound(func, args), **kwargs})
        return func(*args, **kwargs)

    def _count(self, name: str, values: dict[str, Any]) -> None:
        if name not in _KINDS:
            raise NotImplementedError(f"{name} is a collective without a rule in the census")
        kind, payload_of, factor_of = _KINDS[name]
        group = _group(values)
        place = _Place(dist.get_rank(group), dist.get_world_size(group), values)
        if place.size == 1:
            return
        payload, factor = _tensors(payload_of(place)), factor_of(place)
        issuer = _issuer()
        elements, nbytes = sum(x.numel() for x in payload), sum(x.nbytes for x in payload)
        counts = Counts(1, factor * elements, factor * nbytes)
        self.traffic.append(Sent(self.names.axis(group, issuer), kind, issuer, counts))


class _Names:
    """Names of process groups by axis."""

    def __init__(self, meshes: Meshes) -> None:
        self.topology = meshes.topology
        shard, replica, edp = meshes.weights["shard"], meshes.weights["replica"], meshes.experts["edp"]
        same = self.topology.groups("edp") == self.topology.groups("shard")
        wrapped = [(edp, "shard" if same else "edp"), (replica, "replica"), (shard, "shard")]
        self.of_fsdp = {mesh.get_group().group_name: name for mesh, name in wrapped if mesh.size() > 1}

    def axis(self, group: dist.ProcessGroup, issuer: str) -> str:
        if issuer == "torch.distributed.fsdp":
            return self.of_fsdp[group.group_name]
        if issuer == "longspan.comm.row_exchange":
            return "ep"
        ranks = dist.get_process_group_ranks(group)
        places = [self.topology.coordinates(rank) for rank in ranks]
        varied = [axis for axis in ("tp", "dp", "cp", "pp") if len({place[axis] for place in places}) > 1]
        return product_axis(self.topology, *varied)


class _Place(NamedTuple):
    """This rank in the group of a call, and the call's arguments by name."""

    rank: int
    size: int
    values: dict[str, Any]

    def among(self, *names: str) -> Any:
        """Return the first existing argument of `names`."""
        return next(self.values[name] for name in names if name in self.values)

    @property
    def is_root(self) -> bool:
        if "root_rank" in self.values:
            return bool(self.values["root_rank"] == self.rank)
        return bool(self.values["src"] == self.rank)


def _given(place: _Place) -> Any:
    return place.among("input_tensors", "input_tensor", "input_list", "inputs", "input", "tensors", "tensor")


def _to_others(place: _Place) -> Any:
    return [x for rank, x in enumerate(place.values["input_tensors"]) if rank != place.rank]


def _part_of_others(place: _Place) -> Fraction:
    """Return the share of an all-to-all that goes to other ranks. Without splits, all parts are equal."""
    splits = place.among("input_split_sizes") if "input_split_sizes" in place.values else []
    sizes = list(splits) or [1] * place.size
    return Fraction(sum(sizes) - sizes[place.rank], sum(sizes) or 1)


def _all_others(place: _Place) -> Fraction:
    return Fraction(place.size - 1)


def _share_of_others(place: _Place) -> Fraction:
    return Fraction(place.size - 1, place.size)


def _once(place: _Place) -> Fraction:
    return Fraction(1)


_Rule = tuple[str, Callable[[_Place], Any], Callable[[_Place], Fraction]]
"""Return (kind of a call, payload tensors, factor: elements sent / elements of the payload)."""

_GATHER: _Rule = ("all-gather", _given, _all_others)
_SCATTER: _Rule = ("reduce-scatter", _given, _share_of_others)
_REDUCE: _Rule = ("all-reduce", _given, lambda place: 2 * _share_of_others(place))
_EXCHANGE: _Rule = ("all-to-all", _given, _part_of_others)
_BROADCAST: _Rule = ("broadcast", _given, lambda place: Fraction(place.is_root * (place.size - 1)))
_TO_ROOT: _Rule = ("gather", _given, lambda place: Fraction(not place.is_root))
_SEND: _Rule = ("send", _given, _once)

_KINDS: dict[str, _Rule] = {
    **dict.fromkeys(("allreduce_", "allreduce_coalesced_", "all_reduce", "all_reduce_"), _REDUCE),
    **dict.fromkeys(("all_reduce_coalesced", "all_reduce_coalesced_"), _REDUCE),
    **dict.fromkeys(("_allgather_base_", "allgather_", "allgather_coalesced_"), _GATHER),
    **dict.fromkeys(("allgather_into_tensor_coalesced_", "all_gather_into_tensor"), _GATHER),
    **dict.fromkeys(("all_gather_into_tensor_out", "all_gather_into_tensor_coalesced"), _GATHER),
    **dict.fromkeys(("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_"), _SCATTER),
    **dict.fromkeys(("reduce_scatter_tensor", "reduce_scatter_tensor_out"), _SCATTER),
    "reduce_scatter_tensor_coalesced": _SCATTER,
    **dict.fromkeys(("alltoall_base_", "all_to_all_single", "shard_dim_alltoall"), _EXCHANGE),
    "alltoall_": ("all-to-all", _to_others, _once),
    **dict.fromkeys(("broadcast_", "broadcast"), _BROADCAST),
    **dict.fromkeys(("gather_", "reduce_"), _TO_ROOT),
    "scatter_": ("scatter", _given, lambda place: place.is_root * _share_of_others(place)),
    **dict.fromkeys(("send", "isend"), _SEND),
}
_SILENT = {
    "recv_", "recv_any_source_", "irecv", "barrier", "monitored_barrier_", "check_for_nan", "wait_tensor",
    "_wrap_tensor_autograd",
}  # fmt: skip
"""Operators that send nothing."""

_SPACES = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem"}
_KEYS = {"cpu": torch._C.DispatchKey.CPU, "cuda": torch._C.DispatchKey.CUDA}
_NAMED = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.pipelining")
_PLUMBING = (__name__, "longspan.comm.gather", "longspan.comm.transport")


def _bound(func: Any, args: Sequence[Any]) -> dict[str, Any]:
    return {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}


def _group(values: dict[str, Any]) -> dist.ProcessGroup:
    if "process_group" in values:
        return dist.ProcessGroup.unbox(values["process_group"])
    group: Any = values["group_name"]
    return _resolve_process_group(GroupName(group)) if isinstance(group, str) else group


def _tensors(x: Any) -> list[Tensor]:
    return [x] if isinstance(x, Tensor) else [tensor for part in x for tensor in _tensors(part)]


def _issuer() -> str:
    """Return the module that issued a collective: the innermost frame of longspan or of a module in `_NAMED`."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("longspan.") and module not in _PLUMBING:
            return module
        for name in _NAMED:
            if module.startswith(name):
                return name
        frame = frame.f_back  # type: ignore[assignment]
    return "other"
