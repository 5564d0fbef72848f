"""`hf.sequence`: one batch of a Hugging Face model, sharded; `Sequence`: its inputs, masks and gradients.

    rows (B, S), padded or packed -> documents on one axis -> this rank's slots (1, T) -> model -> loss share -> backward

A mean over the batch's targets is the sum of the ranks' shares, so that wrappers which average gradients need the factor
that `Sequence.backward` applies.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch
from torch import nn

from longspan.comm.gather import stack
from longspan.comm.groups import Group, as_group
from longspan.cp.attention import share_of
from longspan.cp.context import ContextParallel
from longspan.cp.context import Sequence as Shards
from longspan.cp.engine.operators import ShareRef
from longspan.data import Batch, to_padded
from longspan.data.arrays import IntArray
from longspan.errors import SpecError
from longspan.hf import interface
from longspan.hf.mask_kinds import OVERLAY, kinds_of_layers, mask_of
from longspan.hf.model_check import check
from longspan.hf.router_loss import share_router_losses
from longspan.hf.rows import Rows, rows_of
from longspan.hf.wrappers import averaging_ranks, unwrapped
from longspan.names import BALANCED, IGNORED

Tensor = torch.Tensor

_Call = tuple[str, int, int]
"""(kind of mask, query heads, KV heads) of an attention call."""
_unstated: WeakKeyDictionary[nn.Module, dict[_Call, None]] = WeakKeyDictionary()
"""Model -> the calls that its configuration does not state. Planned when they occur, and at the start of later sequences."""

_watched: WeakSet[nn.Module] = WeakSet()


@contextmanager
def sequence(
    cp: ContextParallel,
    model: nn.Module,
    batch: Batch | Mapping[str, Any],
    num_targets: int | Tensor | None = None,
) -> Iterator["Sequence"]:
    """Shard one batch for a model built with `attn_implementation="longspan"`. Collective over the CP group.

    - `batch`: a `Batch`, or global `input_ids` (B, S) with optional `labels` (B, S, not shifted; -100 ignored) and either
      `attention_mask` (B, S, padding on the left or right) or `position_ids` (B, S, restarting at 0 in every document).
      `token_type_ids` (B, S): 1 at image tokens, which also see the rest of their image. The same on every rank of the CP
      group. Other keys are refused.
    - `num_targets`: targets of the whole global batch: all data-parallel ranks, and all micro-batches until the optimizer
      step (see `count_targets`). Default: those of this batch alone.

    Within the block, `model(**seq.inputs)` computes this rank's tokens. `loss` is this rank's share: the shares of all ranks
    sum to the mean over `num_targets`. Backward, also with recomputation, may run after the block.

    The model is checked as by `check`, anew for longer documents. Raises `SpecError` before any exchange
    for a model or batch that cannot be run exactly, `DisagreementError` on all ranks if they were given different batches.
    """
    if interface.open_sequence() is not None:
        raise SpecError(
            "hf.sequence was entered inside hf.sequence",
            hint="leave the first block before the second; the first one's backward may run later",
        )
    try:
        base = unwrapped(model)
        _check_model(base)
        rows = rows_of(batch)
        check(model, max(rows.batch.lengths))
        kinds = kinds_of_layers(base.config.get_text_config())
        masks = {kind: mask_of(kind, rows.batch.lengths, rows.image) for kind in kinds}
        planned = cp.with_options(**_options(cp, base, kinds, rows))
    except Exception as error:
        cp.refuse(error)
    if base not in _watched:
        share_router_losses(base)
        base.register_forward_pre_hook(_check_keywords, with_kwargs=True)
        _watched.add(base)
    counted = "" if isinstance(num_targets, Tensor) else f"{num_targets}"
    with planned.sequence(masks, ids=rows.digest + counted.encode()) as shards:
        opened = Sequence(shards, model, rows, num_targets)
    interface.enter(opened)
    try:
        yield opened
    finally:
        interface.enter(None)


class SequenceMask:
    """One kind of mask of a sequence, as transformers hands it from layer to layer in place of a dense mask."""

    def __init__(self, sequence: "Sequence", kind: str) -> None:
        self.sequence, self.kind = sequence, kind
        self.shares: dict[tuple[int, int], ShareRef] = {}

    def share(self, heads: int, kv_heads: int) -> ShareRef:
        """Return this rank's share of the plan for these numbers of heads."""
        if (heads, kv_heads) not in self.shares:
            self.sequence.plan(self, (heads, kv_heads))
        return self.shares[heads, kv_heads]


