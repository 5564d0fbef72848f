"""All-gather of tensors with one shape on all ranks. For shards of unequal lengths see `sharding.gather`."""

import torch

from longspan.comm.groups import RankGroup
from longspan.comm.transport import transport_of


def stack(x: torch.Tensor, group: RankGroup | None) -> torch.Tensor:
    """Return `(ranks, *x.shape)` in rank order, on the device of `x`. Shape and dtype of `x` are the same on all ranks.

    Collective unless `x` is empty. Not differentiable. `group` None is a group of this rank alone.
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
