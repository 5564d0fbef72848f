"""One all-gather for what is small or alike on all ranks: every rank gives a tensor and gets all of them, stacked.
Shards of unequal lengths go through `sharding.gather`."""

import torch
import torch.distributed as dist

from longspan.comm.groups import wire_device


def stack(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """(ranks, *x.shape) in rank order, on the device of `x`, which has one shape and dtype on all ranks.

    Collective unless `x` is empty; not differentiable. `group` None is a group of this rank alone.
    """
    x = x.detach()
    if group is None:
        return x[None]
    mine = x.contiguous().to(wire_device(group))
    everyone = mine.new_empty(dist.get_world_size(group), *x.shape)
    if mine.numel():
        dist.all_gather_single(everyone.view(-1), mine.view(-1), group=group)
    return everyone.to(x.device)
