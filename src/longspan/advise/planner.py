"""`Planner` turns the masks of a micro-batch into a layout and a plan for each mask. No other code makes these choices.

    masks -> layout (chosen from the masks if "balanced") -> route, inner degree (chosen if "auto") -> a plan per mask

Training, `pack`, `--dry-run` and `longspan plan` each hold a `Planner`. Equal planners make equal choices.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from longspan.advise.choose import choose_route
from longspan.advise.costs import Costs
from longspan.errors import SpecError
from longspan.names import AUTO, BALANCED, CHUNK, window_of
from longspan.plan import Layout, Mask, Plan, check_comm_dtype, plan_attention, route_of
from longspan.plan.arguments import whole
from longspan.plan.layout import slots_of
from longspan.plan.routes import inner_degree


@dataclass(frozen=True)
class Planner:
    """The options of a run that determine its layouts and plans. A plain value: no torch, no process group.

    The constructor raises `SpecError` for options that contradict each other.
    """

    ranks: int
    """Context-parallel degree."""
    layout: str = "zigzag"
    """A name in `longspan.names.LAYOUTS`. "balanced" depends on the masks of each micro-batch."""
    route: str = "ring"
    """A name in `longspan.names.ROUTES`, or "auto" for the route with the least estimated time by `costs`."""
    heads: tuple[int, int] | None = None
    """(query heads, KV heads) on one rank, after tensor parallelism. Required by routes that move heads."""
    inner: int | None = None
    """Inner degree of a two-level route. Default: as many ranks as KV heads and a node allow."""
    comm_dtype: str | None = None
    """Communication dtype of keys and values, "bf16" or "fp8". Default: the tensors' dtype."""
    pad_to_multiple_of: int | None = None
    """Pads each rank's local length to a multiple of this number with padding slots."""
    tp: int = 1
    """Tensor-parallel degree, used only in error messages."""
    ranks_per_node: int | None = None
    """Neighbouring ranks of the CP group that share a node. Default: all."""
    costs: Costs = field(default_factory=Costs)
    """Costs by which "auto" compares routes."""
    layers: Mapping[str, int] = field(default_factory=dict)
    """Mask name -> number of layers that use the mask, which is the mask's weight in "balanced". Default: 1 each."""
    min_split_tokens: int = 0
    """"balanced" splits no document shorter than this, even if token counts then differ. See `Costs.min_split_tokens`."""

    def __post_init__(self) -> None:
        if self.pad_to_multiple_of is not None and self.pad_to_multiple_of < 1:
            raise SpecError(f"pad_to_multiple_of={self.pad_to_multiple_of} must be at least 1")
        if self.layout != BALANCED and self.min_split_tokens:
            raise SpecError(
                f"min_split_tokens={self.min_split_tokens} is for layout {BALANCED!r}, not {self.layout!r}",
                hint=f'set layout="{BALANCED}", or leave min_split_tokens out',
            )
        if self.route == AUTO and self.inner is not None:
            raise SpecError(
                f"inner={self.inner} does not apply to route {AUTO!r}, which chooses the inner degree",
                hint="leave inner out",
            )
        check_comm_dtype(self.comm_dtype)
        object.__setattr__(self, "layers", {name: whole(f"layers of {name!r}", n) for name, n in self.layers.items()})

    @classmethod
    def with_costs(
        cls,
        measured: Path | None,
        *,
        head_dim: int,
        itemsize: int,
        layout: str,
        heads: tuple[int, int] | None,
        **others: Any,
    ) -> "Planner":
        """Make a planner with the costs in the file `measured`, for tensors of this `head_dim` and `itemsize`.

        Default `measured`: the typical costs of `Costs`. With measured costs, "balanced" does not split
        documents that are too short for a split to save time.
        """
        costs = Costs() if measured is None else Costs.load(measured)
        costs = costs.model_copy(update={"head_dim": head_dim, "itemsize": itemsize})
        keeps = layout == BALANCED and measured is not None and heads is not None
        least = costs.min_split_tokens(heads[0]) if keeps and heads else 0
        return cls(layout=layout, heads=heads, costs=costs, min_split_tokens=least, **others)

    def check(self) -> Plan:
        """Check the options by planning one token per rank. Raises `SpecError` if no sequence could be planned."""
        name = next(iter(self.mask_layers))
        return self.plans({name: Mask.causal(self.ranks)})[1][name]

    @property
    def mask_layers(self) -> Mapping[str, int]:
        """`layers`, or one layer with a full mask if `layers` is empty."""
        return self.layers or {"full": 1}

    def documents(self, lengths: Sequence[int]) -> dict[str, Mask]:
        """Make each mask of `mask_layers` over a row of causal documents."""
        return {name: documents_mask(name, lengths) for name in self.mask_layers}

    def plans(self, masks: Mapping[str, Mask], slots: int | None = None) -> tuple[Layout, dict[str, Plan]]:
        """Make the layout of a micro-batch, and a plan for each of its masks. `slots` fixes the local length."""
        layout = self.layout_of(masks, slots)
        return layout, {name: self.plan(layout, mask) for name, mask in masks.items()}

    def layout_of(self, masks: Mapping[str, Mask], slots: int | None = None) -> Layout:
        """Make the layout of a micro-batch with these masks."""
        seq_len = next(iter(masks.values())).seq_len
        if self.layers and (unknown := [name for name in masks if self.layers.get(name, 0) < 1]):
            raise SpecError(
                f"layers={self.layers} gives no layer to mask {', '.join(map(repr, unknown))}",
                hint="give the number of layers that use each mask, or leave layers out",
            )
        if slots is None:
            slots = slots_of(seq_len, self.ranks, self.pad_to_multiple_of)
        return Layout.named(
            self.layout, seq_len, self.ranks, slots, masks=list(masks.values()),
            weights=[self.layers.get(name, 1) for name in masks], min_split_tokens=self.min_split_tokens,
        )  # fmt: skip

    def plan(self, layout: Layout, mask: Mask) -> Plan:
        """Make the plan of one mask over a layout."""
        route, inner, reason = self.route, self.inner, ""
        if route == AUTO:
            route, inner, reason = choose_route(
                layout, mask, self.heads, self.tp, self.ranks_per_node, self.costs, self.comm_dtype
            )
        elif inner is None and route_of(route).heads in ("inner", "outer"):
            inner = inner_degree(route, self.ranks, self.heads, self.ranks_per_node)
        plan = plan_attention(layout, mask, route, self.heads, inner, comm_dtype=self.comm_dtype, tp=self.tp)
        return replace(plan, reason=reason) if reason else plan


def documents_mask(name: str, lengths: Sequence[int]) -> Mask:
    """Make the mask of a name over causal documents: "full", "window-<w>", or "chunk-<c>" of models of transformers."""
    if name.startswith(CHUNK):
        return Mask.chunked(lengths, int(name.removeprefix(CHUNK)))
    return Mask.documents(lengths, window=window_of(name))
