"""Shard a global tensor into the ranks' local slots, and unshard local slots."""

from collections.abc import Sequence
from typing import Any

import torch

from longspan.comm.gather import stack
from longspan.comm.groups import RankGroup
from longspan.comm.upload import upload
from longspan.errors import SpecError
from longspan.plan import Layout


def shard(x: torch.Tensor, layout: Layout, rank: int, dim: int, fill: float = 0) -> torch.Tensor:
    """Return the slots of `rank` of a global tensor: dim `dim` shrinks from `S` to `T`. Differentiable.

    Padding slots hold `fill`. Raises `SpecError` if the length of `dim` is not `S`.
    """
    index = _check(x, layout.seq_len, dim)
    positions = upload(torch.from_numpy(layout.positions(rank)), x.device)
    local = x.index_select(index, positions.clamp(min=0))
    padding = layout.num_slots(rank) - int(layout.counts[rank])
    if padding:
        local = local.clone()
        local.narrow(index, local.shape[index] - padding, padding).fill_(fill)
    return local


def unshard(parts: Sequence[torch.Tensor], layout: Layout, dim: int) -> torch.Tensor:
    """Return the global tensor from the slots of all ranks, in rank order, without padding slots. Differentiable."""
    if len(parts) != layout.ranks:
        raise SpecError(f"{len(parts)} parts were given for a layout of {layout.ranks} ranks")
    index = dim % parts[0].ndim
    live = [part.narrow(index, 0, int(count)) for part, count in zip(parts, layout.counts, strict=True)]
    order = torch.cat([torch.from_numpy(layout.positions(rank)) for rank in range(layout.ranks)])
    inverse = upload(torch.argsort(order[order >= 0]), parts[0].device)
    return torch.cat(live, dim=index).index_select(index, inverse)


def gather(x: torch.Tensor, layout: Layout, rank: int, dim: int, group: RankGroup | None) -> torch.Tensor:
    """Gather the global tensor on every rank from the slots of all ranks. Collective, differentiable.

    Backward keeps this rank's slots of the gradient, which must be the same on all ranks.
    """
    full: torch.Tensor = _Gather.apply(x, layout, rank, dim, group)  # type: ignore[no-untyped-call]
    return full


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, layout: Layout, rank: int, dim: int, group: RankGroup | None
    ) -> torch.Tensor:
        ctx.layout, ctx.rank, ctx.dim = layout, rank, dim
        index = dim % x.ndim
        if x.shape[index] != layout.num_slots(rank):
            raise SpecError(
                f"dim {dim} of a tensor {tuple(x.shape)} is not the {layout.num_slots(rank)} slots of rank {rank}",
                hint="give a tensor that has this rank's slots, as shard returns it",
            )
        if group is None:
            return unshard([x], layout, dim)
        # All-gather needs equal sizes: pad to the largest number of slots.
        longest = max(layout.num_slots(r) for r in range(layout.ranks))
        padded = x.new_zeros(longest, *(size for d, size in enumerate(x.shape) if d != index))
        padded[: x.shape[index]] = x.movedim(index, 0)
        everyone = stack(padded, group)
        parts = [everyone[r, : layout.num_slots(r)].movedim(0, index) for r in range(layout.ranks)]
        return unshard(parts, layout, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        return shard(grad, ctx.layout, ctx.rank, ctx.dim), None, None, None, None


def _check(x: torch.Tensor, seq_len: int, dim: int) -> int:
    if not -x.ndim <= dim < x.ndim:
        raise SpecError(f"dim {dim} does not exist in a tensor of shape {tuple(x.shape)}")
    if x.shape[dim] != seq_len:
        raise SpecError(
            f"dim {dim} of a tensor of shape {tuple(x.shape)} has {x.shape[dim]} rows; the sequence has {seq_len} tokens",
            hint="give the global tensor; this tensor may be sharded already, or have its sequence in another dim",
        )
    return dim % x.ndim