class Sequence:
    """One batch of a model under context parallelism.

    `inputs`: keyword arguments of the model, this rank's tokens (1, T): `input_ids`, `position_ids`, `attention_mask` (1: a
    token, 0: a padding slot), `use_cache`, and if the batch has labels, `labels` and `shift_labels` (shifted on the global
    row) and `num_items_in_batch`.
    """

    def __init__(self, shards: Shards, model: nn.Module, rows: Rows, num_targets: int | Tensor | None) -> None:
        self.shards, self.layout, self.batch = shards, shards.layout, rows.batch
        self._rows, self._model = rows, model
        self._masks: dict[str, SequenceMask] = {}
        # Planned before the forward, so that compiled code need not.
        for kind, *heads in [*_stated(shards), *_unstated.get(unwrapped(model), ())]:
            self.mask(kind).share(*heads)
        self.inputs = self._inputs(_device_of(model), rows.batch.num_targets if num_targets is None else num_targets)

    def _inputs(self, device: torch.device, num_targets: int | Tensor) -> dict[str, Any]:
        ids, labels = self._local(self.batch.input_ids, 0, device), self._local(self.batch.labels, IGNORED, device)
        targets = {
            "labels": labels,
            "shift_labels": labels,
            "num_items_in_batch": torch.as_tensor(num_targets, device=device).clamp(min=1),
        }
        return {
            "input_ids": ids,
            "position_ids": self._local(self.batch.position_ids, 0, device),
            "attention_mask": self._local(np.ones_like(self.batch.input_ids), 0, device),
            "use_cache": False,
        } | (targets if self._rows.labelled else {})

    def _local(self, values: IntArray, fill: int, device: torch.device) -> Tensor:
        """Return this rank's slots (1, T) of a global row (S,). Nothing of the row's length reaches the device."""
        positions = self.layout.positions(self.shards.cp.rank)
        local = np.where(positions < 0, fill, values[positions.clip(min=0)])
        return torch.from_numpy(local)[None].to(device)

    def mask(self, kind: str) -> SequenceMask:
        """Return the mask of a kind. Called by the model's forward, through the registered mask function."""
        if kind not in self._masks:
            self._add(kind)
        return self._masks[kind]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _add(self, kind: str) -> None:
        if kind == OVERLAY:
            raise SpecError(
                "the model lays a mask of its own over causal attention, such as blocks of image tokens",
                hint="give a text model and its text inputs alone",
            )
        self._masks[kind] = SequenceMask(self, kind)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def plan(self, mask: SequenceMask, heads: tuple[int, int]) -> None:
        """Plan a mask for these numbers of heads, unless the plan that the ranks have compared serves them."""
        cp = self.shards.cp
        plan = self.shards.plans.get(mask.kind)
        if plan is None or plan.heads not in (None, heads):
            _unstated.setdefault(unwrapped(self._model), {})[mask.kind, *heads] = None
            plan = replace(cp.planner, heads=heads).plan(
                self.layout, mask_of(mask.kind, self.batch.lengths, self._rows.image)
            )
        mask.shares[heads] = share_of(plan, cp.group, cp.kernel, mask.kind, cp.agreed)

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run `loss.backward()`, scaled so that gradients come out as sums over ranks.

        DDP and FSDP2 average gradients over their ranks; the loss is multiplied by that number. Without a wrapper, gradients
        are this rank's part, and the caller sums them over the ranks. `loss` is a rank's share, or equal on all ranks if
        computed from `unshard`.
        """
        (loss * averaging_ranks(self._model, self.shards.cp)).backward(**options)

    def unshard(self, x: Tensor, dim: int = 1, positions: Iterable[int] | None = None) -> Tensor:
        """Gather the global tensor, or its rows at global `positions`, on every rank. Collective, differentiable.

        The token axis is that of `batch`: the documents one after the other, without padding. Compute the same loss from the
        result on every rank: each rank keeps its own part of the gradient.
        """
        return self.shards.unshard(x, dim, positions)

    def to_rows(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """Gather one value per token, (1, T), and return it in the batch's own shape (B, S), with `fill` at padding.

        Values are as the model gives them: that of a token predicts the next one.
        """
        whole = self.unshard(values)
        return to_padded(whole, self._rows.real, fill)


def count_targets(batches: Iterable[Batch | Mapping[str, Any]], group: Group = None) -> int:
    """Count the targets of the micro-batches of one optimizer step over the ranks of the data-parallel `group`. Collective.

    `batches`: the batches that this rank will pass to `sequence`. `group`: the data-parallel ranks, one for each CP group;
    default: this rank alone.
    """
    count = torch.tensor([sum(rows_of(batch).batch.num_targets for batch in batches)])
    return int(stack(count, as_group(group)).sum())


def _stated(shards: Shards) -> list[_Call]:
    """Return the calls that the model's configuration states."""
    heads = shards.cp.planner.heads
    return [(kind, *heads) for kind in shards.plans] if heads is not None else []


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _check_model(model: Any) -> None:
    config = getattr(model, "config", None)
    if config is None:
        raise SpecError(
            f"{type(model).__name__} is not a model of transformers: it has no config",
            hint="for a model of your own, call seq.attention of ContextParallel.sequence in its layers",
        )
    given = config.get_text_config()._attn_implementation
    if given != interface.NAME:
        raise SpecError(
            f"{type(model).__name__} was built with attn_implementation={given!r}",
            hint='call model.set_attn_implementation("longspan"), or from_pretrained(..., attn_implementation="longspan")',
        )


