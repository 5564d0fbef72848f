"""Who takes which heads and rows in an exchange: by hand, against positions, and against every other way to deal heads out."""

import itertools
import re
from functools import cache
from math import gcd

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.errors import SpecError
from longspan.plan import Layout, Mask, check_heads, head_stages, plan_attention
from longspan.plan.head_shares import check_head_degree
from tests.examples import examples

from .strategies import layouts

thorough = examples(200)


def dealt(heads, degree, S=24):
    """The share of every member of a group of `degree` ranks. A route that works in stages exchanges heads on one rank too."""
    plan = plan_attention(Layout.contiguous(S, degree), Mask.causal(S), "upipe", heads)
    return [plan.rank_plan(rank).heads for rank in range(degree)]


def test_8_query_and_2_kv_heads_on_4_ranks():
    shares = dealt((8, 2), 4)
    for rank, share in enumerate(shares):
        assert share.query == ((0, 2), (2, 4), (4, 6), (6, 8))
        assert [kv[0] for kv in share.kv] == [0, 0, 1, 1]
        assert share.kv[rank] == ([0, 0, 1, 1][rank], [0, 0, 1, 1][rank] + 1)
        assert (share.num_query, share.num_kv, share.rows, share.replicates) == (2, 1, 24, True)
        assert share.others == [m for m in range(4) if m != rank]


def test_4_ranks_16_tokens_8_heads():
    """`(4, 8, D)` becomes `(16, 2, D)`: 4 tokens of all heads, then all tokens of 2 heads."""
    plan = plan_attention(Layout.zigzag(16, 4), Mask.causal(16), "ulysses", heads=(8, 8))
    for rank in range(4):
        share = plan.rank_plan(rank)
        assert (share.tokens, share.heads.query[-1][1]) == (4, 8)
        assert (share.rows, share.heads.num_query, share.heads.num_kv) == (16, 2, 2)


def test_runs_of_unlike_heads_are_cut_into_blocks():
    # 12 query heads of 4 KV heads on 2 ranks: even. On 3 ranks of 12/2: the second serves 2 of KV head 0 and 2 of KV head 1.
    assert dealt((12, 4), 2)[0].blocks == (((0, 6), (0, 2)),)
    assert [share.blocks for share in dealt((12, 2), 3)] == [
        (((0, 4), (0, 1)),),
        (((0, 4), (0, 2)),),
        (((0, 4), (0, 1)),),
    ]
    # 15 of 3 on 5 ranks of 3: rank 1 has query heads 3..5, two of KV head 0 and one of KV head 1.
    assert dealt((15, 3), 5)[1].blocks == (((0, 2), (0, 1)), ((2, 3), (1, 2)))
    # 20 of 5 on 2 ranks: two whole KV heads and half a third.
    assert dealt((20, 5), 2)[0].blocks == (((0, 8), (0, 2)), ((8, 10), (2, 3)))
    assert dealt((20, 5), 2)[1].blocks == (((0, 2), (0, 1)), ((2, 10), (1, 3)))


some_heads = st.tuples(st.integers(1, 6), st.integers(1, 8), st.integers(1, 6)).map(lambda n: (n[0] * n[1], n[0], n[2]))


