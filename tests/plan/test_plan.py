"""A plan as a value: counts, digest, copies, refusals."""

import copy
import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given

from longspan.errors import SpecError
from longspan.plan import Layout, Mask, check_heads, plan_attention
from tests.examples import examples

from .brute import visible
from .strategies import NAMES, layout_and_mask, plans


@pytest.mark.parametrize(("P", "K", "D", "itemsize"), [(2, 1, 64, 2), (4, 2, 64, 2), (8, 8, 16, 4), (5, 3, 8, 8)])
def test_a_plain_ring_sends_each_shard_to_all_others(P, K, D, itemsize):
    S = 40 * P
    plan = plan_attention(Layout.zigzag(S, P), Mask.full(S), heads=(K * 4, K))
    elements = 2 * S * (K * D) * (P - 1) // P
    assert [plan.bytes(rank, "forward", D, itemsize) for rank in range(P)] == [elements * itemsize] * P
    # Backward: keys and values again, and dK, dV (at least 4 bytes an element) as far, the last hop home.
    gradients = elements * max(itemsize, 4)
    assert [plan.bytes(rank, "backward", D, itemsize) for rank in range(P)] == [elements * itemsize + gradients] * P


def test_bytes_follow_the_kv_heads():
    layout, mask = Layout.zigzag(64, 4), Mask.causal(64)
    grouped, alone, unknown = (plan_attention(layout, mask, heads=heads) for heads in ((8, 2), (8, 8), None))
    for phase in ("forward", "backward"):
        sent = [grouped.bytes(rank, phase, 16, 2) for rank in range(4)]
        assert [alone.bytes(rank, phase, 16, 2) for rank in range(4)] == [4 * n for n in sent]
        assert [2 * unknown.bytes(rank, phase, 16, 2) for rank in range(4)] == sent
    assert grouped.bytes(1, "forward", (6, 4), 2) * 32 == grouped.bytes(1, "forward", 16, 2) * 10


