"""Forward and backward as registered operators: fake shapes, compilation, recomputation, and where backward may run."""

from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from longspan.comm.sharding import shard
from longspan.comm.traffic import record
from longspan.cp.attention import attention, share_of
from longspan.cp.engine.operators import attention_backward, attention_forward
from longspan.plan import Layout, Mask, plan_attention
from tests.oracle import make_inputs
from tests.ranks import run_ranks

PLAN = plan_attention(Layout.zigzag(12, 1, slots=14), Mask.causal(12, window=5))
SCALE = 0.3


def local_inputs(dtype=torch.float32, dim_v=8, plan=PLAN, rank=0, heads=(4, 2)):
    inputs = make_inputs(12, heads, dim_v=dim_v, dtype=dtype)
    return [shard(x, plan.layout, rank, 2) for x in inputs]


def forward_and_backward(q, k, v, dout, sink, ref):
    """All results of both operators, the second given what the first kept for it."""
    out, lse, together = attention_forward(q, k, v, sink, None, ref, SCALE, None)
    kept = together or [q, k, v, out]
    grads = attention_backward(dout, *kept, lse, sink, None, ref, SCALE, None)
    return [out, lse, *together, *grads]


def strides(x):
    """Of dims of more than one element; all others may be anything."""
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]


def differences_from_fake(ref, q, k, v, dout, sink):
    """Shapes, types and strides of fake and real results, where they differ."""
    real = forward_and_backward(q, k, v, dout, sink, ref)
    with FakeTensorMode() as mode:
        fakes = [None if x is None else mode.from_tensor(x) for x in (q, k, v, dout, sink)]
        fake = forward_and_backward(*fakes, ref)
    described = [[(x.shape, x.dtype, strides(x)) for x in results] for results in (fake, real)]
    assert len(described[0]) == len(described[1])
    return [(n, f, r) for n, (f, r) in enumerate(zip(*described, strict=True)) if f != r]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim_v", [8, 4])
@pytest.mark.parametrize("with_sink", [False, True])
def test_fake_results_are_like_the_real_ones(dtype, dim_v, with_sink):
    sink = torch.zeros(4, dtype=dtype) if with_sink else None
    assert differences_from_fake(share_of(PLAN, None), *local_inputs(dtype, dim_v), sink) == []


def _fake_of_routes(group, rank, routes, heads):
    found = []
    for route in routes:
        plan = plan_attention(
            Layout.zigzag(12, 4, slots=4), Mask.causal(12), route, heads, 2 if route == "usp" else None
        )
        for dtype, dim_v, with_sink in ((torch.float64, 8, True), (torch.bfloat16, 4, False)):
            sink = torch.zeros(heads[0], dtype=dtype) if with_sink else None
            inputs = local_inputs(dtype, dim_v, plan, rank, heads)
            found += [(route, *one) for one in differences_from_fake(share_of(plan, group), *inputs, sink)]
    return found


@pytest.mark.parametrize("heads", [(8, 2), (4, 4), (12, 6)])
def test_fake_results_of_other_routes(heads):
    assert run_ranks(4, _fake_of_routes, ("exchange", "rotate", "allgather", "ulysses", "usp"), heads) == [[]] * 4


def test_no_result_is_an_input_or_shares_memory_with_one():
    q, k, v, dout = local_inputs()
    ref = share_of(PLAN, None)
    out, lse, together = attention_forward(q, k, v, None, None, ref, SCALE, None)
    assert together == []
    grads = attention_backward(dout, q, k, v, out, lse, None, None, ref, SCALE, None)
    given = {x.untyped_storage().data_ptr() for x in (q, k, v, dout, out, lse)}
    assert not given & {x.untyped_storage().data_ptr() for x in grads if x.numel()}


def _memory_of_exchanged_heads(group, rank):
    shared = []
    for degree, route in ((2, "ulysses"), (2, "usp")):
        plan = plan_attention(Layout.contiguous(12, degree), Mask.causal(12), route, (4, 2))
        ref = share_of(plan, group)
        q, k, v, dout = local_inputs(plan=plan, rank=rank)
        out, lse, together = attention_forward(q, k, v, None, None, ref, SCALE, None)
        results = [out, lse, *together]
        grads = attention_backward(dout, *together, lse, None, None, ref, SCALE, None)
        before = [x.untyped_storage().data_ptr() for x in (q, k, v, dout, *results)]
        shared.append(len(before) - len(set(before)))
        shared.append(len(set(before) & {x.untyped_storage().data_ptr() for x in grads if x.numel()}))
    return shared


