"""Training steps on one process in plain torch, sharing nothing with longspan but the first weights.

Each document runs alone through a decoder written as a function of its weights: positions, labels, masks, rotation (complex
numbers), loss, clipping and schedule are written anew here.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from longspan.model.model_config import ExpertsConfig, ModelConfig
from longspan.model.philox import keep
from longspan.train.model import make_model
from longspan.train.train_config import TrainConfig
from tests.train.tiny import Document

Tensor = torch.Tensor
Weights = dict[str, Tensor]


class History(NamedTuple):
    """Loss and gradient norm (before clipping) of each step, the first step's gradients, the weights after the last."""

    losses: list[float]
    norms: list[float]
    gradients: Weights
    weights: Weights
    balance: list[float | None]
    evaluated: float


class Drop(NamedTuple):
    """Dropout of the tokens from number `first` of the run on; None in the place of it: none."""

    config: TrainConfig
    first: int

    def __call__(self, x: Tensor, site: int) -> Tensor:
        numbers = torch.arange(self.first, self.first + len(x))
        kept = keep(numbers, x.shape[1], self.config.dropout, seed=self.config.seed, site=site)
        return x * kept / (1 - self.config.dropout)


def train(config: TrainConfig, steps: list[list[list[Document]]], *, dropout: bool = False) -> History:
    """One optimizer step for each list of rows, on the mean over all their targets, and the mean loss of the first rows after.

    With dropout, row `r` of all rows holds the tokens from number `r * seq_len` on.
    """
    assert config.model is not None, "the tests give the shape of the model"
    weights = {name: w.detach().clone().requires_grad_() for name, w in make_model(config).state_dict().items()}
    optim = config.optim
    matrices, vectors = ([w for w in weights.values() if (w.ndim > 1) is big] for big in (True, False))
    groups = [{"params": matrices, "weight_decay": optim.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, betas=optim.betas, eps=optim.eps)
    losses, norms, balance, first = [], [], [], {}
    for index, rows in enumerate(steps):
        adam.zero_grad()
        places = [(index * len(rows) + r) * config.data.seq_len for r in range(len(rows))] if dropout else None
        loss, extra = losses_of(weights, config, rows, places)
        (loss + extra).backward()
        balance.append(float(extra.detach()) if config.model.experts and config.model.experts.balance else None)
        if index == 0:
            first = {name: w.grad.clone() for name, w in weights.items()}
        norms.append(float(torch.nn.utils.clip_grad_norm_(weights.values(), optim.clip_norm or math.inf)))
        for group in adam.param_groups:
            group["lr"] = rate(config, index)
        adam.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        evaluated = float(losses_of(weights, config, steps[0], None)[0])
    return History(losses, norms, first, {name: w.detach() for name, w in weights.items()}, balance, evaluated)


def losses_of(
    weights: Weights, config: TrainConfig, rows: list[list[Document]], places: list[int] | None
) -> tuple[Tensor, Tensor]:
    """Of a global batch: the mean over its targets, and the balance loss of its experts over its tokens.

    `places`: the number of each row's first token in the run, for dropout.
    """
    assert config.model is not None, "the tests give the shape of the model"
    total, extra, targets, tokens = torch.zeros(()).double(), torch.zeros(()).double(), 0, 0
    for r, row in enumerate(rows):
        routed: list[list[Tensor]] = []
        start = 0
        for document in row:
            drop = None if places is None else Drop(config, places[r] + start)
            total = total + loss_sum(weights, config.model, document, drop, routed)
            start += len(document[0])
            targets += sum(document[1][1:])
        tokens += start
        extra = extra + _balance(routed, config.model)
    return total / targets, extra / tokens


def _balance(routed: list[list[Tensor]], model: ModelConfig) -> Tensor:
    """By definition: for each layer and unit `tokens X sum_e f_e P_e`; `routed` holds the probabilities of each document's
    layers."""
    experts = model.experts
    total = torch.zeros(()).double()
    if experts is None:
        return total
    for layers in zip(*routed, strict=True):
        for p in layers if experts.balance_over == "document" else [torch.cat(layers)]:
            chosen = p.topk(experts.top_k, dim=-1).indices.flatten()
            share = torch.bincount(chosen, minlength=experts.num_experts).double() / (experts.top_k * len(p))
            total = total + len(p) * experts.num_experts * (share * p.mean(0)).sum()
    return experts.balance * total


def loss_sum(
    weights: Weights,
    model: ModelConfig,
    document: Document,
    drop: Drop | None = None,
    routed: list[list[Tensor]] | None = None,
) -> Tensor:
    """Sum of the cross-entropy of a document's wanted tokens, each predicted from those before it."""
    ids, wanted = (torch.tensor(values) for values in document)
    x = weights["embed_tokens.weight"][ids]
    probabilities: list[Tensor] = []
    for layer in range(model.num_layers):
        own = {n.removeprefix(f"layers.{layer}."): w for n, w in weights.items()}
        x = _block(x, own, model, layer, drop, probabilities)
    if routed is not None:
        routed.append(probabilities)
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


def _block(
    x: Tensor, w: dict[str, Any], model: ModelConfig, layer: int, drop: Drop | None, probabilities: list[Tensor]
) -> Tensor:
    n = x.shape[0]
    window = model.windows[layer] if model.windows else None
    h = _norm(x, w["input_layernorm.weight"], model)
    q, k, v = ((h @ w[f"self_attn.{name}_proj.weight"].T).view(n, -1, model.head_dim).transpose(0, 1) for name in "qkv")
    if model.qk_norm:
        q, k = _norm(q, w["self_attn.q_norm.weight"], model), _norm(k, w["self_attn.k_norm.weight"], model)
    q, k = _rotate(q, model), _rotate(k, model)
    away = torch.arange(n)[:, None] - torch.arange(n)
    visible = (away >= 0) & (away < (n if window is None else window))
    k, v = (t.repeat_interleave(model.num_heads // model.num_kv_heads, 0) for t in (k, v))
    out = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=visible)[0]
    added = out.transpose(0, 1).reshape(n, -1) @ w["self_attn.o_proj.weight"].T
    x = x + (added if drop is None else drop(added, 2 * layer))
    h = _norm(x, w["post_attention_layernorm.weight"], model)
    if model.experts is None:
        added = _feed(h, w["mlp.gate_proj.weight"], w["mlp.up_proj.weight"], w["mlp.down_proj.weight"])
    else:
        added = _experts(h, w, model.experts, probabilities)
    return x + (added if drop is None else drop(added, 2 * layer + 1))


def _feed(h: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.silu(h @ gate.T) * (h @ up.T)) @ down.T


def _experts(h: Tensor, w: dict[str, Any], experts: ExpertsConfig, probabilities: list[Tensor]) -> Tensor:
    """Every expert on every token, weighted by 0 where it was not chosen."""
    p = (h @ w["mlp.gate.weight"].T).softmax(-1)
    probabilities.append(p)
    best, chosen = p.topk(experts.top_k, dim=-1)
    if experts.normalise:
        best = best / best.sum(-1, keepdim=True)
    weights = torch.zeros_like(p).scatter(1, chosen, best)
    parts = []
    for e in range(experts.num_experts):
        gate, up = w["mlp.experts.gate_up_proj"][e].chunk(2)
        parts.append(weights[:, e, None] * _feed(h, gate, up, w["mlp.experts.down_proj"][e]))
    if experts.shared_intermediate_size:
        parts.append(_feed(h, *(w[f"mlp.shared_expert.{name}_proj.weight"] for name in ("gate", "up", "down"))))
    return torch.stack(parts).sum(0)


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
