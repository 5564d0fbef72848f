"""A mixture of experts written out token by token, by matrices and definitions alone: the right values of test_experts."""

from typing import NamedTuple

import torch
from torch import Tensor

from longspan.model import ModelConfig

from .reference import make_config

E, X, F, SHARED = 16, 8, 12, 10
NEVER = 5
"""An expert that no token ever chooses."""
DOCUMENTS = (5, 11, 8)
N = sum(DOCUMENTS)


def moe_config(*, shared: int = SHARED, top_k: int = 2, **changes) -> ModelConfig:
    experts = {"num_experts": X, "top_k": top_k, "intermediate_size": F, "shared_intermediate_size": shared} | changes
    return make_config(hidden_size=E, num_heads=2, num_kv_heads=1, intermediate_size=None, experts=experts)


class Inputs(NamedTuple):
    """x and probe (N, E), whose product is summed for a loss; weights by name; each token's document."""

    x: Tensor
    probe: Tensor
    weights: dict[str, Tensor]
    document: Tensor


def make_inputs(dtype: torch.dtype = torch.float64) -> Inputs:
    """The same in every process, rounded to `dtype` and held in fp64."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x, gate = draw(N, E), draw(X, E) / 2
    x[:, 0] = x[:, 0].abs() + 1
    gate[NEVER, 0] = -30.0
    weights = {
        "gate": gate,
        "gate_up": draw(X, 2 * F, E) / 4,
        "down": draw(X, E, F) / 4,
        "shared_gate": draw(SHARED, E) / 4,
        "shared_up": draw(SHARED, E) / 4,
        "shared_down": draw(E, SHARED) / 4,
    }
    document = torch.repeat_interleave(torch.arange(len(DOCUMENTS)), torch.tensor(DOCUMENTS))
    x, probe = x.to(dtype).double(), draw(N, E).to(dtype).double()
    return Inputs(x, probe, {name: w.to(dtype).double() for name, w in weights.items()}, document)


class Answer(NamedTuple):
    out: Tensor
    balance_sum: float
    """S: the sum over units of their tokens times their auxiliary loss."""
    grads: dict[str, Tensor]
    """Of x and every weight."""


def answer(inputs: Inputs, config: ModelConfig, *, scale: float, probed: bool = True) -> Answer:
    """`sum(out * probe) + balance * scale * S` and its gradients by autograd; without the first term if not `probed`."""
    experts = config.experts
    assert experts is not None
    leaves = {"x": inputs.x, **inputs.weights}
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in leaves.items()}
    x = leaves["x"]
    probabilities, chosen, rows = [], [], []
    for t in range(N):
        logits = torch.stack([leaves["gate"][e] @ x[t] for e in range(X)])
        p = logits.exp() / logits.exp().sum()
        best = (-p.detach()).argsort(stable=True)[: experts.top_k].tolist()
        total = sum(p[e] for e in best) if experts.normalise else 1.0
        y = sum(p[e] / total * expert(x[t], leaves["gate_up"][e], leaves["down"][e]) for e in best)
        if experts.shared_intermediate_size:
            gate_up = torch.cat([leaves["shared_gate"], leaves["shared_up"]])
            y = y + expert(x[t], gate_up, leaves["shared_down"])
        probabilities.append(p)
        chosen.append(best)
        rows.append(y)
    out = torch.stack(rows)
    unit = inputs.document.tolist() if experts.balance_over == "document" else [0] * N
    total = torch.zeros((), dtype=torch.float64)
    for u in sorted(set(unit)):
        tokens = [t for t in range(N) if unit[t] == u]
        auxiliary = 0.0
        for e in range(X):
            f = sum(chosen[t].count(e) for t in tokens) / (len(tokens) * experts.top_k)
            auxiliary = auxiliary + X * f * sum(probabilities[t][e] for t in tokens) / len(tokens)
        total = total + len(tokens) * auxiliary
    loss = (out * inputs.probe).sum() * float(probed) + experts.balance * scale * total
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    zeros = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves.values(), grads, strict=True)]
    return Answer(out.detach(), float(total.detach()), dict(zip(leaves, zeros, strict=True)))


def expert(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    a, b = gate_up[: len(gate_up) // 2] @ x, gate_up[len(gate_up) // 2 :] @ x
    return down @ (a / (1 + (-a).exp()) * b)
