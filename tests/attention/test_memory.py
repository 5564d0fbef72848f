"""Peak memory of one call on one rank, by the profiler's memory events, against what the executor may hold.

forward    two KV shards, one fp32 out, one tile's output             beyond q, k, v, out, lse
backward   two KV shards, two fp32 dKV shards, fp32 dQ, one tile's gradients     beyond those and dq, dk, dv
"""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from longspan.attention.attention import attention
from longspan.attention.kernel import KERNELS
from longspan.plan import Layout, Mask, Shape, plan_attention
from tests.ranks import run_ranks

S, H, K, D = 8192, 4, 4, 64


def peak(function):
    """Bytes that `function` held at most beyond those before it, and its result."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        result = function()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    assert most > 0
    return most, result


def size(*tensors):
    return sum(x.nbytes for x in tensors)


def kernel_scratch(q, k, v, shape):
    """What the kernel alone needs beside what it returns, forward and backward."""
    kernel = KERNELS["sdpa"]
    most, results = peak(lambda: kernel.forward(q, k, v, shape, 0.1))
    forward = most - size(*results)
    most, grads = peak(lambda: kernel.backward(results[0], q, k, v, *results, shape, 0.1))
    return forward, most - size(*grads)


def _peaks(group, rank, plan, dtype):
    T = plan.layout.num_slots(rank)
    q, dout = (torch.randn(1, H, T, D).to(dtype) for _ in range(2))
    k, v = (torch.randn(1, K, T, D).to(dtype) for _ in range(2))
    for x in (q, k, v):
        x.requires_grad_()

    def forward():
        return attention(q, k, v, plan=plan, group=group)

    def backward(out):
        return torch.autograd.grad(out, (q, k, v), dout)

    backward(forward())
    forward_peak, out = peak(forward)
    backward_peak, grads = peak(lambda: backward(out))
    with torch.no_grad():
        scratch = kernel_scratch(q, k, v, Shape(T, T, 0, T - 1))
    lse = H * T * 4
    return {
        "forward": forward_peak, "backward": backward_peak, "scratch": scratch, "kv": size(k, v), "out": size(out),
        "lse": lse, "out32": out.numel() * 4, "grads": size(*grads), "dkv32": (k.numel() + v.numel()) * 4,
    }  # fmt: skip


SLACK = 1 << 17
"""Bytes of small tensors: merge weights `(B, H, rows)` and the like are counted by the kernel's row, 4 bytes each."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("P", [2, 4])
def test_peak_of_a_call(P, dtype):
    plan = plan_attention(Layout.zigzag(S, P), Mask.causal(S))
    for rank, m in enumerate(run_ranks(P, _peaks, plan, dtype)):
        tile_out, tile_gradients = m["out"] + m["lse"], m["grads"]
        results = m["out"] + m["lse"]
        may = results + 2 * m["kv"] + m["out32"] + tile_out + m["scratch"][0] + SLACK
        assert m["forward"] <= may, (rank, "forward", m, may)
        may = m["grads"] + 2 * m["kv"] + 2 * m["dkv32"] + m["out32"] + tile_gradients + m["scratch"][1] + SLACK
        assert m["backward"] <= may, (rank, "backward", m, may)
