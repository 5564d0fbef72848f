"""What the executor does beside the matrix: cases by hand, sinks, views, types, lengths, repeatability."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from longspan.comm.sharding import shard, unshard
from longspan.comm.traffic import call, record
from longspan.cp.attention import attention
from longspan.cp.engine.head_exchange import HeadExchange
from longspan.plan import Layout, Mask, plan_attention
from tests.cp.cases import NAN, Case, check_cases
from tests.oracle import Inputs, dense_attention, make_inputs, relative_error
from tests.plan.strategies import NAMES
from tests.ranks import run_ranks, run_threads

ROUTES = (
    ("ring", None), ("exchange", None), ("rotate", None), ("allgather", None), ("ulysses", None), ("usp", 2), ("ulysses-ring", 2),
)  # fmt: skip


def run(group, rank, layout, mask, inputs, route="ring", inner=None, **how):
    """Out and gradients of this rank's slots, and of the sink if there is one."""
    plan = plan_attention(layout, mask, route, (inputs.q.shape[1], inputs.k.shape[1]), inner)
    q, k, v = (shard(x, layout, rank, 2, fill=NAN).requires_grad_() for x in inputs[:3])
    sink = how["sink"] = how["sink"].clone().requires_grad_() if "sink" in how else None
    out = attention(q, k, v, plan=plan, group=group, **how)
    out.backward(shard(inputs.dout, layout, rank, 2, fill=NAN))
    return [out.detach(), q.grad, k.grad, v.grad, None if sink is None else sink.grad]


def run_many(group, rank, cases):
    return [run(group, rank, layout, mask, inputs, **how) for layout, mask, inputs, how in cases]


def global_out(P, cases):
    """The global out of each case."""
    by_rank = run_ranks(P, run_many, cases)
    return [unshard([results[n][0] for results in by_rank], case[0], 2) for n, case in enumerate(cases)]


def counting(S, heads=1, dim=8):
    """q = k = 0 and `v_j = j`: out is the mean of the visible keys' numbers."""
    zeros = torch.zeros(1, heads, S, dim, dtype=torch.float64)
    return Inputs(zeros, zeros, torch.arange(float(S), dtype=torch.float64).view(1, 1, S, 1).expand_as(zeros), zeros)


@pytest.mark.parametrize("P", [1, 2, 4])
def test_masks_by_hand(P):
    rows = [
        (Mask.causal(16, window=4), 8, 6.5),
        (Mask.causal(16), 8, 4.0),
        (Mask.documents([5, 3]), 5, 5.0),
        (Mask.documents([5, 3]), 7, 6.0),
        (Mask.documents([0, 4, 4, 0, 0]), 4, 4.0),
        (Mask.prefix(8, 4), 0, 1.5),
        (Mask.shared_prefix(2, [3, 3]), 5, (0 + 1 + 5) / 3),
        (Mask.full(8), 3, 3.5),
    ]
    cases = [(Layout.named(name, m.seq_len, P), m, counting(m.seq_len), {}) for m, _, _ in rows for name in NAMES]
    right = [(index, value) for _, index, value in rows for _ in NAMES]
    for out, (index, value) in zip(global_out(P, cases), right, strict=True):
        torch.testing.assert_close(out[0, 0, index], torch.full((8,), value, dtype=torch.float64))


@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
def test_padding_is_not_a_key(kernel):
    x = torch.tensor([1.0, 1, 1, 1, 2, 2, 2], dtype=torch.float64).view(1, 1, 7, 1).expand(1, 1, 7, 8)
    inputs = Inputs(x, x, x, x)
    layout = Layout.contiguous(7, 2, slots=4)
    by_rank = run_ranks(2, run_many, [(layout, Mask.full(7), inputs, {"kernel": kernel})])
    out = unshard([results[0][0] for results in by_rank], layout, 2)
    # Seven keys: (4 + 3 * 2 * e^sqrt(8)) / (4 + 3 * e^sqrt(8)); the eighth slot is dead and gives 0.
    weight = 3 * math.exp(math.sqrt(8))
    assert out[0, 0, 1, 0].item() == pytest.approx((4 + 2 * weight) / (4 + weight), rel=1e-12)
    assert out[0, 0, 1, 0].item() == pytest.approx(1.9269, abs=5e-5)
    assert by_rank[1][0][0][:, :, 3].eq(0).all()


@pytest.mark.parametrize(("S", "P"), [(7, 2), (10, 4), (2, 2), (1, 4), (5, 8)])
def test_lengths_that_the_degree_does_not_divide(S, P):
    cases = [Case(Layout.named(name, S, P), mask, (2, 1)) for name in NAMES for mask in (Mask.causal(S), Mask.full(S))]
    assert run_ranks(P, check_cases, cases) == [len(cases)] * P


