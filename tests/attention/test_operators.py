"""Forward and backward as registered operators: fake shapes, compilation, recomputation, and where backward may run."""

from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from longspan.attention.attention import attention, share_of
from longspan.attention.operators import attention_backward, attention_forward
from longspan.comm.sharding import shard
from longspan.comm.traffic import record
from longspan.plan import Layout, Mask, plan_attention
from tests.oracle import make_inputs
from tests.ranks import run_ranks

PLAN = plan_attention(Layout.zigzag(12, 1, slots=14), Mask.causal(12, window=5))


def local_inputs(dtype=torch.float32, dim_v=8):
    inputs = make_inputs(12, dim_v=dim_v, dtype=dtype)
    return [shard(x, PLAN.layout, 0, 2) for x in inputs]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim_v", [8, 4])
@pytest.mark.parametrize("with_sink", [False, True])
def test_fake_results_are_like_the_real_ones(dtype, dim_v, with_sink):
    q, k, v, dout = local_inputs(dtype, dim_v)
    sink = torch.zeros(4, dtype=dtype) if with_sink else None
    ref = share_of(PLAN, None)
    real = attention_forward(q, k, v, sink, ref, 0.3)
    real += attention_backward(dout, q, k, v, *real, sink, ref, 0.3)
    with FakeTensorMode() as mode:
        q, k, v, dout, sink = (None if x is None else mode.from_tensor(x) for x in (q, k, v, dout, sink))
        fake = attention_forward(q, k, v, sink, ref, 0.3)
        fake += attention_backward(dout, q, k, v, *fake, sink, ref, 0.3)
    for f, r in zip(fake, real, strict=True):
        assert (f.shape, f.dtype, f.stride()) == (r.shape, r.dtype, r.stride())


def test_no_result_is_an_input_or_shares_memory_with_one():
    q, k, v, dout = local_inputs()
    ref = share_of(PLAN, None)
    out, lse = attention_forward(q, k, v, None, ref, 0.3)
    grads = attention_backward(dout, q, k, v, out, lse, None, ref, 0.3)
    given = {x.untyped_storage().data_ptr() for x in (q, k, v, dout, out, lse)}
    assert not given & {x.untyped_storage().data_ptr() for x in grads if x.numel()}


def test_compiled_is_as_eager():
    ref = share_of(PLAN, None)

    def block(q, k, v):
        return attention_forward(q * 2, k, v, None, ref, 0.3)[0] + 1

    results = []
    for function in (block, torch.compile(block, backend="aot_eager", fullgraph=True)):
        q, k, v, dout = local_inputs()
        out = function(q.requires_grad_(), k.requires_grad_(), v.requires_grad_())
        out.backward(dout)
        results.append([out.detach(), q.grad, k.grad, v.grad])
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


def _keep_attention(ctx, op, *arguments, **keywords):
    kept = op == torch.ops.longspan.attention_forward.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _checkpointed(group, rank, how):
    S = 18
    plan = plan_attention(Layout.zigzag(S, 2), Mask.causal(S))
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
def test_recomputed_blocks_give_the_same_gradients(how, phases):
    assert run_ranks(2, _checkpointed, how) == [(True, phases)] * 2


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


def _twice(group, rank):
    S = 18
    plan = plan_attention(Layout.zigzag(S, 2), Mask.causal(S))
    q, k, v, dout = (shard(x, plan.layout, rank, 2) for x in make_inputs(S))
    q.requires_grad_()
    out = attention(q, k, v, plan=plan, group=group)
    once = torch.autograd.grad(out, q, dout, retain_graph=True)[0]
    again = torch.autograd.grad(out, q, dout)[0]
    return torch.equal(once, again)


def test_backward_may_run_twice():
    assert run_ranks(2, _twice) == [True] * 2
