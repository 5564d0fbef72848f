"""Soft-cap and ALiBi against dense attention by plain autograd, on routes that move rows, heads and both; and what is refused."""

from functools import cache

import pytest
import torch

from longspan.comm.sharding import shard
from longspan.cp.attention import attention
from longspan.errors import SpecError
from longspan.plan import Layout, Mask, plan_attention
from tests.oracle import make_inputs, raised, relative_error
from tests.ranks import run_threads

SCALE = 0.7
MASKS = [Mask.causal(23), Mask.documents([5, 11, 0, 7], window=6), Mask.prefix(23, 9), Mask.full(23)]
CHANGES = [(1.5, False), (None, True), (2.5, True)]


def slopes(heads):
    return torch.tensor([2.0**-n for n in range(heads)], dtype=torch.float64)


@cache
def dense(mask, heads, softcap, alibi):
    """out, dq, dk, dv of the formulas as they are written, once for all ranks, layouts and routes."""
    inputs = make_inputs(mask.seq_len, heads)
    q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT * SCALE
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    place = torch.arange(mask.seq_len)
    if alibi:
        scores = scores - slopes(q.shape[1]).view(-1, 1, 1) * (place[:, None] - place).abs()
    scores = scores.masked_fill(~torch.from_numpy(mask.dense()), float("-inf"))
    out = torch.softmax(scores, -1).nan_to_num(0.0) @ v.repeat_interleave(group, 1)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3])]


def check_changed(group, rank, cases, kernel="auto"):
    for layout, mask, route, inner, heads, softcap, alibi in cases:
        inputs = make_inputs(mask.seq_len, heads)
        want = dense(mask, heads, softcap, alibi)
        plan = plan_attention(layout, mask, route, heads, inner)
        q, k, v, dout = (shard(x, layout, rank, 2) for x in inputs)
        for x in (q, k, v):
            x.requires_grad_()
        given = slopes(heads[0]) if alibi else None
        out = attention(q, k, v, plan=plan, group=group, scale=SCALE, kernel=kernel, softcap=softcap, alibi=given)
        out.backward(dout)
        for got, right in zip((out.detach(), q.grad, k.grad, v.grad), want, strict=True):
            error = relative_error(got, shard(right, layout, rank, 2), floor=max(1e-3, right.abs().max().item()))
            assert error < 1e-10, (layout.name, mask.array.tolist(), route, heads, softcap, alibi, error)


@pytest.mark.slow
@pytest.mark.parametrize("P", [1, 2, 4])
def test_against_dense(P):
    routes = [
        ("ring", None),
        ("exchange", None),
        ("allgather", None),
        ("ulysses", None),
        ("usp", 2),
        ("ulysses-ring", 2),
    ]
    cases = [
        (Layout.named(name, 23, P, slots, masks=[mask]), mask, route, inner if P == 4 else inner and P, (8, 4), *change)
        for route, inner in routes
        for name, slots in (("zigzag", None), ("striped", 26), ("balanced", None))
        for mask in MASKS
        for change in CHANGES
    ]
    # KV heads that serve now more, now fewer query heads of a rank.
    cases += [(Layout.zigzag(23, P), MASKS[0], "ulysses", None, (12, 6), *change) for change in CHANGES]
    run_threads(P, check_changed, cases[:: 1 if P == 2 else 3])


def test_what_is_refused():
    plan = plan_attention(Layout.zigzag(8, 1), Mask.causal(8))
    q, k, v, _ = make_inputs(8, (4, 2))

    def refused(**how):
        kind, text = raised(attention, q, k, v, plan=plan, **how)
        assert kind == SpecError.__name__
        return text

    assert "softcap=-1.0 is not a positive number" in refused(softcap=-1.0)
    assert "softcap=0.0 is not a positive number" in refused(softcap=0.0)
    assert "give one floating-point slope for each of the 4 query heads" in refused(alibi=torch.ones(2))
    assert "alibi requires a gradient" in refused(alibi=torch.ones(4, requires_grad=True))
    assert "no soft-cap and no ALiBi" in refused(kernel="sdpa", softcap=1.0)


def _different(group, rank):
    plan = plan_attention(Layout.zigzag(8, 2), Mask.causal(8))
    q, k, v, _ = (shard(x, plan.layout, rank, 2) for x in make_inputs(8, (4, 2)))
    return [
        raised(attention, q, k, v, plan=plan, group=group, **how)
        for how in ({"softcap": 1.0 + rank}, {"alibi": torch.ones(4) * (1 + rank)})
    ]


def test_ranks_that_change_scores_differently_are_told():
    for found in run_threads(2, _different):
        assert [kind for kind, _ in found] == ["DisagreementError"] * 2
        assert all("changes of scores" in text for _, text in found)
