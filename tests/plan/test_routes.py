"""Routes of two levels: who exchanges heads, among whom rows travel, and that every pair is computed once on every head."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from longspan.errors import SpecError
from longspan.names import ROUTES
from longspan.plan import Layout, Mask, plan_attention, route_of
from longspan.plan.routes import Degrees, degrees_of, inner_degree
from tests.examples import examples

from .brute import carry_out, check_transfers, owners
from .strategies import HEADS_MOVE, INNER_HEADS, OUTER_HEADS, head_degree, inners_of, plans


@examples(250)
@given(plans(HEADS_MOVE + INNER_HEADS + OUTER_HEADS))
def test_carried_out_by_brute_force(plan):
    layout, dense, P = plan.layout, plan.mask.dense(), plan.ranks
    assert P % plan.degrees.heads == 0
    for member in range(plan.degrees.heads):
        run = carry_out(plan, member)
        assert np.array_equal(run.pairs, dense)
        assert np.array_equal(run.home, dense)
    check_transfers(plan)
    owner, num_q = owners(layout), plan.heads[0]
    for rank in range(P):
        members = plan.degrees.members(plan.degrees.group_of(rank))
        assert rank in members
        share, mine = plan.rank_plan(rank), np.isin(owner, members)
        # The group's rows on this rank's share of the heads.
        heads = num_q // len(members)
        assert plan.area(rank) == dense[mine].sum() * heads / num_q
        assert share.live_rows == (mine.sum() if share.heads else layout.counts[rank])
        assert share.rows == (share.live_rows if layout.slots is None else layout.slots * len(members))
        if share.heads:
            assert (share.heads.members, share.heads.num_query) == (members, heads)
            assert share.heads.members[share.heads.member] == rank


@examples(100)
@given(plans(("exchange-ulysses", "allgather-ulysses")))
def test_groups_of_ranks_receive_what_their_queries_see(plan):
    """Striped and zigzag shards of a group, merged, against the mask."""
    dense, degrees = plan.mask.dense(), plan.degrees
    group = np.array([degrees.group_of(rank) for rank in range(plan.ranks)])[owners(plan.layout)]
    run = carry_out(plan)
    needed = [np.flatnonzero(dense[group == g].any(axis=0) & (group != g)).tolist() for g in range(degrees.rows)]
    if plan.route == "allgather-ulysses" and any(needed):
        needed = [np.flatnonzero(group != g).tolist() for g in range(degrees.rows)]
    assert [sorted(keys) for keys in run.arrived] == needed


def test_two_ranks_out_of_zigzag_of_four_hold_a_zigzag_half():
    layout = Layout.zigzag(16, 4)  # chunks of two tokens
    chunks = [(layout.positions(rank)[::2] // 2).tolist() for rank in range(4)]
    assert chunks == [[0, 7], [1, 6], [2, 5], [3, 4]]
    plan = plan_attention(layout, Mask.causal(16), "usp", heads=(4, 2), inner=2)
    assert [plan.rank_plan(rank).heads.members for rank in range(4)] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    merged = layout.merged(2, adjacent=True)
    assert (merged.positions(0)[::2] // 2).tolist() == [0, 1, 6, 7]
    assert np.array_equal(merged.positions(0), Layout.zigzag(16, 2).positions(0))
    assert np.array_equal(merged.positions(1), Layout.zigzag(16, 2).positions(1))
    # And the rows move as they do on a ring of two.
    ring = plan_attention(Layout.zigzag(16, 2), Mask.causal(16))
    for rank in range(4):
        assert _without_held(plan.rank_plan(rank)) == _without_held(ring.rank_plan(rank // 2))


def _without_held(share):
    """Stages without which slots a step's rows are: the same ones are other runs where spans touch."""
    return [replace(stage, steps=tuple(replace(step, held=()) for step in stage.steps)) for stage in share.stages]