def test_nor_where_heads_are_exchanged():
    assert run_ranks(2, _memory_of_exchanged_heads) == [[0, 0, 0, 0]] * 2


def _as_compiled(group, rank, plan, heads):
    ref = share_of(plan, group)

    def block(q, k, v):
        return attention_forward(q * 2, k, v, None, None, ref, SCALE, None)[0] + 1

    results = []
    for function in (block, torch.compile(block, backend="aot_eager", fullgraph=True)):
        q, k, v, dout = local_inputs(plan=plan, rank=rank, heads=heads)
        out = function(q.requires_grad_(), k.requires_grad_(), v.requires_grad_())
        out.backward(dout)
        results.append([out.detach(), q.grad, k.grad, v.grad])
    return all(torch.equal(eager, compiled) for eager, compiled in zip(*results, strict=True))


def test_compiled_is_as_eager():
    assert _as_compiled(None, 0, PLAN, (4, 2))


@pytest.mark.parametrize("route", ["exchange", "ulysses", "usp"])
def test_compiled_is_as_eager_on_other_routes(route):
    plan = plan_attention(Layout.zigzag(12, 2), Mask.causal(12), route, (4, 2))
    assert run_ranks(2, _as_compiled, plan, (4, 2)) == [True] * 2


def _keep_attention(ctx, op, *arguments, **keywords):
    kept = op == torch.ops.longspan.attention_forward.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _checkpointed(group, rank, how, route):
    S = 18
    plan = plan_attention(Layout.zigzag(S, 2), Mask.causal(S), route, (4, 2))
    inputs = make_inputs(S)
    results = []
    for recompute in (None, how):
        q, k, v, dout = (shard(x, plan.layout, rank, 2) for x in inputs)
        for x in (q, k, v):
            x.requires_grad_()

        def block(q, k, v):
            return attention(q.sin(), k.sin(), v.sin(), plan=plan, group=group).sin()

        with record() as calls:
            if recompute is None:
                out = block(q, k, v)
            elif recompute == "all":
                out = checkpoint(block, q, k, v, use_reentrant=False)
            else:
                contexts = partial(create_selective_checkpoint_contexts, _keep_attention)
                out = checkpoint(block, q, k, v, use_reentrant=False, context_fn=contexts)
            out.backward(dout)
        results.append([out.detach(), q.grad, k.grad, v.grad])
    same = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    return same, [call.phase for call in calls]


@pytest.mark.parametrize(
    ("how", "phases"),
    [("all", ["forward", "forward", "backward"]), ("all but attention", ["forward", "backward"])],
)
@pytest.mark.parametrize("route", ["ring", "exchange", "ulysses"])
def test_recomputed_blocks_give_the_same_gradients(how, phases, route):
    assert run_ranks(2, _checkpointed, how, route) == [(True, phases)] * 2


def _backward_elsewhere(group, rank):
    import threading

    S = 18
    plan = plan_attention(Layout.zigzag(S, 2), Mask.causal(S))
    inputs = [shard(x, plan.layout, rank, 2) for x in make_inputs(S)]

    def forward():
        q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
        with record() as calls:
            return (q, k, v), attention(q, k, v, plan=plan, group=group), calls

    (first, out, calls), (second, other, _) = forward(), forward()
    out.backward(inputs[3])
    assert [call.phase for call in calls] == ["forward"]
    thread = threading.Thread(target=other.backward, args=(inputs[3],))
    thread.start()
    thread.join()
    return all(torch.equal(a.grad, b.grad) for a, b in zip(first, second, strict=True))


def test_backward_after_the_recorder_closed_and_in_another_thread():
    assert run_ranks(2, _backward_elsewhere) == [True] * 2


def _twice(group, rank, route):
    S = 18
    plan = plan_attention(Layout.zigzag(S, 2), Mask.causal(S), route, (4, 2))
    q, k, v, dout = (shard(x, plan.layout, rank, 2) for x in make_inputs(S))
    q.requires_grad_()
    out = attention(q, k, v, plan=plan, group=group)
    once = torch.autograd.grad(out, q, dout, retain_graph=True)[0]
    again = torch.autograd.grad(out, q, dout)[0]
    return torch.equal(once, again)


@pytest.mark.parametrize("route", ["ring", "exchange", "ulysses"])
def test_backward_may_run_twice(route):
    assert run_ranks(2, _twice, route) == [True] * 2
