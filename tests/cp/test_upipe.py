"""Untied Ulysses: the whole layer against a dense one, whatever the stages, to the byte."""

import pytest
import torch

from longspan import Layout, Mask, Projections, UpipeAttention, plan_attention, projected_attention, record, shard
from tests.cp.cases import masks_of
from tests.oracle import Inputs, dense_attention, raised, relative_error
from tests.plan.strategies import NAMES as LAYOUTS_WITHOUT_MASKS
from tests.ranks import run_ranks

Tensor = torch.Tensor
E, D = 12, 4


class Layer:
    """Weights of a layer, a learnable scale of q and k heads and a rotation; `bias` or not."""

    def __init__(self, heads: tuple[int, int], bias: bool = False, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        H, K = heads
        sizes = {
            "q": (H * D, E),
            "k": (K * D, E),
            "v": (K * D, E),
            "o": (E, H * D),
            "q_bias": (H * D,),
            "k_bias": (K * D,),
        }
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


def _layer(group, rank, layout, mask, heads, stage, bias, comm_dtype=None):
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
        times = 1 if call.phase == "forward" else 2  # backward computes its forward again
        assert (call.pairs, call.blocks) == (plan.area(rank) * times, plan.blocks(rank) * times)
        # The same rows come once, in however many stages their heads do.
        assert call.rows_received == plan.rows_received(rank)
    return {name: w.grad for name, w in layer.weights.items()}, want


CASES = [
    (1, (4, 2), 2),
    (2, (4, 4), 2),
    (2, (4, 2), 2),
    (2, (8, 2), 4),
    (2, (8, 4), 8),
    (2, (4, 1), 2),
    (3, (6, 2), 6),
    (4, (8, 2), 4),
]


@pytest.mark.parametrize(("P", "heads", "stage"), CASES)
def test_layer(P, heads, stage):
    S = 19
    for n, mask in enumerate(masks_of(S)):
        layout = Layout.named(LAYOUTS_WITHOUT_MASKS[n % len(LAYOUTS_WITHOUT_MASKS)], S, P, (None, S // P + 3)[n % 2])
        by_rank = run_ranks(P, _layer, layout, mask, heads, stage, n % 2 == 1)
        want = by_rank[0][1]
        for name in by_rank[0][0]:
            total = sum(gradients[name] for gradients, _ in by_rank)
            assert relative_error(total, want[name]) < 1e-10, (name, n)


def test_layer_of_whole_documents_exchanges_nothing():
    mask, layout = Mask.documents([4, 4, 3, 5]), Layout.contiguous(16, 2)
    assert plan_attention(layout, mask, "upipe", (4, 2)).bytes(0, "backward", D, 8) == 0
    by_rank = run_ranks(2, _layer, layout, mask, (4, 2), 2, True)
    for name, right in ((name, by_rank[0][1][name]) for name in by_rank[0][0]):
        assert relative_error(sum(gradients[name] for gradients, _ in by_rank), right) < 1e-10, name


def _module(group, rank, plan, heads, stages):
    H, K = heads
    torch.manual_seed(0)
    modules = [UpipeAttention(E, H, K, stage, head_dim=D).double() for stage in stages]
    for module in modules[1:]:
        module.load_state_dict(modules[0].state_dict())
    S = plan.seq_len
    x, dy = (torch.randn(1, S, E, dtype=torch.float64) for _ in range(2))
    angles = shard(torch.arange(S, dtype=torch.float64)[None, None, :, None] / 10, plan.layout, rank, 2)
    rotate = lambda heads: heads * angles.cos() + heads.flip(-1) * angles.sin()  # noqa: E731
    found = []
    for module in [*modules, modules[0]]:
        module.zero_grad()
        y = module(shard(x, plan.layout, rank, 1), plan, group, rotate)
        y.backward(shard(dy, plan.layout, rank, 1))
        found.append([y.detach(), *(p.grad.clone() for p in module.parameters())])
    return list(modules[0].state_dict()), found


def test_a_checkpoint_does_not_depend_on_the_stages_and_two_runs_give_the_same_bits():
    plan = plan_attention(Layout.zigzag(18, 2), Mask.causal(18), "upipe", (8, 4))
    for names, found in run_ranks(2, _module, plan, (8, 4), (2, 4, 8)):
        assert names == ["q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"]
        first, *others, again = found
        for other in others:
            assert all(relative_error(a, b) < 1e-12 for a, b in zip(first, other, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def _refusals(group, rank):
    layout, mask = Layout.zigzag(12, 2), Mask.causal(12)
    plan = plan_attention(layout, mask, "upipe", (8, 2))
    maps = Layer((8, 2)).projections(torch.zeros(1, 1, 6, 1, dtype=torch.float64))
    x = torch.zeros(1, 6, E, dtype=torch.float64)
    with record() as calls:
        refused = [
            raised(projected_attention, x, maps, plan=plan, group=group, heads_per_stage=3),
            raised(projected_attention, x, maps, plan=plan, group=group, heads_per_stage=2 + 2 * rank),
            raised(projected_attention, x[:, :5], maps, plan=plan, group=group),
            raised(projected_attention, x.float(), maps, plan=plan, group=group),
            raised(projected_attention, x, maps, plan=plan_attention(layout, mask, "ulysses", (8, 2)), group=group),
        ]
    return refused, len(calls)


def test_what_does_not_fit_is_refused_on_all_ranks_before_anything_moves():
    for rank, (refused, calls) in enumerate(run_ranks(2, _refusals)):
        kinds, texts = zip(*refused, strict=True)
        assert calls == 0
        assert kinds == ("SpecError", "DisagreementError", "SpecError", "SpecError", "SpecError")
        assert texts[0] == (
            "heads_per_stage=3 does not fit 8 query heads (2 KV heads) on 2 ranks: a stage takes equally many heads of each "
            "rank, and from one stage to the next all ranks keep their KV heads or all ranks change them\n\nhint: use 2, 4, 8"
        )
        assert "shapes, types, scales or changes of scores" in texts[1]
        assert f"x (1, 5, 12): rank {rank} of the plan holds 6 of 12 tokens" in texts[2]
        assert ", not (32, 12) torch.float64 on cpu: x is (" in texts[3]
        assert (
            texts[4]
            == "projected_attention was given a plan of route 'ulysses'\n\nhint: make the plan with route=\"upipe\""
        )


def _largest(group, rank, stage):
    """The largest piece of memory that forward and backward ask for, in units of `(T, E)`."""
    S, heads, dim = 4096, (16, 16), 32
    plan = plan_attention(Layout.zigzag(S, 2), Mask.causal(S), "upipe", heads)
    hidden_size, T = heads[0] * dim, S // 2
    module = UpipeAttention(hidden_size, *heads, stage)
    x, dy = (torch.randn(1, T, hidden_size) for _ in range(2))
    x.requires_grad_()
    module(x, plan, group).backward(dy)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        y = module(x, plan, group)
    forward = [e.nbytes() for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        y.backward(dy)
    backward = [e.nbytes() for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    weights = sorted(p.nbytes for p in module.parameters())
    return [sorted(n for n in sizes if n > 0)[::-1] for sizes in (forward, backward)], x.nbytes, weights[0]


def test_nothing_of_full_head_width_exists_but_the_output():
    for (forward, backward), unit, weight in run_ranks(2, _largest, 2):
        assert forward[0] == unit, "the output"
        assert forward[1] <= unit // 2, "the rest is of a stage: an eighth of the heads, or its three exchanged tensors"
        # d x; the gradients of the weights, which are (E, E), do not grow with the sequence.
        assert [size for size in backward if size > unit // 2 and size != weight] == [unit]


def _precision(group, rank, dtype):
    S, heads, dim = 96, (16, 4), 16
    hidden_size = heads[0] * dim
    torch.manual_seed(0)
    module = UpipeAttention(hidden_size, *heads, 2).double()
    x = torch.randn(1, S, hidden_size, dtype=torch.float64)
    plan = plan_attention(Layout.zigzag(S, 2), Mask.causal(S), "upipe", heads)

    def plain(x, weights):
        q, k, v = (torch.nn.functional.linear(x, w).unflatten(-1, (-1, dim)).transpose(1, 2) for w in weights[:3])
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return torch.nn.functional.linear(out.transpose(1, 2).flatten(2), weights[3])

    weights = [p.detach() for p in module.parameters()]
    right = plain(x, weights)
    own = (plain(x.to(dtype), [w.to(dtype) for w in weights]).double() - right).square().mean().sqrt()
    low = module.to(dtype)
    with torch.no_grad():
        y = low(shard(x, plan.layout, rank, 1).to(dtype), plan, group)
    return ((y.double() - shard(right, plan.layout, rank, 1)).square().mean().sqrt() / own).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_eight_stages_round_no_worse_than_one_pass(dtype):
    assert max(run_ranks(2, _precision, dtype)) < 1.5
