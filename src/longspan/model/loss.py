"""Cross-entropy summed over tokens in chunks, so that the logits of a complete shard never exist at once.
Also computes the factor that turns local sums into the mean over the global batch."""

import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from longspan.comm.gather import stack
from longspan.errors import SpecError
from longspan.model.chunks import loss_chunk
from longspan.names import IGNORED


@dataclass(frozen=True)
class VocabShard:
    """This rank's rows of a vocab-parallel head: `start` is the first of them, `size` the rows on all ranks of `group`."""

    start: int
    size: int
    group: dist.ProcessGroup


def token_loss_sum(
    hidden: Tensor,
    labels: Tensor,
    weight: Tensor,
    *,
    chunk_tokens: int | None = None,
    vocab: VocabShard | None = None,
) -> Tensor:
    """Return the cross-entropy summed over labels other than -100, a scalar in fp32 (fp64 for fp64).

    hidden (B, T, E) or (T, E) and the head's weight (V, E) share a dtype. labels, int64, have the shape of `hidden` without
    its last dim and are already shifted. Logits `hidden @ weight.T` are computed for `chunk_tokens` at a time (default: see
    `logits_bytes`) and recomputed in backward. The gradient of `weight` is accumulated over chunks in fp32 (fp64 for fp64)
    and rounded once, so that its error does not grow with the sequence length.

    Without a valid label, or without a token, the loss is exactly 0 with zero gradients, still attached to the graph, so that a
    rank without targets takes part in every collective of backward.

    vocab: `weight` (V_local, E) is this rank's part of the head; parts may differ in size or be empty, and V is `vocab.size`.
    Collective: all ranks of the group pass the same `hidden` and `labels` (global ids) and get the same sum. One all-gather
    of 2 numbers per token combines the parts; logits are not communicated. The gradient of `hidden` is this rank's
    contribution only, and the caller sums it over the group. The gradient of `weight` is complete.

    Raises SpecError: shapes or dtypes that do not match; a label outside [0, V) other than -100, checked only in eager code
    on the CPU, to avoid a device sync.
    """
    _check(hidden, labels, weight, chunk_tokens, vocab)
    if chunk_tokens is None:
        chunk_tokens = loss_chunk(weight.device.type, weight.shape[0])
    rows = hidden.reshape(-1, hidden.shape[-1])
    start, group = (0, None) if vocab is None else (vocab.start, vocab.group)
    loss: Tensor = _TokenLossSum.apply(rows, labels.reshape(-1), weight, chunk_tokens, start, group)  # type: ignore[no-untyped-call]
    return loss


def count_targets(labels: Tensor) -> int:
    """Return the number of labels that are not -100. Syncs with the device of `labels`."""
    return int((labels != IGNORED).sum())


def mean_loss_scale(num_targets_global: int, group_size: int) -> float:
    """Return the factor of a rank's loss sum before `backward`: `group_size / num_targets_global`.

    `num_targets_global` counts the valid labels of the global batch: all ranks, all accumulated micro-batches.
    FSDP2 and DDP divide summed gradients by `group_size`, the number of ranks. The factor cancels this division:

        mean over ranks of (local_sum * group_size / num_targets_global) = global_sum / num_targets_global

    With a wrapper that sums gradients, `group_size` is 1. The loss to log is the sum over ranks of
    `local_sum / num_targets_global`.

    For a batch without any target, warns and returns 0.0: loss and gradients are 0, never NaN. Raises SpecError: a negative
    `num_targets_global`, or `group_size` below 1.
    """
    if num_targets_global < 0 or group_size < 1:
        raise SpecError(
            f"num_targets_global {num_targets_global} must be at least 0 and group_size {group_size} at least 1",
            hint="group_size is the number of ranks whose gradients are averaged; 1 if they are summed",
        )
    if num_targets_global == 0:
        warnings.warn("every label of the global batch is ignored: loss and gradients are 0", stacklevel=2)
        return 0.0
    return group_size / num_targets_global


