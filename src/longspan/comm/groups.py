"""Process groups from whatever the caller holds: a group, a one-dimensional DeviceMesh, or nothing (one rank)."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from longspan.spec import SpecError

Group = dist.ProcessGroup | DeviceMesh | None


def as_group(group: Group) -> dist.ProcessGroup | None:
    """The process group behind `group`; None stays None and means a group of this rank alone."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names or "without names"
            raise SpecError(
                f"a mesh of {group.ndim} axes {names} was given where one axis is needed",
                hint='give the context-parallel axis alone, such as mesh["cp"]',
            )
        return group.get_group()
    if group is None or isinstance(group, dist.ProcessGroup):
        return group
    raise SpecError(f"{type(group).__name__} is neither a process group nor a DeviceMesh")


def rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This process's rank in `group` and the number of ranks there."""
    if group is None:
        return 0, 1
    rank = dist.get_rank(group)
    if rank < 0:
        raise SpecError(f"this process (global rank {dist.get_rank()}) is not part of the given group")
    return rank, dist.get_world_size(group)


def wire_device(group: dist.ProcessGroup) -> torch.device:
    """Where a tensor must live to travel in `group`: the GPU for NCCL, else the CPU."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