def _check_keywords(model: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
    """Raise `SpecError` if a call within a sequence is given what would be counted on this rank's tokens alone."""
    sequence = interface.open_sequence()
    if sequence is None:
        return
    for name, hint in _LOCAL.items():
        value = given.get(name)
        if value is not None and (isinstance(value, Tensor) or value):
            raise SpecError(f"{type(model).__name__} was given {name}= within hf.sequence", hint=hint)
    if args or given.get("input_ids") is not sequence.inputs["input_ids"]:
        raise SpecError(
            f"{type(model).__name__} was given other tokens than those of hf.sequence",
            hint="call model(**seq.inputs): this rank's tokens, with their positions and targets",
        )
    if given.get("labels") is not None and given.get("shift_labels") is not sequence.inputs.get("shift_labels"):
        raise SpecError(
            f"{type(model).__name__} was given labels, which it would shift within this rank's tokens",
            hint="put labels in the batch that hf.sequence takes; they are shifted on the whole row",
        )


_LOCAL = {
    "logits_to_keep": "select logits of any tokens by seq.unshard(out.logits, positions=...)",
    "use_cache": "leave it out: a cache serves generation, which runs outside hf.sequence",
    "past_key_values": "leave it out: a cache serves generation, which runs outside hf.sequence",
    "output_attentions": "leave it out: attention weights are never computed",
}
"""Keyword of a model -> the way out, for what has another meaning on a shard."""


def _options(cp: ContextParallel, model: Any, kinds: dict[str, int], rows: Rows) -> dict[str, Any]:
    """Return the options of a `Planner` that depend on the model: heads, weights of masks, and at least one slot a rank."""
    options: dict[str, Any] = {}
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if isinstance(heads, int) and isinstance(kv_heads, int):
        options["heads"] = (heads, kv_heads)  # as stated: calls with other numbers get plans of their own
    if cp.planner.layout == BALANCED:
        options["layers"] = kinds
    if rows.batch.seq_len < cp.size and cp.planner.pad_to_multiple_of is None:
        options["pad_to_multiple_of"] = 1  # models reshape by -1, which no tokens leave open
    return options
