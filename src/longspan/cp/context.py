"""`ContextParallel`: what a model and a training loop hold. One layout for all tensors of a micro-batch, a plan for each mask."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import overload

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

DEAD = {"labels": IGNORED, "position_ids": -1}
"""What dead slots hold, by the tensor's name; 0 for every other name."""

_PLANS_KEPT = 16


class ContextParallel:
    """Context parallelism over one process group or 1-D mesh axis, or over a 2-D mesh (outer, inner).

    `layout` is "contiguous", "zigzag", "striped" or "balanced", which is chosen for the masks of each sequence, weighted by
    `layers`: how many layers use the mask of that name (1 if not told). `route` is one of `longspan.plan.ROUTES` or "auto".
    `heads` (query heads, KV heads on one rank, after tensor parallelism of degree `tp`) is needed by routes that move heads.
    `inner` is the inner degree of a route with two levels; a 2-D mesh tells it, and else it is chosen. `comm_dtype` bf16 or
    fp8 (a torch type or "bf16", "fp8") rounds keys and values for their way. `pad_to_multiple_of` pads each rank's local
    length with dead slots to a multiple. `costs` is what "auto" weighs routes by. `min_split_tokens`: documents shorter than this
    are not split by "balanced", though token counts then differ (see `longspan.plan.Costs.min_split_tokens`).
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
                hint=f'set layout="{BALANCED}", or leave them out',
            )
        planner = Planner(
            rank_and_size(group)[1], layout, route, heads, inner, _name_of(comm_dtype), pad_to_multiple_of,
            tp=tp, ranks_per_node=ranks_per_node(group), costs=costs or Costs(), layers=layers or {},
            min_split_tokens=min_split_tokens,
        )  # fmt: skip
        self._start(group, planner, kernel)

    @classmethod
    def by(cls, group: Group, planner: Planner, kernel: str = "auto") -> "ContextParallel":
        """Context parallelism over `group` by the choices of a planner, such as the one a run was planned with."""
        made = cls.__new__(cls)
        made._start(_group_of(group, planner.route, planner.inner)[0], planner, kernel)
        return made

    def _start(self, group: RankGroup | None, planner: Planner, kernel: str) -> None:
        self.group, self.planner, self.kernel = group, planner, check_kernel_name(kernel)
        self.rank, self.size = rank_and_size(group)
        self.agreed: set[str] = set()
        """Kinds of attention call that the ranks have compared."""
        self._planned: dict[tuple[tuple[str, Mask], ...], tuple[Layout, dict[str, Plan]]] = {}
        planner.check()

    def __deepcopy__(self, memo: object) -> "ContextParallel":
        """Itself: what is copied with a model talks over the same group. Plans may be copied and pickled; groups may not."""
        return self

    @contextmanager
    def sequence(self, mask: Mask | Mapping[str, Mask], ids: Tensor | bytes | None = None) -> Iterator["Sequence"]:
        """Lay out one micro-batch. Collective: the ranks compare layout, masks, route and, if given, the global `ids`
        (or a digest of the batch).

        `mask` is one mask (then called "full") or several by name, over the same tokens. Raises `DisagreementError` naming the
        ranks that differ, on all ranks, before anything is exchanged. Backward may run after the block has ended.
        """
        problem: Exception | None = None
        what = {"layouts, masks or routes": b"", "token ids": b""}
        try:
            sequence = Sequence(self, dict(mask) if isinstance(mask, Mapping) else {"full": mask})
            what["layouts, masks or routes"] = sequence.digest
            if isinstance(ids, Tensor):
                what["token ids"] = ids.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
            elif ids is not None:
                what["token ids"] = ids
        except Exception as error:  # whatever it is, the other ranks must hear of it
            problem = error
        check_agreement(self.group, what, problem)
        yield sequence

    def plans(self, masks: Mapping[str, Mask]) -> tuple[Layout, dict[str, Plan]]:
        """The layout and the plan of each mask. The latest are kept, so that masks that come again are not planned again."""
        key = tuple(sorted(masks.items()))
        planned = self._planned.pop(key, None) or self.planner.plans(masks)
        self._planned[key] = planned
        if len(self._planned) > _PLANS_KEPT:
            del self._planned[next(iter(self._planned))]
        return planned


def _group_of(mesh_or_group: Group, route: str, inner: int | None) -> tuple[RankGroup | None, int | None]:
    """The group behind a mesh axis, a mesh of two axes or a group; and the inner degree, which a mesh of two axes gives."""
    if isinstance(mesh_or_group, DeviceMesh) and mesh_or_group.ndim == 2:
        if route not in ROUTES or ROUTES[route].heads not in ("inner", "outer"):
            raise SpecError(
                f"a mesh of 2 axes was given to route {route!r}, which has one level",
                hint='give one axis, such as mesh["cp"], or a group; or use a route of two levels, such as "usp"',
            )
        inner = mesh_or_group.size(1) if inner is None else inner
        return as_group(mesh_or_group, (mesh_or_group.size() // inner, inner)), inner
    group = as_group(mesh_or_group)
    if group is None and dist.is_initialized() and dist.get_world_size() > 1:
        raise SpecError(
            f"no group was given in a world of {dist.get_world_size()} ranks",
            hint="give dist.group.WORLD, or the mesh's context-parallel axis",
        )
    return group, inner


def _name_of(comm_dtype: torch.dtype | str | None) -> str | None:
    """The name of a type that may be given as torch's."""
    named = {getattr(torch, torch_name): name for name, torch_name in COMM_DTYPES.items()}
    return named.get(comm_dtype, str(comm_dtype)) if isinstance(comm_dtype, torch.dtype) else comm_dtype


