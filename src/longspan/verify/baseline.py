"""The CP=1 side: the same steps on one process, with plain SDPA per document on the unsharded batch.

This module imports nothing of plan/ or cp/ (enforced by import-linter), so that a fault there affects one side only.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from longspan.comm.devices import device_type
from longspan.data import Batch, open_store
from longspan.model import Decoder, Routing, TransformersConfig
from longspan.names import DTYPES, window_of
from longspan.train.model import TORCH_DTYPES, make_model, make_transformers
from longspan.train.optim import LossScale, learning_rate, make_optimizer, update
from longspan.train.run_loader import make_loader
from longspan.train.train_config import TrainConfig, model_config
from longspan.verify.evidence import Evidence, digest_inputs, input_rows
from longspan.verify.transformers_baseline import backward_by_document

Tensor = torch.Tensor

BLOCK = 512
"""Queries per masked SDPA call; fewer if heads x queries x keys would exceed `SCORES`."""
SCORES = 2**28


def run_baseline(config: TrainConfig, steps: int, gradients: Path) -> Evidence:
    """Replay `steps` steps of a run on this process, and write the first step's gradients to a safetensors file.

    The rows of all data-parallel ranks and micro-batches of a step run one after another, on the device of the run.
    """
    torch.set_num_threads(config.parallel.threads or os.cpu_count() or 1)
    device = torch.device(device_type(config.parallel.device))
    loader = make_loader(config, open_store(config.data), dp_rank=0, dp_size=1)
    model, backward = _side(config, device)
    optimizer = make_optimizer(model, config.optim)
    scale = LossScale.of_dtype(config.dtype)
    losses, norms, inputs = [], [], []
    for step in range(steps):
        batches = [next(loader) for _ in range(config.gradient_accumulation_steps * (config.parallel.dp or 1))]
        targets = max(sum(batch.num_targets for batch in batches), 1)
        optimizer.zero_grad()
        factors = scale.value / targets, scale.value / sum(batch.seq_len for batch in batches)
        loss = sum(backward(batch, *factors) for batch in batches)
        if step == 0:
            named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            Evidence.write_gradients(gradients, {name: grad / scale.value for name, grad in named.items()})
        rate = learning_rate(config.optim, step, config.steps)
        norms.append(update([optimizer], model.parameters(), scale, rate, config.optim.clip_norm))
        losses.append(loss / targets)
        given = [batch.tensors() for batch in batches]
        inputs.append(digest_inputs(input_rows(x["input_ids"], x["position_ids"], x["labels"]) for x in given))
    return Evidence(losses, norms, inputs, gradients)


def _side(config: TrainConfig, device: torch.device) -> tuple[nn.Module, Callable[[Batch, float, float], float]]:
    """Return (the model of the run, what accumulates the gradients of a row in it)."""
    shape = model_config(config)
    if isinstance(shape, TransformersConfig):
        model = make_transformers(config, shape).to(device)
        return model, lambda batch, *factors: backward_by_document(model, batch, shape, config.dtype, *factors)
    decoder = make_model(config, device)
    return decoder, lambda batch, *factors: _backward(decoder, batch, config, *factors)


def _backward(model: Decoder, batch: Batch, config: TrainConfig, factor: float, balance: float) -> float:
    """Accumulate the gradients of `factor` times a row's loss sum plus `balance` times the row's balance loss, and return the
    loss sum.

    In bf16 and fp16, a copy of the model in that dtype computes. The copy's gradients are added to the fp32 weights'.
    """
    dtype, comm_dtype = config.dtype, config.parallel.comm_dtype
    if not DTYPES[dtype].mixed:
        loss = loss_sum(model, batch, comm_dtype, balance)
        (loss * factor).backward()
        return float(loss.detach())
    with torch.device(torch.device(device_type(config.parallel.device))):
        low = Decoder(model.config, dropout=model.dropout, seed=model.seed).to(TORCH_DTYPES[dtype])
    low.load_state_dict(model.state_dict())
    loss = loss_sum(low, batch, comm_dtype, balance)
    (loss * factor).backward()
    for wide, narrow in zip(model.parameters(), low.parameters(), strict=True):
        if narrow.grad is not None:
            wide.grad = narrow.grad.float() + (0 if wide.grad is None else wide.grad)
    return float(loss.detach())


def loss_sum(model: Decoder, batch: Batch, comm_dtype: str | None = None, balance: float = 0.0) -> Tensor:
    """Return the loss sum of an unsharded row, with plain SDPA in each document. Keys and values are rounded to `comm_dtype`.
    Backward adds `balance` times the gradient of the experts' balance loss."""
    device = next(model.parameters()).device
    tensors = {name: x.to(device) for name, x in batch.tensors().items()}

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: str) -> Tensor:
        k, v = rounded(k, comm_dtype), rounded(v, comm_dtype)
        return attend_documents(q, k, v, batch.lengths, mask, batch.parents)

    numbers = None if batch.numbers is None else torch.from_numpy(batch.numbers.copy())[None].to(device)
    loss: Tensor = model(
        tensors["input_ids"], tensors["position_ids"], attend, labels=tensors["labels"], tokens=numbers,
        routing=_routing(model, batch, balance, device),
    )  # fmt: skip
    return loss


