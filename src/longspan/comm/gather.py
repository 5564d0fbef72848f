"""One all-gather for what is small or alike on all ranks: every rank gives a tensor and gets all of them, stacked.
Shards of unequal lengths go through `sharding.gather`."""

import torch

from longspan.comm.groups import RankGroup
from longspan.comm.transport import transport_of


def stack(x: torch.Tensor, group: RankGroup | None) -> torch.Tensor:
    """(ranks, *x.shape) in rank order, on the device of `x`, which has one shape and dtype on all ranks.

    Collective unless `x` is empty; not differentiable. `group` None is a group of this rank alone.
    """
    x = x.detach()
    if group is None:
        return x[None]
    transport = transport_of(group)
    mine = x.contiguous().to(transport.carries(x.device))
    everyone = mine.new_empty(transport.size, *x.shape)
    if mine.numel():
        transport.all_gather(everyone.view(-1), mine.view(-1))
    return everyone.to(x.device)
