"""Untied Ulysses: the whole layer against a dense one, whatever the stages, to the byte."""

import pytest
import torch

from longspan import Layout, Mask, Projections, UpipeAttention, plan_attention, projected_attention, record, shard
from tests.attention.cases import masks_of
from tests.oracle import Inputs, dense_attention, raised, relative_error
from tests.ranks import run_ranks

Tensor = torch.Tensor
E, D = 12, 4


class Layer:
    """Weights of a layer, a learnable scale of q and k heads and a rotation; `bias` or not."""

    def __init__(self, heads: tuple[int, int], bias: bool = False, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        H, K = heads
        sizes = {"q": (H * D, E), "k": (K * D, E), "v": (K * D, E), "o": (E, H * D), "q_bias": (H * D,), "k_bias": (K * D,)}
        sizes |= {"v_bias": (K * D,), "o_bias": (E,), "norm": (D,)}
        drawn = {name: torch.randn(size, generator=generator, dtype=torch.float64) / 2 for name, size in sizes.items()}
        self.weights = {name: w.requires_grad_() for name, w in drawn.items() if bias or not name.endswith("bias")}

    def transform(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x * self.weights["norm"]
        turned = torch.cat((-x[..., D // 2 :], x[..., : D // 2]), -1)
        return x * angles.cos() + turned * angles.sin()

    def projections(self, angles: Tensor) -> Projections:
        maps = {name: w for name, w in self.weights.items() if name != "norm"}
        norm = self.weights["norm"]
        on_heads = lambda x: self.transform(x, angles)  # noqa: E731
        return Projections(**maps, head_dim=D, on_q=on_heads, on_k=on_heads, used=(norm,))

    def dense(self, x: Tensor, dy: Tensor, mask: Mask, angles: Tensor) -> dict[str, Tensor]:
        """Output, d x and the gradient of every weight, with plain autograd round the dense oracle."""
        w = self.weights
        x = x.detach().requires_grad_()

        def project(name: str) -> Tensor:
            return torch.nn.functional.linear(x, w[name], w.get(f"{name}_bias")).unflatten(-1, (-1, D)).transpose(1, 2)

        q, k, v = self.transform(project("q"), angles), self.transform(project("k"), angles), project("v")
        merged = torch.zeros(*x.shape[:2], w["o"].shape[1], dtype=torch.float64).unflatten(-1, (-1, D)).transpose(1, 2)
        out = dense_attention(Inputs(q.detach(), k.detach(), v.detach(), merged), mask).out
        y = torch.nn.functional.linear(out.transpose(1, 2).flatten(2), w["o"], w.get("o_bias"))
        dout = (dy @ w["o"]).unflatten(-1, (-1, D)).transpose(1, 2)
        answer = dense_attention(Inputs(q.detach(), k.detach(), v.detach(), dout.detach()), mask)
        inputs = [x, *(t for name, t in w.items() if not name.startswith("o"))]
        found = torch.autograd.grad([q, k, v], inputs, [answer.dq, answer.dk, answer.dv])
        gradients = dict(zip(["x", *(name for name in w if not name.startswith("o"))], found, strict=True))
        gradients["o"] = torch.einsum("bte,btn->en", dy, out.transpose(1, 2).flatten(2))
        if "o_bias" in w:
            gradients["o_bias"] = dy.sum((0, 1))
        return {"y": y.detach(), **gradients}


def _layer(group, rank, layout, mask, heads, stage, bias, wire_dtype=None):
    layer, B, S = Layer(heads, bias), 2, mask.seq_len
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(B, S, E, generator=generator, dtype=torch.float64) for _ in range(2))
    angles = torch.arange(S, dtype=torch.float64)[None, None, :, None] / 10
    want = layer.dense(x, dy, mask, angles)
    plan = plan_attention(layout, mask, "upipe", heads)
    local = shard(x, layout, rank, 1, fill=0.5).requires_grad_()
    maps = layer.projections(shard(angles, layout, rank, 2))
    with record() as calls:
        y = projected_attention(local, maps, plan=plan, group=group, heads_per_stage=stage)
        # Dead slots have a bias to add and nothing to attend to; nobody asks for their gradient.
        y.backward(shard(dy, layout, rank, 1))
    live = int(layout.counts[rank])
    errors = {
        "y": relative_error(y.detach()[:, :live], shard(want["y"], layout, rank, 1)[:, :live]),
        "x": relative_error(local.grad[:, :live], shard(want["x"], layout, rank, 1)[:, :live]),
    }
    assert max(errors.values()) < 1e-10, (errors, heads, stage, layout.name)
    for call in calls:
        assert call.bytes_sent == plan.bytes(rank, call.phase, D, 8) * B, (call, heads, stage)
        assert call.pairs == plan.area(rank) * (1 if call.phase == "forward" else 2)
    return {name: w.grad for name, w in layer.weights.items()}, want


CASES = [(1, (4, 2), 2), (2, (4, 4), 2), (2, (4, 2), 2), (2, (8, 2), 4), (2, (8, 4), 8), (2, (4, 1), 2), (3, (6, 2), 6), (4, (8, 2), 4)]


@pytest.mark.parametrize(("P", "heads", "stage"), CASES)
def test_layer(P, heads, stage):
    S = 19
    for n, mask in enumerate(masks_of(S)):
        layout = Layout.named(("contiguous", "zigzag", "striped")[n % 3], S, P, (None, S // P + 3)[n % 2])
        by_rank = run_ranks(P, _layer, layout, mask, heads, stage, n % 2 == 1)
        want = by_rank[0][1]
        for name in by_rank[0][0]:
            total = sum(gradients[name] for gradients, _ in by_rank)
            assert relative_error(total, want[name]) < 1e-10, (name, n)