def test_262144_tokens_inner_4_outer_2():
    plan = plan_attention(Layout.zigzag(262_144, 8), Mask.causal(262_144), "usp", heads=(32, 8), inner=4)
    for rank in range(8):
        share = plan.rank_plan(rank)
        assert (share.tokens, share.rows) == (32_768, 131_072)
        assert (share.heads.num_query, share.heads.num_kv) == (32 // 4, 8 // 4)


def test_8_ranks_of_ulysses_2_ring_2_dp_2():
    """Ranks 4..7 are the CP group of the second replica, in the same order as the first."""
    plan = plan_attention(Layout.zigzag(32, 4), Mask.causal(32), "usp", heads=(4, 2), inner=2)
    places = [(plan.rank_plan(rank).heads.member, plan.degrees.group_of(rank)) for rank in range(4)]
    assert [member for member, _ in places] == [0, 1, 0, 1]
    assert [ring for _, ring in places] == [0, 0, 1, 1]
    assert [plan.rank_plan(rank).ranks for rank in range(4)] == [(0, 2), (1, 3), (0, 2), (1, 3)]


def test_the_other_way_round_heads_cross_the_groups():
    plan = plan_attention(Layout.zigzag(24, 6), Mask.full(24), "ulysses-ring", heads=(6, 2), inner=2)
    assert [plan.rank_plan(rank).heads.members for rank in range(6)] == [(0, 2, 4), (1, 3, 5)] * 3
    assert [plan.rank_plan(rank).ranks for rank in range(6)] == [(0, 1), (0, 1), (2, 3), (2, 3), (4, 5), (4, 5)]
    assert plan.degrees.levels == (3, 2)


@pytest.mark.parametrize("P", [1, 2, 4, 6, 8])
def test_degrees_of_every_name(P):
    for route in ROUTES:
        for inner in inners_of(route, P):
            found = degrees_of(route, P, (24, 24), inner)
            degree = head_degree(route, P, inner)
            assert (found.heads, found.rows) == (degree, P // degree)
            groups = [found.members(group) for group in range(found.rows)]
            assert sorted(rank for members in groups for rank in members) == list(range(P))
            assert all(found.group_of(rank) == group for group, members in enumerate(groups) for rank in members)
            assert found.levels == (None if inner is None else (P // inner, inner))


@pytest.mark.parametrize(
    ("route", "ranks", "heads", "per_node", "degree"),
    [
        ("usp", 8, (32, 8), None, 8),  # no KV head is copied
        ("usp", 8, (32, 8), 4, 4),  # and within a node
        ("usp", 8, (8, 2), None, 2),
        ("usp", 8, (32, 1), None, 8),  # copied in any case: as many as the query heads allow
        ("usp", 8, (12, 1), None, 4),
        ("usp", 6, (9, 3), None, 3),
        ("usp", 4, (9, 3), None, 1),
        ("ulysses-ring", 8, (8, 2), 4, 2),  # heads cross the nodes here
        ("ulysses-ring", 8, (32, 8), None, 8),
    ],
)
def test_the_inner_degree_that_is_chosen(route, ranks, heads, per_node, degree):
    inner = inner_degree(route, ranks, heads, per_node)
    assert degrees_of(route, ranks, heads, inner).heads == degree


def test_members_of_strided_and_neighbouring_groups():
    near, far = Degrees(2, 3, True), Degrees(2, 3, False)
    assert [near.members(g) for g in range(3)] == [(0, 1), (2, 3), (4, 5)]
    assert [far.members(g) for g in range(3)] == [(0, 3), (1, 4), (2, 5)]


LAYOUT, MASK = Layout.zigzag(24, 4), Mask.causal(24)


@pytest.mark.parametrize(
    ("route", "heads", "inner", "reason"),
    [
        ("usp", (9, 3), None, "inner 1: ring, no heads are exchanged"),
        ("usp", (8, 8), 1, "inner 1: ring, no heads are exchanged"),
        ("exchange-ulysses", (9, 3), None, "inner 1: exchange, no heads are exchanged"),
        ("ulysses-ring", (8, 8), 4, "outer 1: ring, no heads are exchanged"),
        ("usp", (8, 8), 2, ""),
        ("usp", (8, 8), 4, ""),
        ("ulysses-ring", (8, 8), 1, ""),
        ("ring", (9, 3), None, ""),
    ],
)
def test_what_a_route_of_two_levels_comes_down_to(route, heads, inner, reason):
    plan = plan_attention(LAYOUT, MASK, route, heads, inner)
    assert plan.reason == reason
    plain = plan_attention(LAYOUT, MASK, "exchange" if "exchange" in route else "ring", heads)
    assert ([plan.rank_plan(n) for n in range(4)] == [plain.rank_plan(n) for n in range(4)]) == (
        bool(reason) or route == "ring"
    )


def test_one_rank_comes_down_to_nothing_worth_saying():
    assert plan_attention(Layout.zigzag(24, 1), MASK, "usp", (9, 3)).reason == ""


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: plan_attention(LAYOUT, MASK, "ulysses", (9, 3)),
            "ulysses degree 4 does not divide 9 query heads (3 KV heads)\n\n"
            'hint: use a ulysses degree of 1, 3 or 9; or route="ring"',
        ),
        (
            lambda: plan_attention(LAYOUT, MASK, "usp", (9, 3), 2),
            'inner ulysses degree 2 does not divide 9 query heads (3 KV heads)\n\nhint: set inner=1; or route="ring"',
        ),
        (
            lambda: plan_attention(LAYOUT, MASK, "usp", (6, 3), 4),
            'inner ulysses degree 4 does not divide 6 query heads (3 KV heads)\n\nhint: set inner=1 or 2; or route="ring"',
        ),
        (
            lambda: plan_attention(LAYOUT, MASK, "ulysses-ring", (6, 3), 1),
            'outer ulysses degree 4 does not divide 6 query heads (3 KV heads)\n\nhint: set inner=2 or 4; or route="ring"',
        ),
        (
            lambda: plan_attention(LAYOUT, MASK, "ulysses", (2, 1), tp=4),
            "ulysses degree 4 does not divide 2 query heads (8 before tp=4) (1 KV heads)\n\n"
            "hint: use a ulysses degree of 1 or 2; lower tp; "
            'keep 4 ranks by route="usp" with inner=2 (ulysses inside, ring outside); or route="ring"',
        ),
        (
            lambda: plan_attention(LAYOUT, MASK, "usp"),
            "route 'usp' exchanges heads, but heads is not given\n\nhint: set heads=(query, KV)",
        ),
        (
            lambda: plan_attention(LAYOUT, MASK, "usp", (8, 2), 3),
            "inner=3 does not divide the 4 ranks of the group\n\nhint: use 1, 2, 4",
        ),
        (
            lambda: plan_attention(LAYOUT, MASK, "usp", (8, 2), 0),
            "inner=0 does not divide the 4 ranks of the group\n\nhint: use 1, 2, 4",
        ),
        (
            lambda: plan_attention(LAYOUT, MASK, "ulysses", (8, 2), 2),
            "inner=2 does not apply to route 'ulysses', which has one level\n\nhint: leave inner out",
        ),
        (
            lambda: plan_attention(LAYOUT, MASK, "auto", (8, 2)),
            "plan_attention takes a named route, not 'auto'\n\nhint: name one of ring, allgather, rotate, exchange, ulysses, "
            "upipe, usp, allgather-ulysses, exchange-ulysses, ulysses-ring; or let longspan.advise.Planner(ranks, "
            'route="auto").plans(masks) choose',
        ),
        (
            lambda: route_of("tube"),
            "route 'tube' is not known\n\nhint: choose one of auto, ring, allgather, rotate, exchange, ulysses, upipe, usp, "
            "allgather-ulysses, exchange-ulysses, ulysses-ring",
        ),
    ],
)
def test_refusals(make, text):
    with pytest.raises(SpecError) as error:
        make()
    assert str(error.value) == text
