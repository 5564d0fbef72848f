"""The CP=1 side for a model of transformers: the model as its users run it, with SDPA or eager attention, one document at a time.

This module imports nothing of plan/ or cp/ (enforced by import-linter).
"""

import copy
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from longspan.data import Batch
from longspan.model.transformers_config import TransformersConfig
from longspan.model.transformers_model import to_dtype
from longspan.names import DTYPES, ROUTER_LOSS


def backward_by_document(
    model: Any, batch: Batch, shape: TransformersConfig, dtype: str, factor: float, balance: float
) -> float:
    """Accumulate the gradients of `factor` times a row's loss sum plus `balance` times its router loss, and return the loss sum.

    In bf16 and fp16, a copy of the model in that dtype computes. The copy's gradients are added to the fp32 weights'.
    """
    mixed = DTYPES[dtype].mixed
    low = to_dtype(copy.deepcopy(model), getattr(torch, DTYPES[dtype].torch_name)) if mixed else model
    loss, router_loss = losses(low, batch, shape)
    (loss * factor + router_loss * balance).backward()
    for wide, narrow in zip(model.parameters(), low.parameters(), strict=True) if mixed else ():
        if narrow.grad is not None:
            wide.grad = narrow.grad.float() + (0 if wide.grad is None else wide.grad)
    return float(loss.detach())


def losses(model: Any, batch: Batch, shape: TransformersConfig) -> tuple[Tensor, Tensor | float]:
    """Return (sum of token losses of a row, its router loss times coefficient and tokens)."""
    device = next(model.parameters()).device
    sums, routed = [], []
    for ids, positions, labels in _documents(batch):
        out = model(
            input_ids=ids.to(device), position_ids=positions.to(device), labels=labels.to(device),
            shift_labels=labels.to(device), num_items_in_batch=torch.ones((), device=device), use_cache=False,
        )  # fmt: skip
        sums.append(out.loss)
        if shape.router_loss:
            routed.append(out.router_logits)
    total: Tensor = sum(sums[1:], start=sums[0])
    if not routed:
        return total, 0.0
    of_layers = tuple(torch.cat(layer) for layer in zip(*routed, strict=True))
    compute = getattr(sys.modules[type(model).__module__], ROUTER_LOSS)
    router_loss = compute(of_layers, of_layers[0].shape[-1], shape.text.num_experts_per_tok)
    return total, router_loss * (shape.router_loss * batch.seq_len)


def _documents(batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield (ids, positions, labels), each (1, n), of every document that has tokens."""
    whole = batch.tensors()
    parts = (whole[name].split(list(batch.lengths), dim=1) for name in ("input_ids", "position_ids", "labels"))
    for document in zip(*parts, strict=True):
        if document[0].numel():
            yield document