@pytest.mark.parametrize(
    ("heads", "P"), [((8, 8), 2), ((8, 8), 4), ((8, 8), 8), ((8, 4), 2), ((8, 4), 4), ((12, 6), 6)]
)
@pytest.mark.parametrize("name", NAMES)
def test_ulysses_sends_its_share_of_queries_keys_values_and_output(heads, P, name):
    """`2 S (d + d_kv)(P - 1) / P^2` elements a rank, where P divides K; MHA: `4 S d (P - 1) / P^2`."""
    S, D = 16 * P, 32
    d, d_kv = heads[0] * D, heads[1] * D
    plan = plan_attention(Layout.named(name, S, P), Mask.causal(S), "ulysses", heads)
    elements = 2 * S * (d + d_kv) * (P - 1) // P**2
    if heads[0] == heads[1]:
        assert elements == 4 * S * d * (P - 1) // P**2
    assert [plan.bytes(rank, "forward", D, 2) for rank in range(P)] == [elements * 2] * P
    # Backward: d out goes there, dq, dk, dv come back; all in the inputs' type, as nothing is summed.
    assert [plan.bytes(rank, "backward", D, 2) for rank in range(P)] == [elements * 2] * P
    assert [plan.rows_received(rank) for rank in range(P)] == [S - S // P] * P


@pytest.mark.parametrize(("heads", "P"), [((8, 2), 4), ((8, 1), 8), ((8, 2), 8), ((12, 3), 6)])
def test_replicated_kv_heads_have_the_width_of_one_a_rank(heads, P):
    """K < P: keys and values travel `P D` wide, and their gradients in 4 bytes, being terms of a sum."""
    S, D = 4 * P * P, 32
    d, wide = heads[0] * D, P * D
    plan = plan_attention(Layout.zigzag(S, P), Mask.causal(S), "ulysses", heads)
    shared = S * (P - 1) // P**2
    assert [plan.bytes(rank, "forward", D, 2) for rank in range(P)] == [2 * shared * (d + wide) * 2] * P
    assert [plan.bytes(rank, "backward", D, 2) for rank in range(P)] == [2 * shared * (d * 2 + wide * 4)] * P


def test_usp_sends_heads_within_and_keys_and_values_between_groups():
    S, D, heads, inner, outer = 240, 16, (12, 6), 3, 4
    plan = plan_attention(Layout.zigzag(S, 12), Mask.full(S), "usp", heads, inner)
    tokens, rows = S // 12, S // outer
    exchanged = 2 * tokens * (inner - 1) * (heads[0] + heads[1]) // inner  # heads there and back
    ring = (outer - 1) * rows * 2 * heads[1] // inner
    assert [plan.bytes(rank, "forward", D, 2) for rank in range(12)] == [(exchanged + ring) * D * 2] * 12
    gradients = (outer - 1) * rows * 2 * heads[1] // inner * D * 4
    assert [plan.bytes(rank, "backward", D, 2) for rank in range(12)] == [(exchanged + ring) * D * 2 + gradients] * 12


@pytest.mark.parametrize("route", ["exchange", "allgather", "rotate"])
def test_where_every_rank_needs_every_row_each_sends_its_shard_to_all_others(route):
    S, P, K, D = 96, 4, 2, 16
    plan = plan_attention(Layout.striped(S, P), Mask.full(S), route, (8, K))
    rows = S // P * (P - 1)
    for rank in range(P):
        assert plan.bytes(rank, "forward", D, 2) == rows * 2 * K * D * 2
        assert plan.bytes(rank, "backward", D, 2) == rows * 2 * K * D * (2 + 4)


@examples(100)
@given(layout_and_mask(with_slots=True))
def test_areas_and_imbalance(case):
    layout, mask = case
    plan = plan_attention(layout, mask)
    dense = mask.dense()
    right = []
    for rank in range(layout.ranks):
        positions = layout.positions(rank)
        right.append(int(dense[positions[positions >= 0]].sum()))
    assert [plan.area(rank) for rank in range(layout.ranks)] == right
    assert sum(right) == mask.area
    assert plan.imbalance == (max(right) / np.mean(right) if mask.area else 1.0)
    assert (plan.ranks, plan.seq_len) == (layout.ranks, mask.seq_len)


@examples(60)
@given(plans(("ring", "exchange", "ulysses", "usp", "upipe"), 200, 400, (1, 2, 3, 4)))
def test_blocks_of_the_tiles_a_rank_computes(plan):
    for rank in range(plan.ranks):
        right = 0
        for seen in (visible(tile) for step in plan.rank_plan(rank).steps for tile in step.tiles):
            corners = itertools.product(*(range(0, size, 128) for size in seen.shape))
            right += sum(seen[i : i + 128, j : j + 128].any() for i, j in corners)
        assert plan.blocks(rank) == right / plan.degrees.heads
        assert 128 * 128 * plan.blocks(rank) >= plan.area(rank)


def test_blocks_by_hand():
    """Zigzag of 2 over 1,024 tokens: a causal tile of 512 (10 blocks), and a rectangle of 512 x 256 or 256 x 512 (8)."""
    layout, mask = Layout.zigzag(1024, 2), Mask.causal(1024)
    plan = plan_attention(layout, mask)
    assert [plan.blocks(rank) for rank in range(2)] == [18, 18]
    # Of all 1,024 tokens, 36 blocks, each rank computes half the heads.
    assert [plan_attention(layout, mask, "ulysses", (2, 1)).blocks(rank) for rank in range(2)] == [18, 18]
    with pytest.raises(SpecError, match="rank 2 is not one of the 2 ranks"):
        plan.blocks(2)


@pytest.mark.parametrize("P", range(1, 65))
def test_causal_zigzag_is_even(P):
    plan = plan_attention(Layout.zigzag(65536, P), Mask.causal(65536))
    assert 1.0 <= plan.imbalance <= 1.002


@pytest.mark.parametrize("route", ["ulysses", "usp", "exchange-ulysses", "ulysses-ring", "upipe", "ring", "allgather"])
def test_where_no_query_sees_another_ranks_keys_nothing_is_exchanged(route):
    mask = Mask.documents([16] * 8)
    inner = 2 if route in ("usp", "exchange-ulysses", "ulysses-ring") else None
    plan = plan_attention(Layout.contiguous(128, 4), mask, route, (8, 4), inner)
    for rank in range(4):
        assert (
            plan.bytes(rank, "forward", 64, 2) == plan.bytes(rank, "backward", 64, 2) == plan.rows_received(rank) == 0
        )
        assert plan.area(rank) == mask.area // 4
        assert len(plan.rank_plan(rank).stages) == 1
    if route not in ("ring", "allgather"):
        assert plan.reason == "no query sees another rank's keys: nothing is exchanged"
    assert plan.degrees.levels == {"usp": (2, 2), "exchange-ulysses": (2, 2), "ulysses-ring": (2, 2)}.get(route)


def test_planning_one_rank_does_not_plan_the_others():
    plan = plan_attention(Layout.zigzag(4096, 1024), Mask.causal(4096))
    share = plan.rank_plan(7)
    assert plan.rank_plan(7) is share
    assert list(plan._shares) == [7]


def test_digest_tells_every_part_apart():
    S = 32
    layout, mask = Layout.zigzag(S, 4), Mask.causal(S)
    plans = [
        plan_attention(layout, mask),
        plan_attention(layout, mask, heads=(4, 2)),
        plan_attention(layout, mask, heads=(4, 4)),
        plan_attention(Layout.contiguous(S, 4), mask),
        plan_attention(Layout.striped(S, 4), mask),
        plan_attention(Layout.zigzag(S, 2), mask),
        plan_attention(Layout.zigzag(S, 4, slots=8), mask),
        plan_attention(Layout.zigzag(S, 4, slots=9), mask),
        plan_attention(layout, Mask.full(S)),
        plan_attention(layout, Mask.causal(S, window=8)),
        plan_attention(layout, Mask.documents([16, 16])),
        plan_attention(layout, Mask.documents([15, 17])),
        plan_attention(Layout.zigzag(S + 1, 4), Mask.causal(S + 1)),
        *(plan_attention(layout, mask, route) for route in ("exchange", "rotate", "allgather")),
        plan_attention(layout, mask, "ulysses", (4, 2)),
        *(plan_attention(layout, mask, "usp", (4, 2), inner) for inner in (1, 2, 4)),
        plan_attention(layout, mask, "ulysses-ring", (4, 2), 2),
        plan_attention(layout, mask, comm_dtype="bf16"),
        plan_attention(layout, mask, comm_dtype="fp8"),
    ]
    assert len({plan.digest for plan in plans}) == len(plans)
    assert len(set(plans)) == len(plans)


def test_digest_is_equal_for_equal_parts_however_they_were_made():
    S = 32
    one = plan_attention(Layout.zigzag(S, 4), Mask.causal(S), heads=(4, 2))
    other = plan_attention(Layout.named("zigzag", S, 4), Mask.documents([0, S]), "ring", (4, 2))
    other.rank_plan(2)
    assert one.digest == other.digest
    assert one == other
    assert hash(one) == hash(other)
    assert one != "plan"


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan)), copy.copy])
@pytest.mark.parametrize("used", [False, True])
def test_plans_are_copied_and_pickled(duplicate, used):
    plan = plan_attention(Layout.striped(33, 4, slots=12), Mask.documents([20, 13], window=7), heads=(4, 2))
    if used:
        assert [plan.rank_plan(rank).rank for rank in range(4)] == [0, 1, 2, 3]
        assert plan.area(0) > 0
    twin = duplicate(plan)
    assert twin == plan
    assert twin.digest == plan.digest
    assert [twin.rank_plan(rank) for rank in range(4)] == [plan.rank_plan(rank) for rank in range(4)]
    assert twin.bytes(1, "backward", 8, 4) == plan.bytes(1, "backward", 8, 4)
    assert twin.reason == plan.reason