def _routing(model: Decoder, batch: Batch, scale: float, device: torch.device) -> Routing | None:
    """Return the routing of an unsharded row: no padding slots, and no group."""
    experts = model.config.experts
    if experts is None:
        return None
    lengths = torch.tensor(batch.lengths if experts.balance_over == "document" else [batch.seq_len], device=device)
    unit = torch.arange(len(lengths), device=device).repeat_interleave(lengths, output_size=batch.seq_len)[None]
    return Routing(torch.ones_like(unit, dtype=torch.bool), unit, lengths, None, scale)


def attend_documents(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], mask: str, parents: Sequence[int] = ()
) -> Tensor:
    """Run causal SDPA in each document, q `(B, H, S, D)`, k and v `(B, K, S, D)`. Mask "window-w" keeps the last `w` keys.

    A document with a parent is appended to its parent, and only the document's own output is kept.
    """
    window = window_of(mask)
    documents = list(zip(*(x.split(list(lengths), dim=2) for x in (q, k, v)), strict=True))
    outs = []
    for document, own, parent in zip(documents, lengths, parents or [-1] * len(lengths), strict=True):
        if own == 0:
            continue
        if parent >= 0:
            document = tuple(torch.cat(parts, dim=2) for parts in zip(documents[parent], document, strict=True))
        q_doc, k_doc, v_doc = document
        if window is None and one_call(q):
            out = F.scaled_dot_product_attention(q_doc, k_doc, v_doc, is_causal=True, enable_gqa=True)
            outs.append(out[:, :, -own:])
        else:
            outs.extend(attend_blocks(q_doc[:, :, -own:], k_doc, v_doc, window or k_doc.shape[2]))
    return torch.cat(outs, dim=2)


def one_call(q: Tensor) -> bool:
    """Whether a causal SDPA call avoids the full score matrix. On CUDA no such kernel takes fp32 with GQA, or fp64."""
    return q.device.type == "cpu" or q.dtype.itemsize == 2


def attend_blocks(q: Tensor, k: Tensor, v: Tensor, window: int) -> Iterator[Tensor]:
    """Yield SDPA of q `(B, H, n, D)`, the last n positions of k and v `(B, K, S, D)`, in blocks of queries with visible keys.

    A block of b queries has a mask of b x (b + window - 1). Scores are recomputed in backward, so that only one block's
    scores exist at a time.
    """
    num_q, num_k = q.shape[2], k.shape[2]
    block = max(1, min(BLOCK, SCORES // (q.shape[1] * min(num_k, BLOCK + window))))
    for start in range(num_k - num_q, num_k, block):
        first, stop = max(0, start - window + 1), min(start + block, num_k)
        away = torch.arange(start, stop, device=q.device)[:, None] - torch.arange(first, stop, device=q.device)
        rows = slice(start - num_k + num_q, stop - num_k + num_q)
        yield checkpoint(
            F.scaled_dot_product_attention, q[:, :, rows], k[:, :, first:stop], v[:, :, first:stop],
            attn_mask=(away >= 0) & (away < window), enable_gqa=True, use_reentrant=False, preserve_rng_state=False,
        )  # fmt: skip


def rounded(x: Tensor, comm_dtype: str | None) -> Tensor:
    """Round `x (B, K, S, D)` to bf16, or to fp8 (e4m3) with one power-of-two scale per 32 elements of a row. The scale
    brings the maximum of the elements to 256 or more. The gradient is straight-through."""
    if comm_dtype is None:
        return x
    with torch.no_grad():
        if comm_dtype == "bf16":
            near = x.to(torch.bfloat16).to(x.dtype)
        else:
            blocks = F.pad(x, (0, -x.shape[3] % 32)).unflatten(3, (-1, 32)).float()
            largest = blocks.abs().amax(4, keepdim=True).clamp(min=2.0**-118)
            power = torch.exp2(largest.log2().floor() - 8)
            near = ((blocks / power).clamp(-448, 448).to(torch.float8_e4m3fn).float() * power).flatten(3)
            near = near[..., : x.shape[3]].to(x.dtype)
    return x + (near - x).detach()
