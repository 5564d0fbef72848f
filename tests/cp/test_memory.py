"""Peak memory of one call on one rank, by the profiler's memory events, against what the executor may hold.

forward    two KV shards, one fp32 out, one tile's output             beyond q, k, v, out, lse
backward   two KV shards, two fp32 dKV shards, fp32 dQ, one tile's gradients     beyond those and dq, dk, dv

exchange   the rows of the two largest stages in a row, in place of two shards; backward their gradients likewise
allgather  all rows of others, once
ulysses    q, k, v, out of the exchanged heads, which stay for backward, and the larger of the two exchanges: what is packed
           to leave, and what arrives
"""

from itertools import pairwise

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from longspan.cp.attention import attention
from longspan.kernels.choice import KERNELS
from longspan.kernels.protocol import BackwardInputs
from longspan.plan import Layout, Mask, Shape, plan_attention
from tests.ranks import run_ranks

S, H, K, D = 4096, 4, 4, 64


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
    most, results = peak(lambda: kernel.forward(q, k, v, (shape,), 0.1))
    forward = most - size(*results)
    most, grads = peak(lambda: kernel.backward(BackwardInputs(results[0], q, k, v, *results), (shape,), 0.1))
    return forward, most - size(*grads)


def _peaks(group, rank, plan, dtype, shape=None, heads=None, times=1):
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
    measured = []
    for _ in range(times):
        forward_peak, out = peak(forward)
        backward_peak, grads = peak(lambda out=out: backward(out))
        measured.append((forward_peak, backward_peak))
    # gloo's own thread may let go of a buffer a little after it is done with it: the least of several.
    forward_peak, backward_peak = map(min, zip(*measured, strict=True))
    with torch.no_grad():
        # Of the greatest tile: all local rows, or all rows of the heads that come here.
        given = [torch.randn(1, heads or x.shape[1], shape.num_q if shape else T, D).to(dtype) for x in (q, k, v)]
        scratch = kernel_scratch(*given, shape or Shape(T, T, 0, T - 1))
    lse = H * T * 4
    return {
        "forward": forward_peak, "backward": backward_peak, "scratch": scratch, "kv": size(k, v), "out": size(out),
        "lse": lse, "out32": out.numel() * 4, "grads": size(*grads), "dkv32": (k.numel() + v.numel()) * 4,
    }  # fmt: skip


SLACK = 1 << 16
"""Bytes of small tensors: merge weights `(B, H, rows)` and the like are counted by the kernel's row, 4 bytes each."""


@pytest.mark.parametrize(
    ("P", "dtype"),
    [(4, torch.float32), (4, torch.bfloat16), (2, torch.float32), pytest.param(2, torch.bfloat16, marks=pytest.mark.nightly)],
    ids=str,
)  # fmt: skip
def test_peak_of_a_call(P, dtype):
    plan = plan_attention(Layout.zigzag(S, P), Mask.causal(S))
    for rank, m in enumerate(run_ranks(P, _peaks, plan, dtype)):
        tile_out, tile_gradients = m["out"] + m["lse"], m["grads"]
        results = m["out"] + m["lse"]
        may = results + 2 * m["kv"] + m["out32"] + tile_out + m["scratch"][0] + SLACK
        assert m["forward"] <= may, (rank, "forward", m, may)
        may = m["grads"] + 2 * m["kv"] + 2 * m["dkv32"] + m["out32"] + tile_gradients + m["scratch"][1] + SLACK
        assert m["backward"] <= may, (rank, "backward", m, may)


def shards(plan, rank):
    """In shards of this rank: the most rows of others that are here at a time (of a stage and of the one that arrives), rows
    packed to leave, and own rows whose gradients come home, the most of one stage."""
    stages, slots = plan.rank_plan(rank).stages, plan.layout.num_slots(rank)
    rows = [sum(step.rows for step in stage.steps) for stage in stages[1:]]
    here = max(a + b for a, b in pairwise([0, *rows, 0]))
    packed = max(sum(t.rows for t in stage.sends if t.rows < slots) for stage in stages)
    home = max(sum(t.rows for t in stage.home_recvs) for stage in stages)
    return here / slots, packed / slots, home / slots


@pytest.mark.slow
@pytest.mark.parametrize(
    ("route", "dtype"),
    [
        ("exchange", torch.bfloat16),
        ("allgather", torch.float32),
        pytest.param("exchange", torch.float32, marks=pytest.mark.nightly),
        pytest.param("allgather", torch.bfloat16, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_peak_where_rows_come_straight(route, dtype):
    P = 4
    plan = plan_attention(Layout.zigzag(S, P), Mask.causal(S), route, (H, K))
    for rank, m in enumerate(run_ranks(P, _peaks, plan, dtype)):
        here, packed, home = shards(plan, rank)
        assert here == 3 if route == "allgather" else 1 <= here <= 3
        results, tile_out = m["out"] + m["lse"], m["out"] + m["lse"]
        merging = 0 if dtype == torch.float32 else m["out32"]  # a tile's output as wide as the sum
        may = results + (here + packed) * m["kv"] + m["out32"] + tile_out + merging + m["scratch"][0] + SLACK
        assert m["forward"] <= may, (rank, "forward", m, may)
        gradients = (here + home + 1) * m["dkv32"] + m["out32"]
        may = m["grads"] + (here + packed) * m["kv"] + gradients + m["grads"] + m["scratch"][1] + SLACK
        assert m["backward"] <= may, (rank, "backward", m, may)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.nightly)], ids=str)
def test_peak_where_heads_are_exchanged(dtype):
    """A quarter of the heads of all rows weigh what all heads of a quarter of the rows do: as much as local tensors."""
    P = 4
    plan = plan_attention(Layout.zigzag(S, P), Mask.causal(S), "ulysses", (H, K))
    buffers = 2 * (P - 1) / P  # what leaves, packed, and what arrives
    for rank, m in enumerate(run_ranks(P, _peaks, plan, dtype, Shape(S, S, 0, S - 1), H // P, 3)):
        qkv, out = m["out"] + m["kv"], m["out"]
        kept = qkv + out + m["lse"]
        gathering = qkv + buffers * qkv
        attending = kept + m["out32"] + out + m["lse"] + m["scratch"][0]
        returning = kept + out + buffers * out
        may = max(gathering, attending, returning) + SLACK
        assert m["forward"] <= may, (rank, "forward", m, may)
        # dout with its buffers; then sums of dq, dk, dv and one tile's; or these, in the order of members, and on their way.
        dout = out + buffers * out
        attending = 2 * (m["out32"] + m["dkv32"]) + m["scratch"][1]
        returning = m["grads"] + max(m["out32"] + m["dkv32"], (1 + buffers) * m["grads"])
        may = dout + max(attending, returning) + SLACK
        assert m["backward"] <= may, (rank, "backward", m, may)
