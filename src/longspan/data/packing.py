"""Cut a stream of documents into rows of exactly `seq_len` tokens, in order, without loss or padding.
`pack` works on the tokens; `Rows` needs only document lengths, and computes which tokens a row holds.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt

from longspan.data.documents import Document
from longspan.data.tokenizer import Tokenizer
from longspan.errors import SpecError

IntArray = npt.NDArray[np.int64]


def tokenize(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[IntArray]:
    """Yield the ids of each document, int64 (n,), with the tokenizer's `eos_id` appended."""
    return (np.append(tokenizer.encode(document.text), tokenizer.eos_id) for document in documents)


def pack(token_docs: Iterable[IntArray], seq_len: int) -> Iterator[list[IntArray]]:
    """Yield rows, each a list of documents with `seq_len` tokens in total; the last row may be shorter.

        seq_len=4    aaa bbbbbb c   ->   aaa b | bbbb | b c

    A document cut at a row end continues in the next row as a separate document: the rest does not attend to the beginning,
    its positions restart, and its first token is not a target. Empty documents are dropped.

    Raises SpecError: `seq_len` below 1.
    """
    check_seq_len(seq_len)
    return _pack(token_docs, seq_len)


class Piece(NamedTuple):
    """Tokens `start` to `stop` (exclusive) of document number `document`."""

    document: int
    start: int
    stop: int


class PieceRows(Sequence[list[Piece]], ABC):
    """A sequence of rows, each a list of pieces."""

    @overload
    def __getitem__(self, row: int) -> list[Piece]: ...
    @overload
    def __getitem__(self, row: slice) -> list[list[Piece]]: ...
    def __getitem__(self, row: int | slice) -> list[Piece] | list[list[Piece]]:
        if isinstance(row, slice):
            return [self._pieces(i) for i in range(len(self))[row]]
        return self._pieces(range(len(self))[row])

    @abstractmethod
    def _pieces(self, row: int) -> list[Piece]:
        """Return the pieces of row `row`, with 0 <= row < len(self)."""


@dataclass(frozen=True, eq=False)
class Rows(PieceRows):
    """The rows that `pack` makes from documents of `lengths`, int64 (N,), as pieces.

    `len(rows)` is ceil(total tokens / seq_len). `rows[i]` takes O(log N + pieces).

    Raises SpecError: `seq_len` below 1.
    """

    lengths: IntArray
    seq_len: int

    def __post_init__(self) -> None:
        check_seq_len(self.seq_len)

    def __len__(self) -> int:
        return -(-self._total // self.seq_len)

    def _pieces(self, row: int) -> list[Piece]:
        start = row * self.seq_len
        stop = min(start + self.seq_len, self._total)
        first = int(np.searchsorted(self._stops, start, side="right"))
        last = int(np.searchsorted(self._stops, stop, side="left"))
        pieces = []
        for document in range(first, last + 1):
            end = int(self._stops[document])
            begin = end - int(self.lengths[document])
            if begin < end:
                pieces.append(Piece(document, max(start, begin) - begin, min(stop, end) - begin))
        return pieces

    @cached_property
    def _stops(self) -> IntArray:
        return np.cumsum(self.lengths, dtype=np.int64)

    @property
    def _total(self) -> int:
        return int(self._stops[-1]) if self._stops.size else 0


def _pack(token_docs: Iterable[IntArray], seq_len: int) -> Iterator[list[IntArray]]:
    row: list[IntArray] = []
    room = seq_len
    for tokens in token_docs:
        while tokens.size:
            piece, tokens = tokens[:room], tokens[room:]
            row.append(piece)
            room -= piece.size
            if room == 0:
                yield row
                row, room = [], seq_len
    if row:
        yield row


def check_seq_len(seq_len: int) -> None:
    if seq_len < 1:
        raise SpecError(
            f"seq_len {seq_len} is below 1", hint="set seq_len to the number of tokens in a row, such as 4096"
        )
