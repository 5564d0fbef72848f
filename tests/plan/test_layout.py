"""Which rank holds what: a partition at any length and degree."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.plan import Layout, spans_of
from longspan.plan.layout import check_rank
from longspan.spec import SpecError

from .strategies import NAMES, layouts

lengths = st.integers(1, 200)
some_layouts = lengths.flatmap(lambda S: layouts(S, tuple(range(1, 18)), with_slots=True))


@settings(max_examples=300, deadline=None, derandomize=True)
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
            "hint: set slots to at least 4, or leave it out",
        ),
        (lambda: Layout.contiguous(0, 2), "seq_len=0: a sequence has at least one token"),
        (lambda: Layout.striped(4, 0), "ranks=0: a layout needs at least one rank"),
        (
            lambda: Layout.named("spiral", 4, 2),
            "layout 'spiral' is not known\n\nhint: choose one of contiguous, zigzag, striped",
        ),
        (lambda: Layout.zigzag(8, 2).positions(2), "rank 2 is not one of the 2 ranks 0..1"),
        (lambda: check_rank(-1, 4), "rank -1 is not one of the 4 ranks 0..3"),
    ],
)
def test_refusals(make, text):
    with pytest.raises(SpecError) as error:
        make()
    assert str(error.value) == text
