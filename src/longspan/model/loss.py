"""Cross-entropy as a sum over tokens, chunk by chunk: the logits of a whole shard never exist at once.
What turns local sums into the mean over the global batch is here too, so that it is written once."""

import warnings
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan.spec import SpecError

IGNORED = -100
CHUNK_BYTES = 64 * 2**20


def token_loss_sum(hidden: Tensor, labels: Tensor, weight: Tensor, *, chunk_tokens: int | None = None) -> Tensor:
    """Sum of the cross-entropy over the labels that are not -100, as a scalar in fp32 (fp64 for fp64).

    hidden (B, T, E) or (T, E) and the head's weight (V, E) share a dtype; labels, int64, have the shape of `hidden`
    without its last dim and are already shifted. Logits `hidden @ weight.T` are made `chunk_tokens` at a time (default:
    64 MiB of fp32 logits) and made again in backward. The gradient of `weight` is summed over chunks in fp32 (fp64 for
    fp64) and rounded once, so that it does not worsen with the length of the sequence.

    No valid label, or no token at all, gives exactly 0 with zero gradients, still attached to the graph: a rank without
    targets takes part in every collective of backward.

    Raises SpecError for shapes and dtypes that do not fit and, in eager code on the CPU (elsewhere looking would wait
    for the device), for a label outside [0, V) other than -100.
    """
    _check(hidden, labels, weight, chunk_tokens)
    if chunk_tokens is None:
        chunk_tokens = max(1, CHUNK_BYTES // (4 * weight.shape[0]))
    rows = hidden.reshape(-1, hidden.shape[-1])
    loss: Tensor = _TokenLossSum.apply(rows, labels.reshape(-1), weight, chunk_tokens)  # type: ignore[no-untyped-call]
    return loss


def count_targets(labels: Tensor) -> int:
    """Number of labels that are not -100. Waits for the device the labels are on."""
    return int((labels != IGNORED).sum())


def mean_loss_scale(num_targets_global: int, group_size: int) -> float:
    """What to multiply a rank's loss sum by before `backward`: `group_size / num_targets_global`.

    `num_targets_global` counts the valid labels of the whole global batch: all ranks, all accumulated micro-batches.
    Sharding wrappers (FSDP2, DDP) average gradients over their `group_size` ranks; the factor undoes that:

        mean over ranks of (local_sum * group_size / num_targets_global) = global_sum / num_targets_global

    With a wrapper that sums gradients, `group_size` is 1. The loss to log is the sum over ranks of
    `local_sum / num_targets_global`.

    A batch without any target gives 0.0 and a warning: loss and gradients are 0, never NaN.
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
    """One pass over chunks each way. Autograd, over checkpointed chunks, would sum a bf16 weight's gradient in bf16."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, labels: Tensor, weight: Tensor, chunk_tokens: int) -> Tensor:
        dtype = _wide(hidden)
        total = torch.zeros((), dtype=dtype, device=hidden.device)
        lse = torch.empty(hidden.shape[0], dtype=dtype, device=hidden.device)
        for rows in _chunks(hidden.shape[0], chunk_tokens):
            y, logits = labels[rows], _logits(hidden[rows], weight)
            lse[rows] = logits.logsumexp(-1)
            picked = logits.gather(-1, y.clamp_min(0)[:, None])[:, 0]
            total += (lse[rows] - picked).masked_fill(y == IGNORED, 0.0).sum()
        ctx.save_for_backward(hidden, labels, weight, lse)
        ctx.chunk_tokens = chunk_tokens
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        hidden, labels, weight, lse = ctx.saved_tensors
        needs_hidden, _, needs_weight, _ = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=lse.dtype) if needs_weight else None
        for rows in _chunks(hidden.shape[0], ctx.chunk_tokens):
            h, y = hidden[rows], labels[rows, None]
            softmax = _logits(h, weight).sub_(lse[rows, None]).exp_()
            grad_logits = softmax.scatter_add_(-1, y.clamp_min(0), softmax.new_full(y.shape, -1.0))
            narrow = grad_logits.mul_(grad).masked_fill_(y == IGNORED, 0.0).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = narrow @ weight
            if grad_weight is not None:
                grad_weight += narrow.T @ h
        return grad_hidden, None, None if grad_weight is None else grad_weight.to(weight.dtype), None


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Without autocast, which would be on in forward and off in backward: both must see the same logits."""
    kind = hidden.device.type
    with torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext():
        return F.linear(hidden, weight).to(_wide(hidden))


def _chunks(num_tokens: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, num_tokens, size)]


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _check(hidden: Tensor, labels: Tensor, weight: Tensor, chunk_tokens: int | None) -> None:
    if labels.shape != hidden.shape[:-1]:
        raise SpecError(
            f"labels {tuple(labels.shape)} do not fit hidden {tuple(hidden.shape)}",
            hint="labels need one entry per token: shift them on the global row, then shard both in the same way",
        )
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1] or weight.dtype != hidden.dtype:
        raise SpecError(
            f"weight {tuple(weight.shape)} {weight.dtype} does not fit hidden {tuple(hidden.shape)} {hidden.dtype}",
            hint="the head's weight is (V, E) in the dtype of hidden",
        )
    if labels.dtype != torch.int64:
        raise SpecError(f"labels are {labels.dtype}", hint="use torch.int64")
    if chunk_tokens is not None and chunk_tokens < 1:
        raise SpecError(f"chunk_tokens {chunk_tokens} is below 1", hint="leave it out for 64 MiB of logits at a time")
    if labels.device.type == "cpu" and not torch.compiler.is_compiling():
        wrong = labels[(labels != IGNORED) & ((labels < 0) | (labels >= weight.shape[0]))]
        if wrong.numel():
            raise SpecError(
                f"label {int(wrong[0])} is outside [0, {weight.shape[0]})",
                hint=f"use {IGNORED} for tokens without a target",
            )
