"""Training steps on one process in plain torch, sharing nothing with longspan but the first weights.

Each document runs alone through a decoder written as a function of its weights: positions, labels, masks, rotation (complex
numbers), loss, clipping and schedule are written anew here.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from longspan.model import ModelConfig
from longspan.train.config import TrainConfig
from longspan.train.model import make_model
from tests.train.tiny import Document

Tensor = torch.Tensor
Weights = dict[str, Tensor]


class History(NamedTuple):
    """Loss and gradient norm (before clipping) of each step, the first step's gradients, the weights after the last."""

    losses: list[float]
    norms: list[float]
    gradients: Weights
    weights: Weights


def train(config: TrainConfig, steps: list[list[list[Document]]]) -> History:
    """One optimizer step for each list of rows, on the mean over all their targets."""
    assert config.model is not None, "the tests give the shape of the model"
    weights = {name: w.detach().clone().requires_grad_() for name, w in make_model(config).state_dict().items()}
    optim = config.optim
    matrices, vectors = ([w for w in weights.values() if (w.ndim > 1) is big] for big in (True, False))
    groups = [{"params": matrices, "weight_decay": optim.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, betas=optim.betas, eps=optim.eps)
    losses, norms, first = [], [], {}
    for index, rows in enumerate(steps):
        adam.zero_grad()
        documents = [document for row in rows for document in row]
        targets = sum(sum(wanted[1:]) for _, wanted in documents)
        loss = torch.stack([loss_sum(weights, config.model, document) for document in documents]).sum() / targets
        loss.backward()
        if index == 0:
            first = {name: w.grad.clone() for name, w in weights.items()}
        norms.append(float(torch.nn.utils.clip_grad_norm_(weights.values(), optim.clip_norm or math.inf)))
        for group in adam.param_groups:
            group["lr"] = rate(config, index)
        adam.step()
        losses.append(float(loss.detach()))
    return History(losses, norms, first, {name: w.detach() for name, w in weights.items()})


def loss_sum(weights: Weights, model: ModelConfig, document: Document) -> Tensor:
    """Sum of the cross-entropy of a document's wanted tokens, each predicted from those before it."""
    ids, wanted = (torch.tensor(values) for values in document)
    x = weights["embed_tokens.weight"][ids]
    for layer in range(model.num_layers):
        window = model.windows[layer] if model.windows else None
        x = _block(x, {n.removeprefix(f"layers.{layer}."): w for n, w in weights.items()}, model, window)
    x = _norm(x, weights["norm.weight"], model)
    logits = x @ weights.get("lm_head.weight", weights["embed_tokens.weight"]).T
    losses = F.cross_entropy(logits[:-1], ids[1:], reduction="none")
    return (losses * wanted[1:]).sum()


def rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up, then half a cosine."""
    optim = config.optim
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    share = (step - optim.warmup_steps) / (config.steps - optim.warmup_steps)
    low = optim.min_lr_ratio * optim.lr
    return low + (optim.lr - low) * 0.5 * (1 + math.cos(math.pi * share))


def _block(x: Tensor, w: dict[str, Any], model: ModelConfig, window: int | None) -> Tensor:
    n = x.shape[0]
    h = _norm(x, w["input_layernorm.weight"], model)
    q, k, v = ((h @ w[f"self_attn.{name}_proj.weight"].T).view(n, -1, model.head_dim).transpose(0, 1) for name in "qkv")
    if model.qk_norm:
        q, k = _norm(q, w["self_attn.q_norm.weight"], model), _norm(k, w["self_attn.k_norm.weight"], model)
    q, k = _rotate(q, model), _rotate(k, model)
    away = torch.arange(n)[:, None] - torch.arange(n)
    visible = (away >= 0) & (away < (n if window is None else window))
    k, v = (t.repeat_interleave(model.num_heads // model.num_kv_heads, 0) for t in (k, v))
    out = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=visible)[0]
    x = x + out.transpose(0, 1).reshape(n, -1) @ w["self_attn.o_proj.weight"].T
    h = _norm(x, w["post_attention_layernorm.weight"], model)
    gated = F.silu(h @ w["mlp.gate_proj.weight"].T) * (h @ w["mlp.up_proj.weight"].T)
    return x + gated @ w["mlp.down_proj.weight"].T


def _norm(x: Tensor, weight: Tensor, model: ModelConfig) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + model.norm_eps).rsqrt() * weight


def _rotate(x: Tensor, model: ModelConfig) -> Tensor:
    """Dim `d` and dim `d + D/2` are one complex number, turned by `position * theta ** (-2 d / D)`."""
    half = model.head_dim // 2
    turns = torch.arange(x.shape[1])[:, None] * model.rope_theta ** (-torch.arange(half).double() / half)
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(turns), turns).to(
        x.dtype.to_complex()
    )
    return torch.cat((z.real, z.imag), -1)
