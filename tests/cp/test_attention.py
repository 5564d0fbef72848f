"""The public function: what it takes, what it refuses, what it keeps."""

import gc
import weakref

import pytest

from longspan.comm.traffic import record
from longspan.cp.attention import attention, share_of
from longspan.errors import SpecError
from longspan.plan import Layout, Mask, plan_attention
from tests.oracle import dense_attention, make_inputs, raised, relative_error
from tests.ranks import run_ranks

ALONE = plan_attention(Layout.zigzag(12, 1), Mask.causal(12))


def test_one_rank_needs_no_group():
    inputs = make_inputs(12)
    q, k, v = (x.requires_grad_() for x in inputs[:3])
    out = attention(q, k, v, plan=ALONE)
    out.backward(inputs.dout)
    for got, want in zip((out, q.grad, k.grad, v.grad), dense_attention(inputs, ALONE.mask), strict=False):
        assert relative_error(got, want) < 1e-12


@pytest.mark.parametrize("keyword", ["dropout_p", "is_causal", "attn_mask", "enable_gqa", "soft_cap"])
def test_keywords_it_does_not_know_are_errors(keyword):
    q, k, v, _ = make_inputs(12)
    with pytest.raises(TypeError, match=rf"attention\(\) got an unexpected keyword argument '{keyword}'"):
        attention(q, k, v, plan=ALONE, **{keyword: 0.1})


def test_plan_is_not_positional():
    q, k, v, _ = make_inputs(12)
    with pytest.raises(TypeError, match="takes 3 positional arguments but 4"):
        attention(q, k, v, ALONE)


def test_a_plan_of_more_ranks_than_one_needs_a_group():
    q, k, v, _ = make_inputs(6)
    plan = plan_attention(Layout.zigzag(12, 2), Mask.causal(12))
    with pytest.raises(SpecError) as error:
        attention(q, k, v, plan=plan)
    assert str(error.value) == "the plan is for 2 ranks and the group has 1\n\nhint: give group="


def _wrong_degree(group, rank):
    q, k, v, _ = make_inputs(3)
    with record() as calls:
        refusals = [
            raised(attention, q, k, v, plan=plan_attention(Layout.zigzag(12, 4), Mask.causal(12)), group=group),
            raised(attention, q, k, v, plan=plan_attention(Layout.zigzag(12, 4), Mask.causal(12))),
            raised(attention, q, k, v, plan=ALONE, group="cp"),
        ]
    return refusals, len(calls)


def test_a_group_of_another_size_than_the_plan():
    right = [
        ("SpecError", "the plan is for 4 ranks and the group has 2\n\nhint: make the layout with ranks=2"),
        ("SpecError", "the plan is for 4 ranks and the group has 1\n\nhint: give group="),
        ("SpecError", "str is neither a process group nor a DeviceMesh"),
    ]
    assert run_ranks(2, _wrong_degree) == [(right, 0)] * 2


def test_a_share_is_made_once_for_a_plan_and_kernel():
    plan = plan_attention(Layout.zigzag(12, 1), Mask.causal(12))
    assert share_of(plan, None) is share_of(plan, None)
    assert share_of(plan, None) is not share_of(plan, None, "reference")
    twin = plan_attention(Layout.zigzag(12, 1), Mask.causal(12))
    assert share_of(twin, None) is not share_of(plan, None)
    assert share_of(twin, None).share.digest == plan.digest


def test_a_plan_that_nobody_uses_any_more_is_freed():
    """Every micro-batch has a plan of its own: one that stayed would be a leak for as long as training runs."""

    def attend():
        plan = plan_attention(Layout.zigzag(12, 1), Mask.documents([5, 7]))
        q, k, v, dout = make_inputs(12)
        attention(q.requires_grad_(), k, v, plan=plan).backward(dout)
        return weakref.ref(plan)

    plans = [attend() for _ in range(3)]
    gc.collect()
    assert [plan() for plan in plans] == [None] * 3