PLAN = plan_attention(Layout.zigzag(8, 2), Mask.causal(8))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: plan_attention(Layout.zigzag(8, 2), Mask.documents([4, 5])),
            "the layout covers 8 tokens and the mask 9\n\n"
            "hint: make document lengths sum to the seq_len of the layout, the global length of the row",
        ),
        (
            lambda: plan_attention(Layout.zigzag(8, 2), Mask.causal(8), route="tube"),
            "route 'tube' is not known\n\nhint: choose one of auto, ring, allgather, rotate, exchange, ulysses, upipe, usp, "
            "allgather-ulysses, exchange-ulysses, ulysses-ring",
        ),
        (
            lambda: plan_attention(Layout.zigzag(8, 2), Mask.causal(8), inner=2),
            "inner=2 does not apply to route 'ring', which has one level\n\nhint: leave inner out",
        ),
        (
            lambda: plan_attention(Layout.zigzag(8, 2), Mask.causal(8), heads=(9, 2)),
            "9 query heads are not divisible by 2 KV heads\n\nhint: KV heads may be one of 1, 3, 9",
        ),
        (
            lambda: check_heads(0, 0),
            "0 query heads are not divisible by 0 KV heads\n\nhint: give at least one head",
        ),
        (
            lambda: plan_attention(Layout.zigzag(8, 2), Mask.causal(8), comm_dtype="int4"),
            "comm_dtype 'int4' is not known\n\nhint: choose one of bf16, fp8, "
            "or leave comm_dtype out to send rows in their own dtype",
        ),
        (lambda: PLAN.area(2), "rank 2 is not one of the 2 ranks 0..1"),
        (lambda: PLAN.rank_plan(-1), "rank -1 is not one of the 2 ranks 0..1"),
        (
            lambda: PLAN.bytes(0, "sideways", 8, 2),
            'phase \'sideways\' is not known\n\nhint: choose "forward" or "backward"',
        ),
    ],
)
def test_refusals(make, text):
    with pytest.raises(SpecError) as error:
        make()
    assert str(error.value) == text
