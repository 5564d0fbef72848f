"""Expected memory of a run of a model of transformers.

Weights, gradients and moments are exact: the parameters are those of the model on the meta device. Activations are what autograd
keeps in a forward on the meta device, which costs no memory; they are unknown for a model that reads values of tensors.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from longspan.advise.memory import Budget, StageBudget, attention_budget, shard_elements
from longspan.advise.run_shape import RunShape
from longspan.model.transformers_config import TransformersConfig
from longspan.model.transformers_model import blocks_of, build_empty
from longspan.train.axes import run_shape
from longspan.train.model import TORCH_DTYPES, weights_dtype
from longspan.train.train_config import TrainConfig

_SIZES = "longspan_sizes"
"""Name under which an attention that computes nothing is registered in transformers."""


@dataclass(frozen=True)
class _Kept:
    """Bytes that autograd keeps of a micro-batch."""

    block: int
    """Of the layer that keeps most."""
    blocks: int
    """Of all layers."""
    outside: int
    """Of embedding, final norm, logits and loss."""
    inputs: int
    """Of the inputs of all layers, which recomputation keeps."""
    slots: int
    """Tokens of the micro-batch on a rank."""

    def of(self, run: RunShape, config: TrainConfig) -> int:
        """Return the bytes of all layers that are held at once, by `config.recompute`."""
        if config.recompute == "none":
            return self.blocks
        # "block" also keeps the output and the log-sum-exp of attention.
        row = run.model.num_heads * (run.model.head_dim * run.itemsize + max(4, run.itemsize))
        attended = self.slots * row * run.model.num_layers if config.recompute == "block" else 0
        return self.inputs + self.block + attended


def transformers_budget(config: TrainConfig, model: TransformersConfig, device_type: str) -> Budget:
    """Return the expected memory of each rank at the longest row. Raises `SpecError` for a run that cannot be planned."""
    run = run_shape(config, model, device_type)
    layout, plans = run.longest_plans
    empty = build_empty(model, dtype=weights_dtype(config))
    slots = len(layout.positions(0))
    return Budget(
        topology=run.topology,
        global_batch=run.topology.global_batch(run.micro_batch_size, run.gradient_accumulation_steps),
        seq_len=run.seq_len,
        num_parameters=sum(p.numel() for p in empty.parameters()),
        micro_batches=run.gradient_accumulation_steps,
        slots=slots,
        tokens=max(int((layout.positions(rank) >= 0).sum()) for rank in range(layout.ranks)),
        block=0 if (kept := _kept(config, model, slots)) is None else kept.block,
        attention=tuple(attention_budget(run, layout, name, plan) for name, plan in plans.items()),
        stages=(_stage(run, config, empty, kept),),
    )


def _stage(run: RunShape, config: TrainConfig, empty: nn.Module, kept: _Kept | None) -> StageBudget:
    sharded, wide, narrow = run.wrapper == "fsdp", run.wide_itemsize, run.itemsize
    ranks = run.topology.dp // run.topology.dp_replicate * run.topology.cp
    whole = {id(p): p.numel() for p in empty.parameters()}
    elements = sum(shard_elements(tuple(p.shape), ranks, 0) if sharded else p.numel() for p in empty.parameters())
    blocks = [sum(p.numel() for p in block.parameters()) for block in blocks_of(empty)]
    ends = sum(whole.values()) - sum(blocks)
    gathered = (ends + sum(sorted(blocks)[-2:])) * narrow if sharded else 0
    summed = run.gradient_accumulation_steps > 1 and run.defer_reduction
    unreduced = sum(whole.values()) * wide if summed or not sharded else (ends + max(blocks, default=0)) * narrow
    return StageBudget(
        pp_rank=0,
        first_rank=0,
        layers=tuple(range(run.model.num_layers)),
        num_parameters=elements,
        parameters=elements * wide,
        gradients=elements * wide,
        moments=2 * elements * wide,
        gathered=gathered,
        unreduced=unreduced,
        in_flight=1,
        activations=None if kept is None else kept.of(run, config),
        head=0 if kept is None else kept.outside,
    )


def _kept(config: TrainConfig, model: TransformersConfig, slots: int) -> _Kept | None:
    """Run a micro-batch of `slots` tokens on the meta device, and return what autograd keeps; None if the model cannot run so."""
    empty: Any = build_empty(model, dtype=TORCH_DTYPES[config.dtype])
    owned = {_storage(p)[0] for p in (*empty.parameters(), *empty.buffers())}
    by_block: dict[int | None, dict[int, int]] = {None: {}}
    inputs = 0
    inside: list[int | None] = [None]

    def enter(index: int) -> Any:
        def note(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            nonlocal inputs
            inside.append(index)
            inputs += next(x.nbytes for x in (*arguments, *keywords.values()) if isinstance(x, Tensor))

        return note

    def leave(*_: Any) -> None:
        inside.pop()

    def keep(x: Tensor) -> Tensor:
        place, size = _storage(x)
        if place not in owned:
            by_block.setdefault(inside[-1], {})[place] = size
        return x

    for index, block in enumerate(blocks_of(empty)):
        block.register_forward_pre_hook(enter(index), with_kwargs=True)
        block.register_forward_hook(leave)
    ids = torch.zeros(1, slots, dtype=torch.int64, device="meta")
    with _attention_of_no_work(empty), saved_tensors_hooks(keep, lambda x: x):
        try:
            empty(
                input_ids=ids, position_ids=ids, attention_mask=ids, labels=ids, shift_labels=ids, use_cache=False,
                num_items_in_batch=torch.ones((), device="meta"),
            )  # fmt: skip
        except Exception:  # whatever a model raises that reads values
            return None
    outside = sum(by_block.pop(None).values())
    sizes = [sum(parts.values()) for parts in by_block.values()] or [0]
    return _Kept(max(sizes), sum(sizes), outside, inputs, slots)


def _storage(x: Tensor) -> tuple[int, int]:
    storage = x.untyped_storage()
    return storage._cdata, storage.nbytes()


@contextmanager
def _attention_of_no_work(model: Any) -> Iterator[None]:
    """Let the model attend by a function that keeps what longspan's attention keeps, and computes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **_: Any) -> tuple[Tensor, None]:
        out: Tensor = _KeepsInputs.apply(q, k, v)  # type: ignore[no-untyped-call]
        return out.transpose(1, 2), None

    AttentionInterface.register(_SIZES, attend)
    AttentionMaskInterface.register(_SIZES, lambda **_: None)
    model.set_attn_implementation(_SIZES)
    try:
        yield
    finally:
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(_SIZES, None)


class _KeepsInputs(torch.autograd.Function):
    """Attention on the meta device: q (B, H, T, D), k (B, K, T, D), v (B, K, T, Dv) -> (B, H, T, Dv)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise AssertionError("nothing runs backward on the meta device")
