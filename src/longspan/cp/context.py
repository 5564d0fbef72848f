"""`ContextParallel`, the object that a model and a training loop hold, and `Sequence`, one micro-batch under it.

All tensors of a micro-batch share one layout. Each mask has a plan of its own over that layout.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn, TypeVar, overload
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from longspan.advise import Costs, Planner
from longspan.comm.agree import check_agreement
from longspan.comm.groups import Group, RankGroup, as_group, rank_and_size, ranks_per_node
from longspan.comm.sharding import gather, shard
from longspan.cp.attention import attend, share_of
from longspan.cp.upipe import Projections, projected_attention
from longspan.errors import SpecError
from longspan.kernels.choice import check_kernel_name
from longspan.names import BALANCED, COMM_DTYPES, IGNORED, ROUTES
from longspan.plan import Layout, Mask, Plan

Tensor = torch.Tensor
K = TypeVar("K")
V = TypeVar("V")

_PADDING = {"labels": IGNORED, "position_ids": -1}
"""Value in padding slots, by tensor name. Default: 0."""

_PLANS_KEPT = 16

_sharded: "WeakSet[ContextParallel]" = WeakSet()


def is_sharded_run() -> bool:
    """Whether this process holds a `ContextParallel` of more than one rank."""
    return len(_sharded) > 0


class ContextParallel:
    """Context parallelism over a process group, a 1-D mesh, or a 2-D mesh (outer, inner).

    - `layout`: "contiguous", "zigzag", "striped" or "balanced". "balanced" is computed from the masks of each sequence.
    - `route`: a name of `longspan.names.ROUTES`, or "auto" for the cheapest route by `costs`.
    - `heads`: (query heads, KV heads) on one rank, after tensor parallelism of degree `tp`. Required by routes that move heads.
    - `inner`: inner degree of a route of two levels. Default: the inner axis of a 2-D mesh; otherwise chosen.
    - `comm_dtype`: bf16 or fp8, as a torch dtype or by name, rounds keys and values in flight. Default: none.
    - `pad_to_multiple_of`: pads each rank's local length with padding slots to a multiple.
    - `layers`: mask name -> number of layers that use the mask, which is its weight in "balanced". Default: 1 each.
    - `min_split_tokens`: "balanced" splits no document shorter than this, even if token counts then differ between ranks
      (see `longspan.advise.Costs.min_split_tokens`).

    Raises `SpecError` if no sequence could be planned with these options.
    """

    def __init__(
        self,
        mesh_or_group: Group,
        layout: str = "zigzag",
        route: str = "ring",
        heads: tuple[int, int] | None = None,
        inner: int | None = None,
        kernel: str = "auto",
        comm_dtype: torch.dtype | str | None = None,
        pad_to_multiple_of: int | None = None,
        *,
        tp: int = 1,
        costs: Costs | None = None,
        layers: Mapping[str, int] | None = None,
        min_split_tokens: int = 0,
    ) -> None:
        group, inner = _group_of(mesh_or_group, route, inner)
        if layers and layout != BALANCED:
            raise SpecError(
                f"layers={layers} are for layout {BALANCED!r}, not {layout!r}",
                hint=f'set layout="{BALANCED}", or leave layers out',
            )
        planner = Planner(
            rank_and_size(group)[1], layout, route, heads, inner, _name_of(comm_dtype), pad_to_multiple_of,
            tp=tp, ranks_per_node=ranks_per_node(group), costs=costs or Costs(), layers=layers or {},
            min_split_tokens=min_split_tokens,
        )  # fmt: skip
        self._start(group, planner, kernel)

    @classmethod
    def by(cls, group: Group, planner: Planner, kernel: str = "auto") -> "ContextParallel":
        """Build from a `Planner` instead of from options, such as the planner of a training run."""
        made = cls.__new__(cls)
        made._start(_group_of(group, planner.route, planner.inner)[0], planner, kernel)
        return made

    def _start(self, group: RankGroup | None, planner: Planner, kernel: str) -> None:
        self.group, self.planner, self.kernel = group, planner, check_kernel_name(kernel)
        self.rank, self.size = rank_and_size(group)
        self.agreed: set[str] = set()
        """Kinds of attention call that the ranks have compared already."""
        self._planned: dict[tuple[tuple[str, Mask], ...], tuple[Layout, dict[str, Plan]]] = {}
        self._others: dict[str, ContextParallel] = {}
        planner.check()
        if self.size > 1:
            _sharded.add(self)

    def __deepcopy__(self, memo: object) -> "ContextParallel":
        """Return self, so that a copied model uses the same group: process groups cannot be copied."""
        return self

    @contextmanager
    def sequence(self, mask: Mask | Mapping[str, Mask], ids: Tensor | bytes | None = None) -> Iterator["Sequence"]:
        """Lay out one micro-batch and plan its masks. Backward may run after the block has ended.

        `mask` is one mask, named "full", or a mapping from names to masks over the same tokens. Collective: the ranks
        compare layout, masks, route and, if given, `ids` (the global input ids, or a digest of the batch). If ranks
        differ, every rank raises a `DisagreementError` that names the differing ranks, before any other exchange.
        """
        try:
            sequence = Sequence(self, dict(mask) if isinstance(mask, Mapping) else {"full": mask})
            if isinstance(ids, Tensor):
                ids = ids.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        except Exception as error:
            self.refuse(error)
        self._agree(sequence.digest, ids or b"")
        yield sequence

    def refuse(self, problem: Exception) -> NoReturn:
        """Raise `problem`, of any type, here and, as a `DisagreementError`, on the ranks that enter a sequence. Collective."""
        self._agree(b"", b"", problem)
        raise problem

    def _agree(self, plans: bytes, ids: bytes, problem: Exception | None = None) -> None:
        check_agreement(self.group, {"layouts, masks or routes": plans, "token ids": ids}, problem)

    def with_options(self, **options: Any) -> "ContextParallel":
        """Return a `ContextParallel` of the same group and kernel, whose `Planner` has other `options`. Cached."""
        key = repr(sorted(options.items()))
        if key not in self._others:
            self._others[key] = ContextParallel.by(self.group, replace(self.planner, **options), self.kernel)
        return self._others[key]

    def plans(self, masks: Mapping[str, Mask]) -> tuple[Layout, dict[str, Plan]]:
        """Return the layout and the plan of each mask. Caches the latest 16 results."""
        return latest(self._planned, tuple(sorted(masks.items())), lambda: self.planner.plans(masks))


def latest(kept: dict[K, V], key: K, make: Callable[[], V]) -> V:
    """Return `kept[key]`, made first if missing. Keeps the 16 values used most recently."""
    kept[key] = value = kept.pop(key) if key in kept else make()
    if len(kept) > _PLANS_KEPT:
        del kept[next(iter(kept))]
    return value


def _group_of(mesh_or_group: Group, route: str, inner: int | None) -> tuple[RankGroup | None, int | None]:
    """Return (group of all ranks, inner degree). A 2-D mesh sets the inner degree."""
    if isinstance(mesh_or_group, DeviceMesh) and mesh_or_group.ndim == 2:
        if route not in ROUTES or ROUTES[route].heads not in ("inner", "outer"):
            raise SpecError(
                f"a mesh of 2 axes was given to route {route!r}, which has one level",
                hint='give one axis, such as mesh["cp"], or a group; or set a route of two levels, such as route="usp"',
            )
        inner = mesh_or_group.size(1) if inner is None else inner
        return as_group(mesh_or_group, (mesh_or_group.size() // inner, inner)), inner
    group = as_group(mesh_or_group)
    if group is None and dist.is_initialized() and dist.get_world_size() > 1:
        raise SpecError(
            f"no group was given in a world of {dist.get_world_size()} ranks",
            hint="give dist.group.WORLD, or the context-parallel axis of the mesh",
        )
    return group, inner


def _name_of(comm_dtype: torch.dtype | str | None) -> str | None:
    """Return the name of a dtype given as a torch dtype or by name."""
    named = {getattr(torch, torch_name): name for name, torch_name in COMM_DTYPES.items()}
    return named.get(comm_dtype, str(comm_dtype)) if isinstance(comm_dtype, torch.dtype) else comm_dtype


class Sequence:
    """One micro-batch under context parallelism: its layout, its plans, and the operations on its tensors."""

    def __init__(self, cp: ContextParallel, masks: Mapping[str, Mask]) -> None:
        lengths = {name: mask.seq_len for name, mask in masks.items()}
        if len(set(lengths.values())) != 1:
            raise SpecError(
                f"the masks of a batch cover different numbers of tokens: {lengths}",
                hint="give masks with the same seq_len",
            )
        self.cp = cp
        self.layout, self.plans = cp.plans(masks)
        # Kept apart from the plans: compiled code reads only the shares, and so does not guard on the plan of one batch.
        self._shares = {name: share_of(plan, cp.group, cp.kernel, name, cp.agreed) for name, plan in self.plans.items()}

    @property
    def staged(self) -> bool:
        """Whether attention projects and computes a few heads at a time from a layer's input: route "upipe"."""
        return any(plan.staged for plan in self.plans.values())

    @property
    def digest(self) -> bytes:
        """Digest of layout, masks and route, which must be equal on all ranks."""
        return b"".join(name.encode() + plan.digest for name, plan in sorted(self.plans.items()))

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: str | None = None,
        scale: float | None = None,
        sink: Tensor | None = None,
        softcap: float | None = None,
        alibi: Tensor | None = None,
    ) -> Tensor:
        """Run `longspan.attention` with the plan of the named mask. `mask` may be omitted if there is only one."""
        return attend(q, k, v, self._shares[self._named(mask)], scale, sink, softcap, alibi)

    def projected_attention(
        self,
        x: Tensor,
        projections: Projections,
        *,
        heads_per_stage: int | None = None,
        mask: str | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Run `longspan.projected_attention` (route "upipe") with the plan of the named mask."""
        return projected_attention(
            x, projections, plan=self.plans[self._named(mask)], group=self.cp.group, heads_per_stage=heads_per_stage,
            scale=scale, kernel=self.cp.kernel,
        )  # fmt: skip

    def _named(self, mask: str | None) -> str:
        if mask is None and len(self._shares) == 1:
            mask = next(iter(self._shares))
        if mask is None or mask not in self._shares:
            raise SpecError(
                f"mask {mask!r} is not a mask of this sequence", hint=f"choose one of {', '.join(self._shares)}"
            )
        return mask

    @overload
    def shard(self, x: Tensor, dim: int) -> Tensor: ...
    @overload
    def shard(self, x: Mapping[str, Tensor], dim: int | Mapping[str, int]) -> dict[str, Tensor]: ...

    def shard(self, x: Tensor | Mapping[str, Tensor], dim: int | Mapping[str, int]) -> Tensor | dict[str, Tensor]:
        """Return this rank's slots of a global tensor, or of each tensor of a mapping: `dim` shrinks from `S` to `T`.

        If `x` is a mapping, `dim` may be a mapping too. Shift labels before sharding, with `longspan.data.shift_labels`.
        Padding slots hold -100 in "labels", -1 in "position_ids" and 0 elsewhere. Raises `SpecError` for a tensor that
        is already sharded.
        """
        if isinstance(x, Mapping):
            dims = {name: dim if isinstance(dim, int) else dim[name] for name in x}
            return {
                name: shard(tensor, self.layout, self.cp.rank, dims[name], _PADDING.get(name, 0))
                for name, tensor in x.items()
            }
        if not isinstance(dim, int):
            raise SpecError(f"dim={dim!r} for one tensor is not an integer", hint="give dim as an integer")
        return shard(x, self.layout, self.cp.rank, dim)

    def unshard(self, x: Tensor, dim: int, positions: Iterable[int] | None = None) -> Tensor:
        """Gather the global tensor, or its rows at global `positions`, on every rank. Collective, differentiable.

        Backward keeps this rank's slots of the gradient, which must be the same on all ranks.
        """
        return gather(x, self.layout, self.cp.rank, dim, self.cp.group, positions)