@pytest.mark.parametrize("name", NAMES)
def test_a_prime_length(name):
    S, layout = 2999, Layout.named(name, 2999, 4)
    inputs = make_inputs(S, (2, 1))
    q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    out.backward(inputs.dout)
    by_rank = run_ranks(4, run_many, [(layout, Mask.causal(S), inputs, {})])
    for number, want in enumerate((out.detach(), q.grad, k.grad, v.grad)):
        assert relative_error(unshard([results[0][number] for results in by_rank], layout, 2), want) < 1e-11


@pytest.mark.parametrize("P", [1, 2, 4])
@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
def test_sink_and_its_gradient(P, kernel):
    S, heads = 22, (4, 2)
    inputs = make_inputs(S, heads, batch=2)
    sink = torch.tensor([-1.0, 0.0, 0.5, 3.0], dtype=torch.float64)
    masks = [Mask.causal(S), Mask.documents([9, 0, 13], window=5), Mask.bands(S, [(3, S, 0, S - 4, None, None)])]
    cases = [
        (Layout.named(name, S, P, slots), mask, inputs, {"sink": sink, "kernel": kernel, "scale": 0.7})
        for mask in masks for name in NAMES for slots in (None, S // P + 3)
    ]  # fmt: skip
    by_rank = run_ranks(P, run_many, cases)
    for n, (layout, mask, _, _) in enumerate(cases):
        want = dense_attention(inputs, mask, 0.7, sink)
        for number in range(4):
            got = unshard([results[n][number] for results in by_rank], layout, 2)
            assert relative_error(got, want[number]) < 1e-10
        dsink = torch.stack([results[n][4] for results in by_rank]).sum(0)
        assert relative_error(dsink, want.dsink) < 1e-10
        assert all(results[n][0][:, :, int(layout.counts[r]) :].eq(0).all() for r, results in enumerate(by_rank))


def test_a_sink_of_logit_zero_by_hand():
    zeros, ones = torch.zeros(1, 1, 2, 8, dtype=torch.float64), torch.ones(1, 1, 2, 8, dtype=torch.float64)
    case = (Layout.contiguous(2, 2), Mask.full(2), Inputs(zeros, zeros, ones, ones), {"sink": zeros[0, 0, 0, :1]})
    (out,) = global_out(2, [case])
    torch.testing.assert_close(out, torch.full_like(out, 2 / 3))


@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
@pytest.mark.parametrize("scale", [1.0, 0.01, None])
def test_scale(scale, kernel):
    inputs, layout = make_inputs(18), Layout.zigzag(18, 2)
    masks = [Mask.full(18), Mask.causal(18), Mask.causal(18, window=4)]
    by_rank = run_ranks(2, run_many, [(layout, mask, inputs, {"scale": scale, "kernel": kernel}) for mask in masks])
    for n, mask in enumerate(masks):
        for number, want in enumerate(dense_attention(inputs, mask, scale)[:4]):
            assert relative_error(unshard([results[n][number] for results in by_rank], layout, 2), want) < 1e-12


def test_values_of_another_dim_than_keys():
    mask, layout = Mask.causal(13), Layout.zigzag(13, 2)
    inputs = make_inputs(13, (4, 2), batch=2, dim=6, dim_v=4)
    by_rank = run_ranks(2, run_many, [(layout, mask, inputs, {})])
    assert by_rank[0][0][0].shape == (2, 4, 7, 4)
    for number, want in enumerate(dense_attention(inputs, mask)[:4]):
        assert relative_error(unshard([results[0][number] for results in by_rank], layout, 2), want) < 1e-12


def _other_dims_are_counted(group, rank):
    layout, mask = Layout.zigzag(13, 2), Mask.causal(13)
    plan = plan_attention(layout, mask, heads=(4, 2))
    q, k, v, dout = (shard(x, layout, rank, 2).requires_grad_() for x in make_inputs(13, (4, 2), dim=6, dim_v=4))
    with record() as calls:
        attention(q, k, v, plan=plan, group=group).backward(dout.detach())
    return [(call.bytes_sent, plan.bytes(rank, call.phase, (6, 4), 8), call.kernel) for call in calls]


def test_bytes_of_keys_and_values_of_other_dims():
    for calls in run_ranks(2, _other_dims_are_counted):
        for sent, planned, kernel in calls:
            assert sent == planned > 0
            assert kernel == "reference"


def _some_gradients(group, rank):
    layout, mask = Layout.zigzag(18, 2), Mask.causal(18)
    inputs = make_inputs(18)
    sink = torch.zeros(4, dtype=torch.float64)
    right = run(group, rank, layout, mask, inputs, sink=sink)
    for wanted in itertools.product((False, True), repeat=4):
        if not any(wanted):
            continue
        local = [*(shard(x, layout, rank, 2) for x in inputs[:3]), sink.clone()]
        for x, flag in zip(local, wanted, strict=True):
            x.requires_grad_(flag)
        out = attention(*local[:3], plan=plan_attention(layout, mask), group=group, sink=local[3])
        out.backward(shard(inputs.dout, layout, rank, 2))
        for x, flag, grad in zip(local, wanted, right[1:], strict=True):
            assert torch.equal(x.grad, grad) if flag else x.grad is None
    with torch.no_grad():
        assert not attention(*local[:3], plan=plan_attention(layout, mask), group=group).requires_grad
    plain = [shard(x, layout, rank, 2) for x in inputs[:3]]
    assert not attention(*plain, plan=plan_attention(layout, mask), group=group).requires_grad
    return True


def test_only_some_need_a_gradient():
    assert run_ranks(2, _some_gradients) == [True] * 2


VIEWS = {
    "batch, slots, heads": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "slots first": lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "dims before slots": lambda x: x.mT.contiguous().mT,
    "every second": lambda x: torch.stack((x, x + 1), -1)[..., 0],
}


def _views(group, rank, kernel):
    S, heads = 24, (4, 2)
    for layout, mask in itertools.product(
        (Layout.zigzag(S, 2), Layout.striped(S, 2, slots=13)), (Mask.causal(S), Mask.causal(S, window=5))
    ):
        inputs = make_inputs(S, heads, batch=2)
        right = run(group, rank, layout, mask, inputs, kernel=kernel)
        for name, view in VIEWS.items():
            q, k, v = (view(shard(x, layout, rank, 2)).detach().requires_grad_() for x in inputs[:3])
            assert not q.is_contiguous()
            out = attention(q, k, v, plan=plan_attention(layout, mask), group=group, kernel=kernel)
            out.backward(view(shard(inputs.dout, layout, rank, 2)))
            for got, want in zip((out.detach(), q.grad, k.grad, v.grad), right[:4], strict=True):
                # Matrix products over strided rows may add up in another order.
                bound = 0 if q.stride(-1) == 1 else 1e-14
                assert relative_error(got, want) <= bound, (name, layout.name)
        # The gradient of a sum is one element seen everywhere.
        q, k, v = (shard(x, layout, rank, 2).requires_grad_() for x in inputs[:3])
        attention(q, k, v, plan=plan_attention(layout, mask), group=group, kernel=kernel).sum().backward()
        ones = run(group, rank, layout, mask, inputs._replace(dout=torch.ones_like(inputs.dout)), kernel=kernel)
        assert all(relative_error(x.grad, want) < 1e-12 for x, want in zip((q, k, v), ones[1:4], strict=True))
    return True


@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
def test_permuted_views_are_as_contiguous_tensors(kernel):
    assert run_ranks(2, _views, kernel) == [True] * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_results_have_the_type_of_the_inputs(dtype):
    inputs = make_inputs(20, dtype=dtype)
    for results in run_ranks(3, run_many, [(Layout.zigzag(20, 3), Mask.causal(20), inputs, {})]):
        assert [x.dtype for x in results[0][:4]] == [dtype] * 4
        assert all(x.isfinite().all() for x in results[0][:4])


def test_two_runs_give_the_same_bits():
    inputs = make_inputs(61, (12, 6), batch=2, dtype=torch.float32)
    cases = [
        (Layout.named(name, 61, 4), mask, inputs, {"route": route, "inner": inner})
        for name in NAMES for mask in (Mask.causal(61), Mask.documents([20, 30, 11], window=9))
        for route, inner in ROUTES
    ]  # fmt: skip
    for results in run_ranks(4, run_many, cases + cases):
        for one, other in zip(results[: len(cases)], results[len(cases) :], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one[:4], other[:4], strict=True))


