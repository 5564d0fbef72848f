"""Shard a global tensor into the ranks' local slots, and unshard local slots."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from longspan.comm.gather import stack
from longspan.comm.groups import RankGroup
from longspan.comm.upload import upload
from longspan.errors import SpecError
from longspan.plan import Layout

Array = np.ndarray


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


def gather(
    x: torch.Tensor,
    layout: Layout,
    rank: int,
    dim: int,
    group: RankGroup | None,
    positions: Iterable[int] | None = None,
) -> torch.Tensor:
    """Gather the global tensor, or its rows at global `positions`, on every rank from the slots of all ranks.

    Collective, differentiable. Backward keeps this rank's slots of the gradient, which must be the same on all ranks.
    """
    index = dim % x.ndim
    if x.shape[index] != layout.num_slots(rank):
        raise SpecError(
            f"dim {dim} of a tensor {tuple(x.shape)} is not the {layout.num_slots(rank)} slots of rank {rank}",
            hint="give a tensor that has this rank's slots, as shard returns it",
        )
    slots, places = _held(layout, positions)
    mine = x.index_select(index, upload(torch.from_numpy(slots[rank]), x.device))
    full: torch.Tensor = _Gather.apply(mine, places, rank, index, group)  # type: ignore[no-untyped-call]
    return full


def _held(layout: Layout, positions: Iterable[int] | None) -> tuple[list[Array], list[Array]]:
    """Return, for each rank, its slots that hold one of `positions` (default: all), and their places among these."""
    owner, slot = np.empty((2, layout.seq_len), np.int64)
    for rank, count in enumerate(layout.counts.tolist()):
        held = layout.positions(rank)[:count]
        owner[held], slot[held] = rank, np.arange(count)
    wanted = np.arange(layout.seq_len) if positions is None else np.asarray(list(positions), np.int64)
    if wanted.ndim != 1 or (wanted.size and not 0 <= wanted.min() <= wanted.max() < layout.seq_len):
        raise SpecError(
            f"positions {wanted.tolist()[:8]} are not global token positions 0..{layout.seq_len - 1}",
            hint="give indices of the global row, before sharding",
        )
    places = [np.flatnonzero(owner[wanted] == rank) for rank in range(layout.ranks)]
    return [slot[wanted[place]] for place in places], places


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, places: list[Array], rank: int, index: int, group: RankGroup | None
    ) -> torch.Tensor:
        ctx.place, ctx.index = places[rank], index
        parts = [x]
        if group is not None:
            # All-gather needs equal sizes: pad to the largest number of rows.
            padded = x.new_zeros(max(map(len, places)), *(size for d, size in enumerate(x.shape) if d != index))
            padded[: x.shape[index]] = x.movedim(index, 0)
            everyone = stack(padded, group)
            parts = [everyone[r, : len(place)].movedim(0, index) for r, place in enumerate(places)]
        inverse = upload(torch.from_numpy(np.argsort(np.concatenate(places))), x.device)
        return torch.cat(parts, dim=index).index_select(index, inverse)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        return grad.index_select(ctx.index, upload(torch.from_numpy(ctx.place), grad.device)), None, None, None, None


def _check(x: torch.Tensor, seq_len: int, dim: int) -> int:
    if not -x.ndim <= dim < x.ndim:
        raise SpecError(f"dim {dim} does not exist in a tensor of shape {tuple(x.shape)}")
    if x.shape[dim] != seq_len:
        raise SpecError(
            f"dim {dim} of a tensor of shape {tuple(x.shape)} has {x.shape[dim]} rows; the sequence has {seq_len} tokens",
            hint="give the global tensor; this tensor may be sharded already, or have its sequence in another dim",
        )
    return dim % x.ndim
