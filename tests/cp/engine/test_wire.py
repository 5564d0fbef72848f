"""Keys and values rounded for their way: how far, what is on the wire, and that attention is that of the rounded rows."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longspan.comm.hops import Hop
from longspan.comm.sharding import shard
from longspan.comm.traffic import record
from longspan.cp.attention import attention
from longspan.cp.engine.wire import WIRES
from longspan.plan import Layout, Mask, plan_attention
from longspan.plan.comm_dtype import row_bytes
from tests.examples import examples
from tests.oracle import Inputs, dense_attention, make_inputs, relative_error
from tests.plan.strategies import inners_of
from tests.ranks import run_ranks


def there_and_back(name, x):
    wire = WIRES[name]
    return wire.decode(wire.encode(x), x)


def greatest_of_block(x):
    """Of every element the greatest of the 32 (fewer at the end) that share its exponent."""
    return torch.cat([part.abs().amax(-1, keepdim=True).expand_as(part) for part in x.split(32, dim=-1)], dim=-1)


@examples(200)
@given(
    st.integers(1, 100), st.integers(-110, 110), st.integers(0, 2**30), st.sampled_from([torch.float32, torch.float64])
)
def test_fp8_is_off_by_at_most_a_sixteenth_of_the_greatest_of_its_block(dim, power, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, 4, dim, generator=generator, dtype=torch.float64)
    # Elements of one block of very different sizes, some of them 0.
    x = (x * 2.0 ** torch.randint(-12, 3, x.shape, generator=generator) * 2.0**power).to(dtype)
    x[torch.rand(x.shape, generator=generator) < 0.1] = 0.0
    got = there_and_back("fp8", x)
    assert (got.dtype, got.shape) == (x.dtype, x.shape)
    assert ((got - x).abs() <= 2**-4 * greatest_of_block(x)).all()
    assert got[x == 0].eq(0).all()
    assert (got * x >= 0).all(), "a sign was lost"
    # Rounding what is rounded changes nothing: rows that travel twice are as those that travel once.
    assert torch.equal(there_and_back("fp8", got), got)


@pytest.mark.parametrize("dim", [1, 31, 32, 33, 64, 80])
def test_fp8_is_bytes_with_an_exponent_for_every_32_elements(dim):
    x = torch.randn(2, 3, 5, dim)
    encoded = WIRES["fp8"].encode(x)
    assert encoded.dtype == torch.uint8
    assert encoded.shape == (2, 3, 5, dim + -(-dim // 32))
    assert WIRES["fp8"].width(x) == (encoded.shape[3], torch.uint8)
    assert encoded.nbytes == 2 * 3 * 5 * row_bytes("fp8", dim, 4)


def test_fp8_by_hand():
    # The greatest of the block, 6 = 1.5 * 2^2, becomes 1.5 * 2^8 = 384: the exponent is 2 - 8, its byte 121.
    x = torch.zeros(1, 1, 1, 32)
    x[..., :4] = torch.tensor([6.0, -3.0, 1.0, 0.1])
    encoded = WIRES["fp8"].encode(x)[0, 0, 0]
    assert encoded[-1].item() == 127 - 6
    scaled = encoded[:4].view(torch.float8_e4m3fn).float().tolist()
    assert scaled == [384.0, -192.0, 64.0, 6.5]  # 0.1 * 64 = 6.4 lies between 6 and 6.5
    assert there_and_back("fp8", x)[0, 0, 0, :4].tolist() == [6.0, -3.0, 1.0, 6.5 / 64]


@pytest.mark.parametrize(
    "value", [0.0, 1.0, -448.0, 2.0**100, 2.0**-100, 1.5 * 2.0**126, torch.finfo(torch.float32).tiny]
)
def test_powers_and_extremes_survive_fp8(value):
    x = torch.full((1, 1, 1, 40), value)
    assert torch.equal(there_and_back("fp8", x), x)


def test_the_greatest_float_stays_finite_and_the_least_may_vanish():
    for name in ("bf16", "fp8"):
        tiny = there_and_back(name, torch.full((1, 1, 1, 8), 1e-45))
        assert tiny.abs().max() <= 2e-45
    most = torch.finfo(torch.float32).max
    got = there_and_back("fp8", torch.full((1, 1, 1, 8), most))
    assert got.isfinite().all()
    assert (most - got).abs().max() <= most * 2**-3


@pytest.mark.parametrize("name", [None, "bf16", "fp8"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so(name, value):
    """A run that has diverged must not look sound because its keys were rounded."""
    x = torch.randn(1, 2, 3, 40)
    x[0, 1, 2, 35] = value
    got = there_and_back(name, x)
    assert not got[0, 1, 2, 35].isfinite()
    assert got[0, 0].isfinite().all()
    assert got[0, 1, :2].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_bf16_is_the_nearest_bf16(dtype):
    x = torch.randn(1, 2, 3, 7, dtype=torch.float64).to(dtype)
    assert WIRES["bf16"].encode(x).dtype == torch.bfloat16
    assert torch.equal(there_and_back("bf16", x), x.to(torch.bfloat16).to(dtype))
    assert WIRES["bf16"].width(x) == (7, torch.bfloat16)
    assert WIRES[None].encode(x) is x


WIRED = [
    (route, inner)
    for route in ("ring", "rotate", "allgather", "exchange", "ulysses", "usp", "exchange-ulysses", "ulysses-ring")
    for inner in inners_of(route, 4) if inner is None or inner == 2
]  # fmt: skip


def right(inputs: Inputs, plan, rank: int, name: str):
    """Dense attention of this rank's queries over its own keys and values as they are and all others rounded; where heads are
    exchanged, all are rounded."""
    rounded = {x: there_and_back(name, getattr(inputs, x)) for x in ("k", "v")}
    if plan.rank_plan(rank).heads is None:
        positions = torch.from_numpy(plan.layout.positions(rank)[: plan.layout.counts[rank]])
        for x, tensor in rounded.items():
            tensor[:, :, positions] = getattr(inputs, x)[:, :, positions]
    return dense_attention(inputs._replace(**rounded), plan.mask)


def _wired(group, rank, cases, name):
    inputs = make_inputs(37, (8, 4), batch=2, dim=40, dim_v=24)
    for plan in cases:
        live = int(plan.layout.counts[rank])
        q, k, v = (shard(x, plan.layout, rank, 2, fill=float("nan")).requires_grad_() for x in inputs[:3])
        sent, kept = [], Hop.post

        def post(hop, *arguments, sent=sent, kept=kept, **keywords):
            sent.extend(x for _, x in hop.sends)
            return kept(hop, *arguments, **keywords)

        Hop.post = post
        try:
            with record() as calls:
                out = attention(q, k, v, plan=plan, group=group)
                forward = len(sent)
                out.backward(shard(inputs.dout, plan.layout, rank, 2, fill=0.0))
        finally:
            Hop.post = kept
        place = (plan.route, plan.layout.name, name)
        want = right(inputs, plan, rank, name)
        for got, whole in ((out, want.out), (q.grad, want.dq)):
            local = shard(whole, plan.layout, rank, 2)[:, :, :live]
            error = relative_error(got.detach()[:, :, :live], local, floor=whole.abs().max().item())
            assert error < 1e-10, (*place, error)
        for call in calls:
            assert call.bytes_sent == 2 * plan.bytes(rank, call.phase, (40, 24), 8), (*place, call)
        # Keys and values are the only thing that is rounded: on routes that move rows, all that forward sends.
        small = {x.dtype for x in sent[:forward]}
        if plan.rank_plan(rank).heads is None and forward:
            assert small == {torch.uint8 if name == "fp8" else torch.bfloat16}, (*place, small)
            rows = sum(x.numel() // x.shape[-1] for x in sent[:forward])
            assert {x.shape[-1] for x in sent[:forward]} == ({42, 25} if name == "fp8" else {40, 24}), place
            assert rows == plan.rank_plan(rank).rows_sent * 2 * 2 * 4, place
        # Backward sends rounded rows again where rows move, and everything else as wide as it is.
        assert {x.dtype for x in sent[forward:]} <= {torch.float64, *small}, place
    return True


@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_attention_is_that_of_rounded_rows_and_the_wire_holds_what_the_plan_counts(name):
    S, P = 37, 4
    cases = [
        plan_attention(Layout.named(layout, S, P, slots), mask, route, (8, 4), inner, comm_dtype=name)
        for route, inner in WIRED
        for layout, slots, mask in (
            ("zigzag", None, Mask.causal(S)), ("striped", 12, Mask.full(S)), ("contiguous", None, Mask.causal(S, window=13)),
        )
    ]  # fmt: skip
    assert run_ranks(P, _wired, cases, name) == [True] * P


def _sent_in_backward(group, rank, plans):
    found = []
    for plan in plans:
        inputs = make_inputs(plan.seq_len, plan.heads, dim=40, dtype=torch.bfloat16)
        q, k, v, dout = (shard(x, plan.layout, rank, 2) for x in inputs)
        for x in (q, k, v):
            x.requires_grad_()
        out = attention(q, k, v, plan=plan, group=group)
        sent, kept = Counter(), Hop.post

        def post(hop, *arguments, sent=sent, kept=kept, **keywords):
            for _, x in hop.sends:
                sent[x.dtype] += x.nbytes
            return kept(hop, *arguments, **keywords)

        Hop.post = post
        try:
            out.backward(dout)
        finally:
            Hop.post = kept
        found.append((dict(sent), plan.bytes(rank, "backward", 40, 2)))
    return found


@pytest.mark.parametrize(("name", "dtype", "row"), [("fp8", torch.uint8, 42), ("bf16", torch.bfloat16, 80)])
def test_gradients_of_bf16_rows_travel_in_fp32(name, dtype, row):
    S, P, K = 32, 4, 2
    routes = ("ring", "exchange", "allgather", "rotate")
    plans = [plan_attention(Layout.zigzag(S, P), Mask.full(S), r, (4, K), comm_dtype=name) for r in routes]
    rows = S // P * (P - 1) * K * 2
    right = {dtype: rows * row, torch.float32: rows * 40 * 4}
    for found in run_ranks(P, _sent_in_backward, plans):
        assert found == [(right, sum(right.values()))] * len(routes)


def _gradients_of_keys(group, rank, plan, inputs):
    q, k, v = (shard(x, plan.layout, rank, 2).requires_grad_() for x in inputs[:3])
    attention(q, k, v, plan=plan, group=group).backward(shard(inputs.dout, plan.layout, rank, 2))
    return k.grad, v.grad


def test_gradients_of_keys_pass_the_rounding_as_if_it_were_not_there():
    """dK, dV are those at the rounded keys and values: with inputs that bf16 holds, the dense ones."""
    S, P = 24, 4
    inputs = Inputs(*(x.to(torch.bfloat16).double() for x in make_inputs(S, (4, 2))))
    mask = Mask.causal(S)
    want = dense_attention(inputs, mask)
    for route in ("ring", "exchange", "ulysses"):
        plan = plan_attention(Layout.zigzag(S, P), mask, route, (4, 2), comm_dtype="bf16")
        for rank, (dk, dv) in enumerate(run_ranks(P, _gradients_of_keys, plan, inputs)):
            assert relative_error(dk, shard(want.dk, plan.layout, rank, 2)) < 1e-12, route
            assert relative_error(dv, shard(want.dv, plan.layout, rank, 2)) < 1e-12, route
