"""Which rank holds what: a partition at any length and degree."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.errors import SpecError
from longspan.names import LAYOUTS
from longspan.plan import Layout, spans_of
from longspan.plan.arguments import check_rank
from tests.examples import examples

from .strategies import NAMES, layouts

lengths = st.integers(1, 200)
some_layouts = lengths.flatmap(lambda S: layouts(S, tuple(range(1, 18)), with_slots=True))


@examples(300)
@given(some_layouts)
def test_every_token_has_one_slot(layout):
    positions = [layout.positions(rank) for rank in range(layout.ranks)]
    live = [p[p >= 0] for p in positions]
    assert sorted(np.concatenate(live).tolist()) == list(range(layout.seq_len))
    assert layout.counts.tolist() == [len(p) for p in live]
    for rank, (p, tokens) in enumerate(zip(positions, live, strict=True)):
        assert p.dtype == np.int64
        assert len(p) == layout.num_slots(rank) == (layout.slots or len(tokens))
        # Live slots come first and ascend: a rank's causal order is the sequence's.
        assert (p[: len(tokens)] == np.sort(tokens)).all()
        assert (p[len(tokens) :] == -1).all()
        spans = [np.arange(*span) for span in spans_of(layout, rank)]
        assert np.array_equal(np.concatenate(spans) if spans else np.zeros(0), tokens)
    assert layout.counts.max() - layout.counts.min() <= 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("S", "ranks"), [(7, 2), (2999, 4), (10, 4), (2, 2), (1, 4), (5, 8), (2000, 4)])
def test_lengths_that_the_degree_does_not_divide(name, S, ranks):
    layout = Layout.named(name, S, ranks)
    held = np.concatenate([layout.positions(rank) for rank in range(ranks)])
    assert sorted(held.tolist()) == list(range(S))


@pytest.mark.parametrize("name", NAMES)
def test_no_dead_slot_without_need(name):
    layout = Layout.named(name, 2000, 4)
    assert [layout.num_slots(rank) for rank in range(4)] == [500] * 4
    assert all((layout.positions(rank) >= 0).all() for rank in range(4))


@pytest.mark.parametrize(
    ("layout", "right"),
    [
        (Layout.contiguous(8, 2), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (Layout.zigzag(8, 2), [[0, 1, 6, 7], [2, 3, 4, 5]]),
        (Layout.striped(8, 2), [[0, 2, 4, 6], [1, 3, 5, 7]]),
        (Layout.zigzag(8, 4), [[0, 7], [1, 6], [2, 5], [3, 4]]),
        (Layout.contiguous(7, 2), [[0, 1, 2, 3], [4, 5, 6]]),
        (Layout.zigzag(7, 2), [[0, 1, 6], [2, 3, 4, 5]]),
        (Layout.striped(7, 2), [[0, 2, 4, 6], [1, 3, 5]]),
        (Layout.contiguous(1, 3), [[0], [], []]),
        (Layout.zigzag(3, 2, slots=3), [[0, -1, -1], [1, 2, -1]]),
        (Layout.striped(5, 2, slots=3), [[0, 2, 4], [1, 3, -1]]),
    ],
)
def test_positions_by_hand(layout, right):
    assert [layout.positions(rank).tolist() for rank in range(layout.ranks)] == right


def test_spans_have_the_layouts_step():
    assert spans_of(Layout.zigzag(16, 2), 0) == [(0, 4, 1), (12, 16, 1)]
    assert spans_of(Layout.striped(16, 4), 3) == [(3, 16, 4)]
    assert spans_of(Layout.striped(2, 4), 3) == []


@examples(200)
@given(st.data())
def test_merged_shards_hold_the_tokens_of_their_members_in_order(data):
    degree, others = data.draw(
        st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2), (3, 2), (2, 3), (4, 2), (5, 1), (2, 4)])
    )
    adjacent = data.draw(st.booleans())
    layout = data.draw(lengths.flatmap(lambda S: layouts(S, (degree * others,), with_slots=True)))
    merged = layout.merged(degree, adjacent)
    slots = None if layout.slots is None else layout.slots * degree
    assert (merged.ranks, merged.seq_len, merged.slots) == (others, layout.seq_len, slots)
    for group in range(others):
        members = range(group * degree, (group + 1) * degree) if adjacent else range(group, degree * others, others)
        held = [layout.positions(rank)[: layout.counts[rank]] for rank in members]
        tokens = np.concatenate(held)
        # Neighbouring stripes stay apart, one after the other; all others come in the order of the sequence.
        apart = layout.step > 1 and adjacent and others > 1
        live = merged.positions(group)[: merged.counts[group]]
        assert live.tolist() == (tokens if apart else np.sort(tokens)).tolist()
        assert all(layout.positions(members[0])[slot] == token for slot, token in enumerate(held[0]))
        for token in tokens.tolist():
            slot, start = merged.find(token)
            assert merged.positions(group)[slot + (token - start) // merged.step] == token


@pytest.mark.parametrize(
    ("layout", "degree", "adjacent", "right"),
    [
        (Layout.zigzag(8, 4), 2, True, [[0, 1, 6, 7], [2, 3, 4, 5]]),
        (Layout.zigzag(8, 4), 2, False, [[0, 2, 5, 7], [1, 3, 4, 6]]),
        (Layout.zigzag(8, 4), 4, True, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        (Layout.contiguous(8, 4), 2, True, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (Layout.contiguous(8, 4), 2, False, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (Layout.striped(8, 4), 2, True, [[0, 4, 1, 5], [2, 6, 3, 7]]),
        (Layout.striped(8, 4), 2, False, [[0, 2, 4, 6], [1, 3, 5, 7]]),
        (Layout.striped(8, 4, slots=3), 4, True, [[0, 1, 2, 3, 4, 5, 6, 7, -1, -1, -1, -1]]),
        (Layout.zigzag(8, 2, slots=6), 1, True, [[0, 1, 6, 7, -1, -1], [2, 3, 4, 5, -1, -1]]),
    ],
)
def test_merged_shards_by_hand(layout, degree, adjacent, right):
    merged = layout.merged(degree, adjacent)
    assert [merged.positions(group).tolist() for group in range(merged.ranks)] == right


def test_equal_layouts_are_equal_and_others_are_not():
    assert Layout.zigzag(16, 2) == Layout.zigzag(16, 2)
    assert hash(Layout.zigzag(16, 2)) == hash(Layout.named("zigzag", 16, 2))
    different = [
        Layout.zigzag(16, 2), Layout.zigzag(17, 2), Layout.zigzag(16, 4), Layout.zigzag(16, 2, slots=8),
        Layout.contiguous(16, 2), Layout.striped(16, 2), Layout.zigzag(16, 2, slots=9),
    ]  # fmt: skip
    assert len(set(different)) == len(different)
    assert Layout.zigzag(16, 2) != "zigzag"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: Layout.zigzag(7, 2, slots=3),
            "slots=3 is less than the 4 tokens that zigzag puts on one of 2 ranks\n\n"
            "hint: set slots to at least 4, or leave slots out",
        ),
        (lambda: Layout.contiguous(0, 2), "seq_len=0: a sequence has at least one token"),
        (lambda: Layout.striped(4, 0), "ranks=0: a layout needs at least one rank"),
        (
            lambda: Layout.named("spiral", 4, 2),
            f"layout 'spiral' is not known\n\nhint: choose one of {', '.join(LAYOUTS)}",
        ),
        (lambda: Layout.zigzag(8, 2).positions(2), "rank 2 is not one of the 2 ranks 0..1"),
        (lambda: check_rank(-1, 4), "rank -1 is not one of the 4 ranks 0..3"),
    ],
)
def test_refusals(make, text):
    with pytest.raises(SpecError) as error:
        make()
    assert str(error.value) == text