@thorough
@given(some_heads)
def test_heads_are_dealt_out_with_as_few_copies_of_kv_heads_as_can_be(drawn):
    num_q, num_kv, degree = drawn
    if num_q % degree:
        degree = gcd(num_q, degree)
    group = num_q // num_kv
    shares = dealt((num_q, num_kv), degree)
    held = [share.kv[share.member] for share in shares]
    assert sum(stop - start for start, stop in held) == num_kv + degree - gcd(num_kv, degree)
    assert shares[0].replicates == (num_kv % degree != 0)
    assert [h for share in shares for h in range(*share.query[share.member])] == list(range(num_q))
    for share in shares:
        query, kv = share.query[share.member], share.kv[share.member]
        assert sorted({h // group for h in range(*query)}) == list(range(*kv))
        # Blocks cover both sides in order, each KV head of one serving the same number of query heads, and the right ones.
        assert [n for q, _ in share.blocks for n in range(*q)] == list(range(share.num_query))
        assert [n for _, k in share.blocks for n in range(*k)] == list(range(share.num_kv))
        for (q0, q1), (k0, k1) in share.blocks:
            served = (q1 - q0) // (k1 - k0)
            assert (q1 - q0) == served * (k1 - k0)
            for n in range(q0, q1):
                assert (query[0] + n) // group == kv[0] + k0 + (n - q0) // served


@cache
def fewest_copies(num_q, num_kv, degree) -> int:
    """KV heads held by all members together in the best of all ways to deal the query heads out evenly."""
    group, size = num_q // num_kv, num_q // degree

    @cache
    def best(left: tuple[int, ...], members: int) -> int:
        if not members:
            return 0
        ways = itertools.product(*(range(n + 1) for n in left))
        return min(
            sum(n > 0 for n in way) + best(tuple(a - b for a, b in zip(left, way, strict=True)), members - 1)
            for way in ways if sum(way) == size
        )  # fmt: skip

    return best((group,) * num_kv, degree)


@pytest.mark.parametrize(
    ("num_q", "num_kv", "degree"),
    [
        (6, 2, 3),
        (8, 2, 4),
        (12, 4, 6),
        (12, 3, 4),
        (6, 3, 2),
        (9, 3, 3),
        (10, 2, 5),
        (12, 2, 4),
        (15, 3, 5),
        (12, 4, 3),
    ],
)
def test_no_way_to_deal_heads_out_copies_fewer_kv_heads(num_q, num_kv, degree):
    held = [share.num_kv for share in dealt((num_q, num_kv), degree)]
    assert sum(held) == fewest_copies(num_q, num_kv, degree) == num_kv + degree - gcd(num_kv, degree)


@st.composite
def groups(draw):
    """A layout of `degree * others` ranks, cut into groups of `degree`, neighbours or not."""
    degree, others = draw(st.sampled_from([(2, 1), (2, 2), (3, 2), (2, 3), (4, 2), (5, 1), (2, 4)]))
    return draw(layouts(draw(st.integers(1, 60)), (degree * others,), with_slots=True)), degree, draw(st.booleans())


@thorough
@given(groups())
def test_rows_of_every_member_have_their_place_among_all_rows(drawn):
    layout, degree, adjacent = drawn
    merged, others = layout.merged(degree, adjacent), layout.ranks // degree
    route, inner = ("usp", degree) if adjacent else ("ulysses-ring", others)
    plan = plan_attention(layout, Mask.causal(layout.seq_len), route, (degree, degree), inner)
    for group in range(others):
        members = tuple(range(group * degree, (group + 1) * degree) if adjacent else range(group, layout.ranks, others))
        share = plan.rank_plan(members[0]).heads
        if share is None:  # no rank sees another's keys
            assert layout.seq_len == layout.counts.max()
            continue
        assert share.members == members
        together = np.full(merged.num_slots(group), -1)
        for member, places in zip(members, share.places, strict=True):
            tokens = layout.positions(member)[: layout.counts[member]]
            covered = [row for place in places for row in range(place.start, place.stop)]
            assert covered == list(range(len(tokens)))
            for place in places:
                rows = place.first + place.step * np.arange(place.stop - place.start)
                assert (together[rows] == -1).all()
                together[rows] = tokens[place.start : place.stop]
        assert np.array_equal(together, merged.positions(group))
        assert share.tokens == tuple(int(layout.counts[m]) for m in members)
        assert share.rows == merged.counts[group]
        assert plan.rank_plan(members[0]).rows == merged.num_slots(group)


def test_bytes_there_and_back_by_hand():
    # 9 tokens as 3, 2, 2, 2 on 4 ranks, 8/2 heads; a row weighs 10 a query head and 3 a KV head.
    shares = dealt((8, 2), 4, S=9)
    there = [tokens * 3 * (2 * 10 + 1 * 3) for tokens in (3, 2, 2, 2)]
    back = [others * (2 * 10 + 1 * 3) for others in (6, 7, 7, 7)]
    assert [share.bytes_there(10, 3) for share in shares] == there
    assert [share.bytes_back(10, 3) for share in shares] == back


@pytest.mark.parametrize(
    ("degree", "heads", "tp", "level", "text"),
    [
        (
            4, (9, 3), 1, (),
            "ulysses degree 4 does not divide 9 query heads (3 KV heads)\n\n"
            'hint: use a ulysses degree of 1, 3 or 9; or route="ring"',
        ),
        (
            6, (9, 3), 1, (),
            "ulysses degree 6 does not divide 9 query heads (3 KV heads)\n\nhint: use a ulysses degree of 1, 3 or 9; "
            'keep 6 ranks by route="usp" with inner=3 (ulysses inside, ring outside); or route="ring"',
        ),
        (
            2, (9, 3), 1, ("inner", 6),
            'inner ulysses degree 2 does not divide 9 query heads (3 KV heads)\n\nhint: set inner=1 or 3; or route="ring"',
        ),
        (
            4, (6, 3), 2, ("outer", 12),
            "outer ulysses degree 4 does not divide 6 query heads (12 before tp=2) (3 KV heads)\n\n"
            'hint: set inner=2, 4, 6 or 12; lower tp; or route="ring"',
        ),
        (
            8, (4, 2), 2, (),
            "ulysses degree 8 does not divide 4 query heads (8 before tp=2) (2 KV heads)\n\n"
            "hint: use a ulysses degree of 1, 2 or 4; lower tp; "
            'keep 8 ranks by route="usp" with inner=4 (ulysses inside, ring outside); or route="ring"',
        ),
        (
            3, (1, 1), 1, (),
            "ulysses degree 3 does not divide 1 query heads (1 KV heads)\n\n"
            'hint: use a ulysses degree of 1; or route="ring"',
        ),
        (
            2, None, 1, (),
            "route 'ulysses' exchanges heads, but heads is not given\n\nhint: set heads=(query, KV)",
        ),
    ],
)  # fmt: skip
def test_refusals(degree, heads, tp, level, text):
    with pytest.raises(SpecError) as error:
        check_head_degree(degree, heads, "ulysses", tp, *level)
    assert str(error.value) == text


@pytest.mark.parametrize(("ranks", "num_q"), [(6, 9), (8, 12), (12, 8), (8, 4)])
def test_the_way_out_that_a_refusal_names_is_one(ranks, num_q):
    with pytest.raises(SpecError) as error:
        check_head_degree(ranks, (num_q, num_q), "ulysses", 1)
    inner = int(re.search(r"inner=(\d+)", error.value.hint)[1])
    plan = plan_attention(Layout.zigzag(48, ranks), Mask.causal(48), "usp", (num_q, num_q), inner)
    assert plan.degrees.levels == (ranks // inner, inner)
    assert inner > 1


def test_degrees_that_divide_are_accepted():
    for degree in (1, 2, 3, 4, 6, 12):
        check_head_degree(degree, check_heads(12, 4), "ulysses", 1)


@pytest.mark.parametrize(
    ("heads", "degree", "per_stage"), [((8, 2), 2, 2), ((8, 4), 2, 4), ((8, 8), 4, 4), ((12, 6), 3, 6)]
)
def test_stages_of_heads_take_every_head_once(heads, degree, per_stage):
    group = heads[0] // heads[1]
    for whole in dealt(heads, degree):
        stages = head_stages(whole, per_stage)
        assert sorted(h for stage in stages for h in stage.query) == list(range(heads[0]))
        assert sorted(h for stage in stages if stage.new_kv for h in stage.kv) == list(range(heads[1]))
        for stage in stages:
            assert len(stage.query) == per_stage
            assert stage.share.num_query == per_stage // degree
            mine = stage.query[slice(*stage.share.query[whole.member])]
            needed = stage.kv[slice(*stage.share.kv[whole.member])]
            assert sorted({h // group for h in mine}) == list(needed)
            assert set(mine) <= set(range(*whole.query[whole.member]))
