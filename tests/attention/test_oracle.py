"""Every layout, mask, degree and head layout against a dense fp64 oracle, on every rank, forward and backward."""

import itertools

import torch

from longspan.attention.attention import attention
from longspan.comm.sharding import shard
from longspan.comm.traffic import record
from longspan.plan import Layout, Mask, plan_attention
from tests.ranks import run_ranks


def oracle(q, k, v, dout, mask, scale=None, sink=None):
    """Dense attention and its gradients by autograd, in the inputs' own type."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    sink = None if sink is None else sink.detach().clone().requires_grad_()
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~torch.from_numpy(mask.dense()), float("-inf"))
    if sink is not None:
        scores = torch.cat((scores, sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    if sink is not None:
        weights = weights[..., :-1]
    out = weights @ v.repeat_interleave(group, 1)
    out.backward(dout)
    return [out.detach(), q.grad, k.grad, v.grad] + ([] if sink is None else [sink.grad])


def run_cases(group, rank, cases):
    worst = []
    for case in cases:
        layout, mask, heads, batch, dim, kernel = case
        torch.manual_seed(0)
        S = mask.seq_len
        H, K = heads
        q, k, v, dout = (torch.randn(batch, n, S, dim, dtype=torch.float64) for n in (H, K, K, H))
        # Rows that see nothing have no defined softmax in the dense oracle's gradient; nan_to_num hides it there.
        want = oracle(q, k, v, dout, mask)
        plan = plan_attention(layout, mask, heads=heads)
        local = [shard(x, layout, rank, 2, fill=float("nan")).requires_grad_() for x in (q, k, v)]
        with record() as calls:
            out = attention(*local, plan=plan, group=group, kernel=kernel)
            out.backward(shard(dout, layout, rank, 2, fill=float("nan")))
        assert [c.phase for c in calls] == ["forward", "backward"]
        got = [out.detach(), *(x.grad for x in local)]
        live = int(layout.counts[rank])
        for name, a, b in zip("out dq dk dv".split(), got, want):
            b = shard(b, layout, rank, 2)
            assert a.shape == b.shape
            assert torch.equal(a[:, :, live:], torch.zeros_like(a[:, :, live:])), (case, name, "dead slots")
            error = (a - b).abs().max().item() / max(b.abs().max().item(), 1e-3) if b.numel() else 0.0
            assert error < 1e-10, (layout.name, S, layout.ranks, mask.array.tolist(), heads, kernel, name, error)
        for c in calls:
            assert c.bytes_sent == plan.bytes(rank, c.phase, dim, 8) * batch, (c, plan.bytes(rank, c.phase, dim, 8))
            assert c.pairs == plan.area(rank)
        assert calls[0].rows_received == plan.rows_received(rank)
    return worst
