"""`ContextParallel`: what a model and a training loop hold. One layout for all tensors of a micro-batch, a plan for each mask."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import overload

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from longspan.advise import Costs
from longspan.comm.agree import check_agreement
from longspan.comm.groups import Group, as_group, rank_and_size, ranks_per_node
from longspan.comm.sharding import gather, shard
from longspan.cp.attention import attend, share_of
from longspan.cp.upipe import Projections, projected_attention
from longspan.errors import SpecError
from longspan.kernels.choice import check_kernel_name
from longspan.plan import BALANCED, ROUTES, Layout, Mask, Plan, check_wire_dtype, plan_attention
from longspan.plan.arguments import whole
from longspan.plan.layout import slots_of

Tensor = torch.Tensor

DEAD = {"labels": -100, "position_ids": -1}
"""What dead slots hold, by the tensor's name; 0 for every other name."""

_PLANS_KEPT = 16
_WIRE_NAMES: dict[object, str] = {torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8"}


class ContextParallel:
    """Context parallelism over one process group or 1-D mesh axis, or over a 2-D mesh (outer, inner).

    `layout` is "contiguous", "zigzag", "striped" or "balanced", which is chosen for the masks of each sequence, weighted by
    `layers`: how many layers use the mask of that name (1 if not told). `route` is one of `longspan.plan.ROUTES` or "auto".
    `heads` (query heads, KV heads on one rank, after tensor parallelism of degree `tp`) is needed by routes that move heads.
    `inner` is the inner degree of a route with two levels; a 2-D mesh tells it, and else it is chosen. `wire_dtype` bf16 or
    fp8 (a torch type or "bf16", "fp8") rounds keys and values for their way. `slots_multiple_of` pads each rank's local
    length with dead slots to a multiple. `costs` is what "auto" weighs routes by. `whole_below`: documents shorter than this
    are not split by "balanced", though token counts then differ (see `longspan.plan.Costs.whole_below`).
    """

    def __init__(
        self,
        mesh_or_group: Group,
        layout: str = "zigzag",
        route: str = "ring",
        heads: tuple[int, int] | None = None,
        inner: int | None = None,
        kernel: str = "auto",
        wire_dtype: torch.dtype | str | None = None,
        slots_multiple_of: int | None = None,
        *,
        tp: int = 1,
        costs: Costs | None = None,
        layers: Mapping[str, int] | None = None,
        whole_below: int = 0,
    ) -> None:
        if slots_multiple_of is not None and slots_multiple_of < 1:
            raise SpecError(f"slots_multiple_of={slots_multiple_of} must be at least 1")
        if isinstance(mesh_or_group, DeviceMesh) and mesh_or_group.ndim == 2:
            if route not in ROUTES or ROUTES[route].heads not in ("inner", "outer"):
                raise SpecError(
                    f"a mesh of 2 axes was given to route {route!r}, which has one level",
                    hint='give one axis, such as mesh["cp"], or a group; or use a route of two levels, such as "usp"',
                )
            inner = mesh_or_group.size(1) if inner is None else inner
            self.group = as_group(mesh_or_group, (mesh_or_group.size() // inner, inner))
        else:
            self.group = as_group(mesh_or_group)
        if self.group is None and dist.is_initialized() and dist.get_world_size() > 1:
            raise SpecError(
                f"no group was given in a world of {dist.get_world_size()} ranks",
                hint="give dist.group.WORLD, or the mesh's context-parallel axis",
            )
        self.rank, self.size = rank_and_size(self.group)
        self.layout, self.route, self.heads, self.inner, self.tp = layout, route, heads, inner, tp
        self.wire_dtype = check_wire_dtype(_WIRE_NAMES.get(wire_dtype, str(wire_dtype)) if wire_dtype else None)
        self.costs, self.ranks_per_node = costs or Costs(), ranks_per_node(self.group)
        self.kernel, self.slots_multiple_of = check_kernel_name(kernel), slots_multiple_of
        if layout != BALANCED and (layers or whole_below):
            raise SpecError(
                f"layers={layers} and whole_below={whole_below} are for layout 'balanced', not {layout!r}",
                hint='set layout="balanced", or leave them out',
            )
        self.layers = {name: whole(f"layers of {name!r}", number) for name, number in (layers or {}).items()}
        self.whole_below = whole_below
        self.agreed: set[str] = set()
        """Kinds of attention call that the ranks have compared."""
        self._planned: dict[tuple[tuple[str, Mask], ...], tuple[Layout, dict[str, Plan]]] = {}
        # A sequence of one token per rank shows now what every later one would be refused for.
        self.plans({next(iter(self.layers), "full"): Mask.causal(self.size)})

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

    def layout_for(self, masks: Mapping[str, Mask]) -> Layout:
        """The layout of a sequence with these masks."""
        seq_len = next(iter(masks.values())).seq_len
        if self.layers and (unknown := [name for name in masks if self.layers.get(name, 0) < 1]):
            raise SpecError(
                f"layers={self.layers} gives no layer to mask {', '.join(map(repr, unknown))}",
                hint="say for each mask of a sequence how many layers use it, or leave layers out",
            )
        return Layout.named(
            self.layout, seq_len, self.size, slots_of(seq_len, self.size, self.slots_multiple_of),
            masks=list(masks.values()), weights=[self.layers.get(name, 1) for name in masks], whole_below=self.whole_below,
        )  # fmt: skip

    def plans(self, masks: Mapping[str, Mask]) -> tuple[Layout, dict[str, Plan]]:
        """The layout and the plan of each mask; the latest are kept, so that masks that come again are not planned again."""
        key = tuple(sorted(masks.items()))
        planned = self._planned.pop(key, None)
        if planned is None:
            layout = self.layout_for(masks)
            planned = layout, {name: self._plan(layout, mask) for name, mask in masks.items()}
        self._planned[key] = planned
        if len(self._planned) > _PLANS_KEPT:
            del self._planned[next(iter(self._planned))]
        return planned

    def _plan(self, layout: Layout, mask: Mask) -> Plan:
        return plan_attention(
            layout, mask, self.route, self.heads, self.inner,
            wire_dtype=self.wire_dtype, tp=self.tp, ranks_per_node=self.ranks_per_node, costs=self.costs,
        )  # fmt: skip


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
        return attend(q, k, v, self.cp.route, self._shares[self._named(mask)], scale, sink, softcap, alibi)

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
