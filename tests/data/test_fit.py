"""Whole documents in rows: nothing lost or twice, nothing over the budget, waits and fill as stated."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from longspan.data import FitConfig, FittedRows, Piece, fit_rows, read_documents
from longspan.errors import DataError, SpecError

ROW = 65536
lengths_strategy = st.lists(st.integers(0, 30), max_size=60).map(lambda lengths: np.array(lengths, np.int64))
configs = st.builds(
    FitConfig,
    buffer=st.integers(1, 8),
    buckets=st.sampled_from([(), (3,), (2, 6)]),
    balance=st.sampled_from(["none", "area"]),
)


@pytest.fixture(scope="module")
def stdlib():
    """Bytes of the standard library's files, each with its end token, in the order of one epoch."""
    lengths = np.array([len(document.text.encode()) + 1 for document in read_documents("python:stdlib")])
    return np.random.default_rng(0).permutation(lengths)


def parts(rows):
    return [[(piece.document, piece.stop - piece.start) for piece in row] for row in rows]


def waits(rows):
    """Of each piece, in order of age: rows from the first that holds a younger piece to its own."""
    row = np.repeat(np.arange(len(rows)), np.diff(rows.edges))
    row = row[np.lexsort((rows.pieces[:, 1], rows.pieces[:, 0]))]
    return row - np.minimum.accumulate(row[::-1])[::-1]


def before_the_last(rows, buffer=64):
    """Rows that were made while the buffer could be filled up."""
    return int(np.searchsorted(rows.edges, rows.pieces.shape[0] - buffer, side="right")) - 1


def unevenness(rows, rows_per_step):
    """Greatest area of a step's rows, all steps together, over the mean area."""
    steps = rows.area[: len(rows) // rows_per_step * rows_per_step].reshape(-1, rows_per_step)
    return steps.max(1).sum() / steps.mean(1).sum()


def test_oldest_first_then_the_best_fit():
    rows = fit_rows(np.array([4, 4, 1, 3, 2]), 10)  # 8 of 10 tokens are the oldest; 2 fits the rest, before 1
    assert parts(rows) == [[(0, 4), (1, 4), (4, 2)], [(2, 1), (3, 3)]]
    assert (rows.tokens.tolist(), rows.area.tolist()) == ([10, 4], [10 + 10 + 3, 1 + 6])


def test_several_documents_fill_what_none_fills_alone():
    assert parts(fit_rows(np.array([6, 3, 2, 2]), 10)) == [[(0, 6), (2, 2), (3, 2)], [(1, 3)]]


def test_the_oldest_but_one_gives_way_where_nothing_fills_its_row():
    assert parts(fit_rows(np.array([4, 5, 6, 5]), 10)) == [[(0, 4), (2, 6)], [(1, 5), (3, 5)]]


def test_a_buffer_of_one_keeps_the_order():
    assert parts(fit_rows(np.array([4, 7, 3, 1]), 10, FitConfig(buffer=1))) == [[(0, 4)], [(1, 7), (2, 3)], [(3, 1)]]


def test_a_long_document_is_cut_into_full_rows_and_a_rest():
    rows = fit_rows(np.array([3, 25, 0, 6]), 10)
    assert list(rows) == [
        [Piece(0, 0, 3), Piece(3, 0, 6)],
        [Piece(1, 0, 10)],
        [Piece(1, 10, 20)],
        [Piece(1, 20, 25)],
    ]
    assert rows[-1] == rows[3]
    assert rows[1:3] == [rows[1], rows[2]]
    with pytest.raises(IndexError):
        rows[4]


def test_a_long_document_is_refused_by_name():
    with pytest.raises(DataError) as caught:
        fit_rows(np.array([3, 25, 11]), 10, FitConfig(long_documents="refuse"), name_of=lambda place: 7 + place)
    assert caught.value.message == (
        "document 8 has 25 tokens, more than seq_len 10; 2 of 3 documents are longer than a row, the longest has 25"
    )
    assert caught.value.hint == 'set long_documents="cut", or seq_len to at least 25'
    assert parts(fit_rows(np.array([10]), 10, FitConfig(long_documents="refuse"))) == [[(0, 10)]]


def test_no_document_no_row():
    rows = fit_rows(np.empty(0, np.int64), 10)
    assert (len(rows), list(rows), rows.tokens.size) == (0, [], 0)


def test_a_row_holds_documents_of_one_bucket():
    lengths = np.array([1, 9, 2, 5, 1, 3, 6, 2])
    rows = fit_rows(lengths, 10, FitConfig(buckets=(2, 5)))
    assert parts(rows) == [[(0, 1), (2, 2), (4, 1), (7, 2)], [(1, 9)], [(3, 5), (5, 3)], [(6, 6)]]


@pytest.mark.parametrize(
    ("options", "rows_per_step", "message"),
    [
        ({"buckets": (4, 10)}, 1, "bucket 10 is not below seq_len 10: no document would be above it"),
        ({}, 0, "rows_per_step 0 is below 1"),
    ],
)
def test_what_cannot_be_is_refused(options, rows_per_step, message):
    with pytest.raises(SpecError, match=message):
        fit_rows(np.array([4]), 10, FitConfig(**options), rows_per_step=rows_per_step)
    with pytest.raises(SpecError, match="seq_len 0 is below 1"):
        fit_rows(np.array([4]), 0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"buckets": (8, 4)}, r"buckets \[8, 4\] do not ascend"),
        ({"buckets": (4, 4)}, r"buckets \[4, 4\] do not ascend"),
        ({"buckets": (0,)}, "greater than or equal to 1"),
        ({"buffer": 0}, "greater than or equal to 1"),
        ({"max_wait": 3}, "max_wait"),
    ],
)
def test_options_are_checked(wrong, message):
    with pytest.raises(ValidationError, match=message):
        FitConfig(**wrong)