class Sequence:
    """One micro-batch under context parallelism: its layout, its plans, and what is done to its tensors."""

    def __init__(self, cp: ContextParallel, masks: Mapping[str, Mask]) -> None:
        lengths = {name: mask.seq_len for name, mask in masks.items()}
        if len(set(lengths.values())) != 1:
            raise SpecError(
                f"masks over different numbers of tokens: {lengths}", hint="all masks of a batch cover the same tokens"
            )
        self.cp = cp
        self.layout, self.plans = cp.plans(masks)
        # Apart from the plans, which differ from batch to batch: code that is compiled once sees these alone.
        self._shares = {name: share_of(plan, cp.group, cp.kernel, name, cp.agreed) for name, plan in self.plans.items()}

    @property
    def staged(self) -> bool:
        """Whether attention takes a layer's input and works on a few heads at a time: route "upipe"."""
        return any(plan.staged for plan in self.plans.values())

    @property
    def digest(self) -> bytes:
        """What all ranks must agree on."""
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
        """`longspan.attention` by the plan of the mask of that name, which may be left out if there is only one."""
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
        """`longspan.projected_attention`, for the route "upipe", by the plan of the mask of that name."""
        return projected_attention(
            x, projections, plan=self.plans[self._named(mask)], group=self.cp.group, heads_per_stage=heads_per_stage,
            scale=scale, kernel=self.cp.kernel,
        )  # fmt: skip

    def _named(self, mask: str | None) -> str:
        if mask is None and len(self._shares) == 1:
            mask = next(iter(self._shares))
        if mask is None or mask not in self._shares:
            raise SpecError(
                f"mask {mask!r} is not one of this sequence", hint=f"choose one of {', '.join(self._shares)}"
            )
        return mask

    @overload
    def shard(self, x: Tensor, dim: int) -> Tensor: ...
    @overload
    def shard(self, x: Mapping[str, Tensor], dim: int | Mapping[str, int]) -> dict[str, Tensor]: ...

    def shard(self, x: Tensor | Mapping[str, Tensor], dim: int | Mapping[str, int]) -> Tensor | dict[str, Tensor]:
        """This rank's slots of a global tensor, or of each tensor of a mapping: dim `dim` goes from `S` to `T`.

        `dim` may differ by name. Labels must be shifted already: `longspan.data.shift_labels` does it on the global row. In
        dead slots labels are -100, positions -1, everything else 0. A tensor that was sharded before is refused.
        """
        if isinstance(x, Mapping):
            dims = {name: dim if isinstance(dim, int) else dim[name] for name in x}
            return {
                name: shard(tensor, self.layout, self.cp.rank, dims[name], DEAD.get(name, 0))
                for name, tensor in x.items()
            }
        if not isinstance(dim, int):
            raise SpecError("one tensor has one dim", hint="give dim as an integer")
        return shard(x, self.layout, self.cp.rank, dim)

    def unshard(self, x: Tensor, dim: int) -> Tensor:
        """The global tensor, on every rank, from every rank's slots. Collective, differentiable.

        The gradient of the global tensor is taken to be the same on all ranks: each keeps its own slots of it.
        """
        return gather(x, self.layout, self.cp.rank, dim, self.cp.group)