@pytest.mark.parametrize(("route", "inner"), [r for r in ROUTES if r[0] != "ring"])
def test_sinks_on_other_routes(route, inner):
    """Where heads are exchanged, rank r of 4 uses sinks 2r, 2r+1 of 8; the gradients of all ranks add up to the whole."""
    S, heads, P = 22, (8, 2), 4
    inputs = make_inputs(S, heads, batch=2)
    sink = torch.linspace(-1.0, 3.0, 8, dtype=torch.float64)
    masks = [Mask.causal(S), Mask.bands(S, [(3, S, 0, S - 4, None, None)])]
    cases = [
        (Layout.named(name, S, P, 8), mask, inputs, {"sink": sink, "route": route, "inner": inner})
        for mask in masks for name in NAMES
    ]  # fmt: skip
    by_rank = run_ranks(P, run_many, cases)
    for n, (layout, mask, _, _) in enumerate(cases):
        want = dense_attention(inputs, mask, sink=sink)
        for number in range(4):
            got = unshard([results[n][number] for results in by_rank], layout, 2)
            assert relative_error(got, want[number]) < 1e-10
        dsinks = [results[n][4] for results in by_rank]
        assert relative_error(torch.stack(dsinks).sum(0), want.dsink) < 1e-10
        if route == "ulysses":
            for rank, dsink in enumerate(dsinks):
                assert torch.nonzero(dsink).flatten().tolist() == [2 * rank, 2 * rank + 1]