def test_every_option_says_what_it_is():
    assert [name for name, field in FitConfig.model_fields.items() if not field.description] == []


@given(lengths_strategy, st.integers(7, 25), configs, st.integers(1, 4), st.integers(0, 9))
def test_every_token_once_and_no_row_over_the_budget(lengths, seq_len, config, rows_per_step, first_row):
    rows = fit_rows(lengths, seq_len, config, rows_per_step=rows_per_step, first_row=first_row)
    seen = sorted((p.document, token) for row in rows for p in row for token in range(p.start, p.stop))
    assert seen == [(document, token) for document, length in enumerate(lengths) for token in range(length)]
    assert all(0 < tokens <= seq_len for tokens in rows.tokens)
    assert sum(len(row) for row in rows) == sum(-(-lengths // seq_len))  # nothing is cut that fits into a row
    edges = (*config.buckets, seq_len)
    for row in rows:
        assert len({next(edge for edge in edges if p.stop - p.start <= edge) for p in row}) == 1


@given(lengths_strategy, st.integers(7, 25), st.integers(1, 8))
def test_a_document_waits_for_fewer_rows_than_the_buffer_holds(lengths, seq_len, buffer):
    rows = fit_rows(lengths, seq_len, FitConfig(buffer=buffer))
    assert all(waits(rows) < buffer)


@given(lengths_strategy, st.integers(7, 25), st.integers(1, 4), st.integers(0, 9))
@settings(max_examples=50)
def test_evening_moves_rows_by_less_than_eight_steps(lengths, seq_len, rows_per_step, first_row):
    plain = list(fit_rows(lengths, seq_len))
    even = fit_rows(lengths, seq_len, FitConfig(balance="area"), rows_per_step=rows_per_step, first_row=first_row)
    order = [plain.index(row) for row in even]
    assert sorted(order) == list(range(len(plain)))
    assert all(abs(i - row) < 8 * rows_per_step for i, row in enumerate(order))
    head = -first_row % rows_per_step  # ends a step of the epoch before
    assert order[:head] == list(range(len(plain)))[:head]
    num_steps = max(len(order) - head, 0) // rows_per_step
    steps = even.area[head : head + num_steps * rows_per_step].reshape(num_steps, rows_per_step)
    for start in range(0, num_steps, 8):
        spans = sorted((step.min(), step.max()) for step in steps[start : start + 8])
        assert all(low[1] <= high[0] for low, high in pairwise(spans))


def test_fill_on_the_standard_library(stdlib):
    rows = fit_rows(stdlib, ROW)
    assert rows.tokens.sum() == stdlib.sum()
    fill = rows.tokens / ROW
    full = fill[: before_the_last(rows)]
    assert full.size > 0.85 * fill.size
    assert full.mean() >= 0.998
    assert full.min() >= 0.99
    assert len(rows) <= -(-stdlib.sum() // ROW) + 1
    assert waits(rows).max() < 64


@pytest.mark.parametrize("rows_per_step", [4, 8])
def test_even_steps_on_the_standard_library(stdlib, rows_per_step):
    plain = fit_rows(stdlib, ROW)
    even = fit_rows(stdlib, ROW, FitConfig(balance="area"), rows_per_step=rows_per_step)
    assert sorted(even.tokens) == sorted(plain.tokens)
    assert unevenness(plain, rows_per_step) > 1.4
    assert unevenness(even, rows_per_step) < 1.15


@pytest.mark.parametrize(("seq_len", "mean"), [(4096, 50), (65536, 300), (1 << 20, 9000)])
def test_rows_of_short_documents_are_full(seq_len, mean):
    """A buffer of 64 holds less than a row of them, or a small part of it."""
    lengths = np.random.default_rng(0).exponential(mean, 20 * seq_len // mean).astype(np.int64) + 1
    rows = fit_rows(lengths, seq_len)
    assert (rows.tokens / seq_len)[:-2].min() > 0.99


def test_the_same_lengths_give_the_same_rows(stdlib):
    first, second = (fit_rows(stdlib.copy(), ROW, FitConfig(buckets=(8192,))) for _ in range(2))
    assert isinstance(first, FittedRows)
    assert np.array_equal(first.pieces, second.pieces)
    assert np.array_equal(first.edges, second.edges)


def test_the_rows_of_given_lengths_are_fixed_for_good():
    """A run resumes under another version of this library, NumPy and Python."""
    lengths = np.array([5, 17, 3, 9, 2, 8, 30, 1, 6, 12, 4, 7])
    rows = fit_rows(lengths, 20, FitConfig(buffer=4))
    assert parts(rows) == [
        [(0, 5), (2, 3), (3, 9), (4, 2)],
        [(1, 17)],
        [(5, 8), (6, 10), (7, 1)],
        [(6, 20)],
        [(8, 6), (9, 12)],
        [(10, 4), (11, 7)],
    ]