class _TokenLossSum(torch.autograd.Function):
    """One pass over chunks in each direction. Autograd over checkpointed chunks would sum a bf16 weight's gradient in bf16."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        labels: Tensor,
        weight: Tensor,
        chunk_tokens: int,
        start: int,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        num_tokens, num_rows = hidden.shape[0], weight.shape[0]
        # For this part of the vocabulary: the logsumexp, and the label's logit (0 if another part holds the label).
        part = torch.zeros(2, num_tokens, dtype=_wide(hidden), device=hidden.device)
        index, here = _columns(labels, start, num_rows)
        for rows in _chunks(num_tokens, chunk_tokens):
            logits = _logits(hidden[rows], weight)
            part[0, rows] = logits.logsumexp(-1)
            if num_rows:
                part[1, rows] = logits.gather(-1, index[rows])[:, 0]
        part[1].masked_fill_(~here, 0.0)
        lses, picked = stack(part, group).unbind(1)
        lse = lses.logsumexp(0)
        ctx.save_for_backward(hidden, labels, weight, lse)
        ctx.chunk_tokens, ctx.start = chunk_tokens, start
        return (lse - picked.sum(0)).masked_fill(labels == IGNORED, 0.0).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, labels, weight, lse = ctx.saved_tensors
        needs_hidden, _, needs_weight, *_ = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=lse.dtype) if needs_weight else None
        index, here = _columns(labels, ctx.start, weight.shape[0])
        one, ignored = -here.to(lse.dtype)[:, None], (labels == IGNORED)[:, None]
        for rows in _chunks(hidden.shape[0], ctx.chunk_tokens):
            h = hidden[rows]
            grad_logits = _logits(h, weight).sub_(lse[rows, None]).exp_()
            if weight.shape[0]:
                grad_logits.scatter_add_(-1, index[rows], one[rows])
            narrow = grad_logits.mul_(grad).masked_fill_(ignored[rows], 0.0).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = narrow @ weight
            if grad_weight is not None:
                grad_weight += narrow.T @ h
        return grad_hidden, None, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def _columns(labels: Tensor, start: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return (columns (N, 1) of labels (N,) in logits (N, num_rows) that start at row `start`, whether a column exists (N,))."""
    index = labels - start
    here = (index >= 0) & (index < num_rows)
    return index.clamp(0, max(0, num_rows - 1))[:, None], here


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Compute logits without autocast, which is on in forward and off in backward: both need the same logits."""
    kind = hidden.device.type
    with torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext():
        return F.linear(hidden, weight).to(_wide(hidden))


def _chunks(num_tokens: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, num_tokens, size)]


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _check(hidden: Tensor, labels: Tensor, weight: Tensor, chunk_tokens: int | None, vocab: VocabShard | None) -> None:
    if labels.shape != hidden.shape[:-1]:
        raise SpecError(
            f"labels {tuple(labels.shape)} do not match hidden {tuple(hidden.shape)}",
            hint="labels need one entry per token: shift them on the global row, then shard them like the ids",
        )
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1] or weight.dtype != hidden.dtype:
        raise SpecError(
            f"weight {tuple(weight.shape)} {weight.dtype} does not match hidden {tuple(hidden.shape)} {hidden.dtype}",
            hint="the head's weight must be (V, E) in the dtype of hidden",
        )
    if labels.dtype != torch.int64:
        raise SpecError(f"labels are {labels.dtype}", hint="use torch.int64")
    if chunk_tokens is not None and chunk_tokens < 1:
        raise SpecError(
            f"chunk_tokens {chunk_tokens} is below 1",
            hint="leave chunk_tokens out for 64 MiB of logits at a time, 1 GiB on CUDA",
        )
    size = weight.shape[0] if vocab is None else vocab.size
    if vocab is not None and not 0 <= vocab.start <= size - weight.shape[0]:
        raise SpecError(
            f"{weight.shape[0]} rows that start at row {vocab.start} exceed a head of {size} rows",
            hint="set start to this rank's first row in the complete head, and size to the rows of the complete head",
        )
    if labels.device.type == "cpu" and not torch.compiler.is_compiling():
        wrong = labels[(labels != IGNORED) & ((labels < 0) | (labels >= size))]
        if wrong.numel():
            raise SpecError(
                f"label {int(wrong[0])} is outside [0, {size})",
                hint=f"use {IGNORED} for tokens without a target",
            )
