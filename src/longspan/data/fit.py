"""Fit complete documents into rows, given only document lengths (`packing.Rows` cuts documents at row ends instead).
The result is deterministic and does not depend on the dp and cp degrees.

    seq_len=10        stream   aaaa bbbbbb | bb ccccccc d | dd eeeeee
    documents 4 8 7 3 6  fit      aaaa eeeeee | bbbbbbbb     | ccccccc ddd
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice, pairwise
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator

from longspan.data.packing import IntArray, Piece, PieceRows, check_seq_len
from longspan.errors import DataError, SpecError

_SLACK = (
    500  # a row is full if at most 1/500 is free; a stricter limit would use up short documents that later rows need
)
_WINDOW_STEPS = 8  # balancing moves rows within windows of this many steps
_UNITS = 1 << 13  # units per row in the best-fit search, so that the search costs the same for longer rows


class FitConfig(BaseModel):
    """Options of packing complete documents into rows. Raises pydantic.ValidationError (a ValueError), as `DataConfig`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    buffer: Annotated[int, Field(ge=1)] = 64
    """Number of documents to choose from. Bounds reordering: a document is placed at most `buffer - 1` rows of its bucket
    after the first row that holds a later document."""
    buckets: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Ascending document lengths in tokens; a row holds documents of one bucket only. (1024, 8192) makes three buckets: up
    to 1,024 tokens, up to 8,192, and longer."""
    long_documents: Literal["cut", "refuse"] = "cut"
    """Documents longer than a row. "cut": split into full rows and a remainder, each a document. "refuse": raise an error."""
    balance: Literal["none", "area"] = "none"
    """"area": rows of one optimizer step have about the same number of visible (query, key) pairs."""

    @field_validator("buckets")
    @classmethod
    def _ascending(cls, buckets: tuple[int, ...]) -> tuple[int, ...]:
        if any(low >= high for low, high in pairwise(buckets)):
            raise SpecError(f"buckets {list(buckets)} do not ascend", hint="give lengths such as [1024, 8192]")
        return buckets

    def check(self, seq_len: int) -> None:
        """Raise SpecError if the last bucket is not below `seq_len`: no document would be longer than this bucket."""
        if self.buckets and self.buckets[-1] >= seq_len:
            raise SpecError(
                f"bucket {self.buckets[-1]} is not below seq_len {seq_len}: no document would be above it",
                hint="leave this bucket out: documents above the last bucket always form a separate bucket",
            )


@dataclass(frozen=True, eq=False)
class FittedRows(PieceRows):
    """Rows of complete documents, made by `fit_rows`.

    `pieces` int64 (P, 3): (document, start, stop) of each piece, in row order. Row `i` is `pieces[edges[i]:edges[i + 1]]`.
    """

    pieces: IntArray
    edges: IntArray

    def __len__(self) -> int:
        return self.edges.size - 1

    @cached_property
    def tokens(self) -> IntArray:
        """Tokens of each row, int64 (rows,)."""
        return self._sums(self.pieces[:, 2] - self.pieces[:, 1])

    @cached_property
    def area(self) -> IntArray:
        """Visible pairs of each row under a causal mask, int64 (rows,): the sum of n(n+1)/2 over the row's documents."""
        sizes = self.pieces[:, 2] - self.pieces[:, 1]
        return self._sums(sizes * (sizes + 1) // 2)

    def _pieces(self, row: int) -> list[Piece]:
        return [Piece(*piece) for piece in self.pieces[self.edges[row] : self.edges[row + 1]].tolist()]

    def _sums(self, values: IntArray) -> IntArray:
        return np.diff(np.concatenate([[0], np.cumsum(values)])[self.edges])


def fit_rows(
    lengths: IntArray,
    seq_len: int,
    config: FitConfig | None = None,
    *,
    rows_per_step: int = 1,
    first_row: int = 0,
    name_of: Callable[[int], object] = str,
) -> FittedRows:
    """Pack each document of `lengths`, int64 (N,), complete and exactly once, into rows of at most `seq_len` tokens.

    A buffer holds the next documents. A row takes the oldest documents until a quarter of the row is free, then the best fit,
    which tries longer documents first and fills the row to 99.8% or as far as possible. If the row is not filled, the row
    gives documents back one by one, the youngest first, and searches again; the oldest document stays. Rows are therefore
    full except the last few, and the order of lengths changes little. Since every row takes the oldest document, a document
    is placed at most `buffer - 1` rows after the first row that holds a younger document. Each bucket is packed separately,
    and the bound holds per bucket. The rows of all buckets are then ordered by their oldest document.

    With `balance="area"`, every full step of `rows_per_step` rows (of all ranks and micro-batches together) has rows of similar
    area. The rows of 8 steps are sorted by area and split into steps, and the steps are ordered by their oldest row. A row
    therefore moves by less than 8 steps. `first_row` is the index in the stream of the first row made here; a row's position
    within a step follows from `first_row`.

    Errors name document `i` as `name_of(i)`.

    Raises SpecError: `seq_len` or `rows_per_step` below 1, a bucket of `seq_len` or more. DataError: a document
    longer than a row, with `long_documents="refuse"`.
    """
    config = config or FitConfig()
    check_seq_len(seq_len)
    config.check(seq_len)
    if rows_per_step < 1:
        raise SpecError(f"rows_per_step {rows_per_step} is below 1")
    if config.long_documents == "refuse":
        _check_none_longer(lengths, seq_len, name_of)
    pieces = _cut(lengths, seq_len)
    sizes = pieces[:, 2] - pieces[:, 1]
    bucket = np.searchsorted(np.array(config.buckets, np.int64), sizes)
    rows = []
    for number in range(len(config.buckets) + 1):
        (members,) = np.nonzero(bucket == number)
        rows += [members[row] for row in _fit_rows(sizes[members].tolist(), seq_len, config.buffer)]
    rows.sort(key=lambda row: row[0])
    fitted = _rows_of(pieces, rows)
    if config.balance == "none" or rows_per_step == 1:
        return fitted
    return _rows_of(pieces, [rows[i] for i in _even_steps(fitted.area, rows_per_step, -first_row % rows_per_step)])


def _check_none_longer(lengths: IntArray, seq_len: int, name_of: Callable[[int], object]) -> None:
    (longer,) = np.nonzero(lengths > seq_len)
    if longer.size:
        first = int(longer[0])
        raise DataError(
            f"document {name_of(first)} has {lengths[first]} tokens, more than seq_len {seq_len}; "
            f"{longer.size} of {lengths.size} documents are longer than a row, the longest has {lengths.max()}",
            hint=f'set long_documents="cut", or seq_len to at least {lengths.max()}',
        )


def _cut(lengths: IntArray, seq_len: int) -> IntArray:
    """Return pieces (P, 3) of at most `seq_len` tokens. A document of 0 tokens has no piece."""
    counts = -(-lengths // seq_len)
    document = np.repeat(np.arange(lengths.size), counts)
    start = (np.arange(document.size) - np.repeat(np.cumsum(counts) - counts, counts)) * seq_len
    return np.stack([document, start, np.minimum(start + seq_len, lengths[document])], axis=1)


def _rows_of(pieces: IntArray, rows: list[IntArray]) -> FittedRows:
    order = np.concatenate([np.empty(0, np.int64), *rows])
    return FittedRows(pieces[order], np.cumsum([0, *map(len, rows)], dtype=np.int64))


def _even_steps(area: IntArray, rows_per_step: int, head: int) -> list[int]:
    """Return row numbers in balanced order. The first `head` rows, which end a step of the previous epoch, and an incomplete
    last step stay in place."""
    order = list(range(head))
    stop = head + (area.size - head) // rows_per_step * rows_per_step
    for start in range(head, stop, _WINDOW_STEPS * rows_per_step):
        rows = sorted(range(start, min(start + _WINDOW_STEPS * rows_per_step, stop)), key=lambda row: (area[row], row))
        steps = [sorted(rows[i : i + rows_per_step]) for i in range(0, len(rows), rows_per_step)]
        order += chain.from_iterable(sorted(steps))
    return order[: area.size] + list(range(max(stop, head), area.size))


def _fit_rows(sizes: list[int], seq_len: int, capacity: int) -> list[list[int]]:
    """Pack the pieces of one bucket. The pieces of a row ascend: oldest first."""
    buffer = _Buffer(sizes, capacity)
    rows = []
    while buffer.by_age:
        rows.append(sorted(_next_row(buffer, seq_len)))
    return rows


class _Buffer:
    """The next pieces, at most `capacity`, indexed by age and by size."""

    def __init__(self, sizes: list[int], capacity: int) -> None:
        self.by_age: dict[int, int] = {}  # size of each piece
        self.by_size: list[tuple[int, int]] = []  # (size, piece)
        self.tokens = 0
        self.is_last = False
        self._coming = enumerate(sizes)
        self._capacity = capacity
        self._refill()

    def take(self, pieces: list[int]) -> None:
        """Remove `pieces` and refill."""
        for piece in pieces:
            size = self.by_age.pop(piece)
            del self.by_size[bisect_left(self.by_size, (size, piece))]
            self.tokens -= size
        self._refill()

    def fitting_tokens(self, room: int) -> int:
        """Total tokens of the pieces that each fit into `room`."""
        return self.tokens - sum(size for size, _ in self.by_size[bisect_left(self.by_size, (room + 1,)) :])

    def _refill(self) -> None:
        for piece, size in islice(self._coming, self._capacity - len(self.by_age)):
            self.by_age[piece] = size
            insort(self.by_size, (size, piece))
            self.tokens += size
        self.is_last = len(self.by_age) < self._capacity


def _next_row(buffer: _Buffer, seq_len: int) -> list[int]:
    row: list[int] = []
    room = seq_len
    # Short documents: a buffer with less than twice the free room offers too little choice, so the oldest is placed first.
    while not buffer.is_last and buffer.fitting_tokens(room) < 2 * room:
        oldest = next((piece for piece, size in buffer.by_age.items() if size <= room), None)
        if oldest is None:
            break
        row.append(oldest)
        room -= buffer.by_age[oldest]
        buffer.take([oldest])
    chosen = _choose(buffer, room, seq_len, 0 if row else 1)
    buffer.take(chosen)
    return row + chosen


def _choose(buffer: _Buffer, room: int, seq_len: int, at_least: int) -> list[int]:
    """Choose the oldest pieces until a quarter of the row is free, then the best fit. Choose fewer oldest pieces if that makes
    the row fuller."""
    slack = seq_len // _SLACK
    oldest = _oldest(buffer, room, seq_len // 4)
    least_left, best = room + 1, []
    for count in range(len(oldest), at_least - 1, -1):
        left = room - sum(buffer.by_age[piece] for piece in oldest[:count])
        rest = _best_fit(buffer, set(oldest[:count]), left, slack, -(-seq_len // _UNITS)) if left > slack else []
        left -= sum(buffer.by_age[piece] for piece in rest)
        if left < least_left:
            least_left, best = left, oldest[:count] + rest
        if left <= slack:
            break
    return best


def _oldest(buffer: _Buffer, room: int, quarter: int) -> list[int]:
    pieces = []
    for piece, size in buffer.by_age.items():
        if size > room or room <= quarter:
            break
        pieces.append(piece)
        room -= size
    return pieces


def _best_fit(buffer: _Buffer, taken: set[int], room: int, slack: int, unit: int) -> list[int]:
    """Return the first set of pieces, longest first, that leaves at most `slack` of `room`, or as little as possible.

    Subset sums are bits of an integer: bit `t` of `sums[i]` is set if a subset of the first `i` pieces has `t` units.
    """
    fitting = buffer.by_size[: bisect_left(buffer.by_size, (room + 1,))]
    pieces = [(-(-size // unit), piece) for size, piece in reversed(fitting) if piece not in taken]
    units = room // unit
    mask = (1 << (units + 1)) - 1
    sums = [1]
    for size, _ in pieces:
        sums.append(sums[-1] | (sums[-1] << size) & mask)
        if sums[-1] >> max(units - slack // unit, 0):
            break
    total = sums[-1].bit_length() - 1
    chosen = []
    for i in range(len(sums) - 2, -1, -1):
        if not sums[i] >> total & 1:
            chosen.append(pieces[i][1])
            total -= pieces[i][0]
    return chosen
