"""Groups from a process group, a DeviceMesh axis, ranks in memory, or None (this rank alone)."""

from datetime import timedelta
from itertools import groupby

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from longspan.comm.torchrun import local_world_size
from longspan.comm.transport import Transport, transport_of
from longspan.errors import SpecError

RankGroup = dist.ProcessGroup | Transport
"""The ranks that carry out a plan together."""
Group = RankGroup | DeviceMesh | None


def as_group(group: Group, levels: tuple[int, int] | None = None) -> RankGroup | None:
    """Return the process group behind `group`. None means a group of this rank alone and is returned as None.

    A 2-D mesh (outer, inner) gives the group of all its ranks. Its shape must equal the `levels` of the route.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim == 2 and levels is not None:
            if tuple(group.shape) != levels:
                raise SpecError(
                    f"a mesh of {group.size(0)} x {group.size(1)} ranks (outer, inner) was given to a route of "
                    f"{levels[0]} x {levels[1]}",
                    hint=f"set inner={group.size(1)}, or give a mesh of that shape",
                )
            # DeviceMesh caches the flattened group; its ranks are numbered as in the plan.
            flat = group._flatten().get_group()
            if flat is not dist.group.WORLD and not torch.compiler.is_compiling():
                set_timeout(flat, timeout_of(group.get_group(0)))
            return flat
        if group.ndim != 1:
            names = group.mesh_dim_names or "without names"
            raise SpecError(
                f"a mesh of {group.ndim} axes {names} was given where one axis is needed",
                hint='give only the context-parallel axis, such as mesh["cp"]',
            )
        return group.get_group()
    if group is None or isinstance(group, RankGroup):
        return group
    raise SpecError(f"{type(group).__name__} is neither a process group nor a DeviceMesh")


def rank_and_size(group: RankGroup | None) -> tuple[int, int]:
    """Return this process's rank in `group` and the size of the group."""
    if group is None:
        return 0, 1
    transport = transport_of(group)
    if transport.rank < 0:
        raise SpecError(f"this process (global rank {dist.get_rank()}) is not part of the given group")
    return transport.rank, transport.size


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return the timeout of a group."""
    # Private in torch: there is no public way to read a timeout, nor to set one that a group inherits.
    timeout: timedelta = group._get_backend(group._device_types[0]).options._timeout
    return timeout


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set the timeout of all backends of `group`. In torch 2.13, `split_group` ignores its timeout for gloo and gives gloo
    groups the default of 30 minutes."""
    _set_pg_timeout(timeout, group)


def ranks_per_node(group: RankGroup | None) -> int | None:
    """Return the number of successive ranks of `group` per node, or None if unknown or different between nodes."""
    local = local_world_size()
    if group is None or isinstance(group, Transport) or local is None:
        return None
    nodes = [rank // local for rank in dist.get_process_group_ranks(group)]
    sizes = [len(list(run)) for _, run in groupby(nodes)]
    return sizes[0] if len(set(sizes)) == 1 and len(sizes) == len(set(nodes)) else None