def _there(group, rank):
    """`x = 100 b + 10 s + h` of 2 rows of 4 tokens, 2 heads, zigzag on 2 ranks."""
    layout = Layout.zigzag(4, 2)
    work = plan_attention(layout, Mask.causal(4), "ulysses", (2, 2)).rank_plan(rank)
    b, h, s = (torch.arange(float(n)) for n in (2, 2, 4))
    x = (100 * b.view(2, 1, 1, 1) + 10 * s.view(1, 1, 4, 1) + h.view(1, 2, 1, 1)).contiguous()
    local = shard(x, layout, rank, 2)
    with call("forward", "ulysses", "none", rank, local.device) as meter:
        exchange = HeadExchange.of(work, group, meter)
        (together,) = exchange.there([local])
        (back,) = exchange.back([together], [], dtype=local.dtype)
    assert torch.equal(back, local)
    return together[..., 0].tolist(), meter.bytes_sent


def test_after_the_exchange_every_row_of_a_batch_has_its_own_tokens():
    for rank, (together, sent) in enumerate(run_ranks(2, _there)):
        assert together == [[[100 * b + 10 * s + rank for s in range(4)]] for b in range(2)]
        assert sent == 2 * (2 * 1 * 2) * 4  # there and back: 2 batch rows, 1 head, 2 tokens of 4 bytes


@pytest.mark.parametrize(("route", "inner"), ROUTES)
def test_gradients_of_a_kv_head_are_sums_over_all_its_query_heads(route, inner):
    """q = k = 0, full mask, dout = 1: each of 4 query heads gives dv = 1; half of them, on one of two replicas, would give 2."""
    S, layout = 12, Layout.zigzag(12, 4)
    zeros, zeros_kv = torch.zeros(1, 8, S, 4, dtype=torch.float64), torch.zeros(1, 2, S, 4, dtype=torch.float64)
    inputs = Inputs(zeros, zeros_kv, zeros_kv, torch.ones_like(zeros))
    for (results,) in run_ranks(4, run_many, [(layout, Mask.full(S), inputs, {"route": route, "inner": inner})]):
        torch.testing.assert_close(results[3], torch.full_like(results[3], 4.0))


def _replica(group, rank, routes):
    """8 ranks: ulysses 2, ring 2, dp 2. Each replica has a batch of its own."""
    groups = [dist.new_group(range(4)), dist.new_group(range(4, 8))]
    replica, place = divmod(rank, 4)
    inputs, mask, layout = make_inputs(26, (4, 2), seed=replica), Mask.causal(26), Layout.zigzag(26, 4)
    want = dense_attention(inputs, mask)
    for route, inner in routes:
        got = run(groups[replica], place, layout, mask, inputs, route, inner)
        for x, whole in zip(got[:4], want[:4], strict=True):
            assert relative_error(x, shard(whole, layout, place, 2)) < 1e-10, (route, rank)
    return dist.get_rank(groups[replica])


def test_hops_and_exchanges_stay_in_the_group_of_a_replica():
    assert run_ranks(8, _replica, ROUTES) == [0, 1, 2, 3] * 2


def _fresh_memory_is_nan(group, rank):
    return bool(torch.empty(100).isnan().all())


def test_memory_that_nobody_wrote_is_nan_in_the_ranks():
    assert run_ranks(2, _fresh_memory_is_nan) == [True] * 2


def test_gradients_of_replicated_kv_heads_are_summed_in_fp32():
    """q = k = 0, full mask, 4 query heads of one KV head on 4 ranks: dv sums what each head's dout gives, 256 + 1 + 1 + 1 = 259.
    bf16 rounds that to 260; added up in bf16, each 1 is lost against 256."""
    S, layout = 8, Layout.contiguous(8, 4)
    q, kv = torch.zeros(1, 4, S, 4, dtype=torch.bfloat16), torch.zeros(1, 1, S, 4, dtype=torch.bfloat16)
    dout = torch.tensor([256.0, 1, 1, 1]).view(1, 4, 1, 1).expand(1, 4, S, 4).bfloat16()
    inputs = Inputs(q, kv, kv, dout)
    by_rank = run_threads(4, run_many, [(layout, Mask.full(S), inputs, {"route": "ulysses"})])
    assert {float(x) for results in by_rank for x in results[0][3].flatten()} == {260.0}
