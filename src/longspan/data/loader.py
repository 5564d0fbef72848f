"""Loader: an endless stream of batches, resumable at another dp degree.
It is keyed by the data-parallel rank alone, so that all ranks of a CP, TP or PP group read the same batch.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from longspan.data.batch import Batch
from longspan.data.packing import IntArray, Rows
from longspan.data.store import TokenStore
from longspan.spec import DataError, SpecError


class _Epoch(NamedTuple):
    """Training documents in the order of one epoch, and the rows they are cut into."""

    number: int
    order: IntArray
    rows: Rows


class Loader(Iterator[Batch]):
    """Batches of one data-parallel rank, without end.

    Each epoch shuffles the training documents by (seed, epoch), concatenates them and cuts rows of `row_tokens`
    tokens (the epoch's last may be shorter). The rows of all epochs form one global stream, which does not know the
    dp degree; a batch of every rank together takes the next `dp_size * rows_per_batch` rows, dealt in turn:

        dp_size=2, rows_per_batch=2      stream   0 1 2 3 | 4 5 6 7 | ...
                                         rank 0   0   2     4   6
                                         rank 1     1   3     5   7

    So dp 2, and dp 1 with 2 accumulated micro-batches, read the same rows for the same global batch. A batch that
    reaches past an epoch continues in the next.

    Raises SpecError: `row_tokens`, `rows_per_batch` or `dp_size` below 1, a `dp_rank` not below `dp_size`, a
    negative seed.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        row_tokens: int,
        rows_per_batch: int = 1,
        dp_rank: int,
        dp_size: int,
        seed: int,
        shuffle: bool = True,
    ) -> None:
        _check_rank(dp_rank, dp_size)
        if rows_per_batch < 1:
            raise SpecError(f"rows_per_batch {rows_per_batch} is below 1")
        if seed < 0:
            raise SpecError(f"seed {seed} is negative")
        self._store = store
        self._row_tokens = row_tokens
        self._rows_per_batch = rows_per_batch
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self._seed = seed
        self._shuffle = shuffle
        self._row = 0  # rows of the global stream consumed by all ranks together
        self._epoch = self._make_epoch(0)

    @property
    def rows_per_epoch(self) -> int:
        """ceil(training tokens / row_tokens), of all ranks together; the same in every epoch."""
        return len(self._epoch.rows)

    @property
    def epoch(self) -> int:
        """The epoch the next batch begins in, from 0."""
        return self._row // self.rows_per_epoch

    def steps_per_epoch(self, dp_size: int, accumulation: int = 1) -> int:
        """Optimizer steps that read every row of an epoch, if each of `dp_size` ranks accumulates that many batches."""
        if dp_size < 1 or accumulation < 1:
            raise SpecError(f"dp_size {dp_size} and accumulation {accumulation} must be 1 or more")
        return -(-self.rows_per_epoch // (dp_size * self._rows_per_batch * accumulation))

    def __next__(self) -> Batch:
        first = self._row + self._dp_rank
        rows = range(first, first + self._dp_size * self._rows_per_batch, self._dp_size)
        documents = [document for row in rows for document in self._row_documents(row)]
        self._row += self._dp_size * self._rows_per_batch
        return Batch.from_documents(documents)

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch begins, the same on every rank: plain values that JSON can hold."""
        return {"row": self._row, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batches of the saved loader, at any dp degree and rows per batch, without reading them.

        Raises DataError: a state of another corpus, tokenizer, split, seed or row length, which names the values.
        """
        here = self._identity()
        if set(state) != {"row", *here}:
            raise DataError(f"loader state has the keys {sorted(state)}, not {sorted({'row', *here})}")
        differing = [
            f"{name} is {_short(state[name])} in the state, {_short(here[name])} here"
            for name in here
            if state[name] != here[name]
        ]
        if differing:
            raise DataError(
                f"loader state is of another stream: {'; '.join(differing)}",
                hint="set the values of the run that saved it, or start without its state",
            )
        row = state["row"]
        if not isinstance(row, int) or isinstance(row, bool) or row < 0:
            raise DataError(f"loader state has row {row!r}, not a count of rows")
        self._row = row

    def _identity(self) -> dict[str, Any]:
        """All that decides the global stream of rows."""
        return {
            "corpus": self._store.corpus,
            "tokenizer": self._store.tokenizer,
            "heldout_fraction": self._store.heldout_fraction,
            "split_seed": self._store.seed,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "row_tokens": self._row_tokens,
        }

    def _row_documents(self, row: int) -> list[np.ndarray[Any, Any]]:
        epoch, row = divmod(row, self.rows_per_epoch)
        if epoch != self._epoch.number:
            self._epoch = self._make_epoch(epoch)
        return _documents(self._store, self._epoch.order, self._epoch.rows, row)

    def _make_epoch(self, number: int) -> _Epoch:
        order = self._store.train
        if self._shuffle:
            # Sorting raw bits instead of Generator.permutation: NumPy keeps a bit generator's stream across versions,
            # not a Generator's, and a run must resume under a newer NumPy.
            bits = np.random.PCG64([self._seed, number]).random_raw(order.size)
            order = order[np.argsort(bits, kind="stable")]
        return _Epoch(number, order, Rows(self._store.lengths[order], self._row_tokens))


def eval_batches(
    store: TokenStore, row_tokens: int, dp_rank: int, dp_size: int, max_rows: int | None = None
) -> Iterator[Batch | None]:
    """The held-out rows, in order, the first `max_rows` of them, one a batch, each on exactly one data-parallel rank.

    Every rank gets the same number of items, so that collectives line up. A rank for which no row is left gets None
    and takes part with 0 targets: a repeated or dropped row would change the token-weighted mean.

    Raises SpecError: as `Loader`, or `max_rows` below 1. DataError: nothing is held out.
    """
    _check_rank(dp_rank, dp_size)
    if max_rows is not None and max_rows < 1:
        raise SpecError(f"max_rows {max_rows} is below 1", hint="None reads every held-out row")
    if store.heldout.size == 0:
        raise DataError("no document is held out", hint="set heldout_fraction above 0")
    rows = Rows(store.lengths[store.heldout], row_tokens)
    count = len(rows) if max_rows is None else min(len(rows), max_rows)
    return (
        Batch.from_documents(_documents(store, store.heldout, rows, row)) if row < count else None
        for row in range(dp_rank, -(-count // dp_size) * dp_size, dp_size)
    )


def _documents(store: TokenStore, order: IntArray, rows: Rows, row: int) -> list[np.ndarray[Any, Any]]:
    return [store.document(order[piece.document], piece.start, piece.stop) for piece in rows[row]]


def _check_rank(dp_rank: int, dp_size: int) -> None:
    if dp_size < 1:
        raise SpecError(f"dp_size {dp_size} is below 1")
    if not 0 <= dp_rank < dp_size:
        raise SpecError(f"dp_rank {dp_rank} is not in 0..{dp_size - 1} (dp_size {dp_size})")


def _short(value: object) -> str:
    return f"{value[:12]}..." if isinstance(value, str) and len(value) > 16 else repr(value)
