"""Rows hold every token once, in order; `Rows` finds from lengths what `pack` finds from tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.data import ByteTokenizer, Document, Piece, Rows, pack, tokenize
from longspan.errors import SpecError

lengths_strategy = st.lists(st.integers(0, 12), max_size=12)


def numbered(lengths):
    """Documents whose tokens are numbered through all of them."""
    return np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1]) if lengths else []


def test_a_document_that_does_not_fit_continues_as_its_own():
    rows = [[piece.tolist() for piece in row] for row in pack(numbered([3, 6, 1]), 4)]
    assert rows == [[[0, 1, 2], [3]], [[4, 5, 6, 7]], [[8], [9]]]


def test_tokenize_appends_the_end_of_each_document():
    ids = list(tokenize([Document("ab", "x"), Document("ä", "y")], ByteTokenizer()))
    assert [i.tolist() for i in ids] == [[97, 98, 0], [0xC3, 0xA4, 0]]


def test_rows_by_hand():
    rows = Rows(np.array([3, 0, 6, 1]), 4)
    assert len(rows) == 3
    assert list(rows) == [[Piece(0, 0, 3), Piece(2, 0, 1)], [Piece(2, 1, 5)], [Piece(2, 5, 6), Piece(3, 0, 1)]]
    assert rows[-1] == rows[2]
    assert rows[1:] == [rows[1], rows[2]]
    with pytest.raises(IndexError):
        rows[3]


@pytest.mark.parametrize("make", [lambda n: pack([], n), lambda n: Rows(np.array([4]), n)])
def test_row_tokens_below_one_fails_at_once(make):
    with pytest.raises(SpecError, match="seq_len 0 is below 1"):
        make(0)


@given(lengths_strategy, st.integers(1, 15))
def test_every_token_once_in_full_rows(lengths, seq_len):
    rows = list(pack(iter(numbered(lengths)), seq_len))
    assert [token for row in rows for piece in row for token in piece] == list(range(sum(lengths)))
    sizes = [sum(piece.size for piece in row) for row in rows]
    assert sizes[:-1] == [seq_len] * (len(rows) - 1)
    assert all(0 < size <= seq_len for size in sizes)
    assert all(piece.size for row in rows for piece in row)


@given(lengths_strategy, st.integers(1, 15))
def test_rows_are_those_of_pack(lengths, seq_len):
    documents = numbered(lengths)
    rows = Rows(np.array(lengths, np.int64), seq_len)
    by_lengths = [[documents[p.document][p.start : p.stop].tolist() for p in row] for row in rows]
    by_tokens = [[piece.tolist() for piece in row] for row in pack(documents, seq_len)]
    assert by_lengths == by_tokens
    assert len(rows) == -(-sum(lengths) // seq_len)
