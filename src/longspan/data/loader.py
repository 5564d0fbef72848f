"""Loader: an endless stream of batches, resumable at another dp degree.
Batches depend only on the data-parallel rank: all ranks of a CP, TP or PP group read the same batch.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from longspan.data.batch import Batch
from longspan.data.fit import FitConfig, fit_rows
from longspan.data.manifest import Manifest
from longspan.data.packing import IntArray, Piece, Rows
from longspan.data.store import TokenStore
from longspan.errors import DataError, SpecError


class _Epoch(NamedTuple):
    """The documents of one epoch in order, and the epoch's rows. Row 0 of the epoch is row `start` of the stream."""

    number: int
    start: int
    order: IntArray
    rows: Sequence[list[Piece]]

    @property
    def stop(self) -> int:
        return self.start + len(self.rows)

    def pieces(self, row: int) -> list[Piece]:
        """Return the pieces of row `row` of the stream. Documents are numbered as in the store."""
        return _in_store(self.order, self.rows[row - self.start])


class Loader(Iterator[Batch]):
    """Endless iterator over the batches of one data-parallel rank.

    Each epoch shuffles the training documents by (seed, epoch) and packs them. Without `fit`, documents are concatenated and
    cut into rows of `seq_len` tokens (see `packing.Rows`; the last row of an epoch may be shorter). With `fit`, rows hold
    complete documents (see `fit_rows`). The rows of all epochs form one global stream, which does not depend on the dp degree.
    One batch on every rank takes the next `dp_size * micro_batch_size` rows, dealt in turn:

        dp_size=2, micro_batch_size=2      stream   0 1 2 3 | 4 5 6 7 | ...
                                         rank 0   0   2     4   6
                                         rank 1     1   3     5   7

    So dp=2, and dp=1 with 2 gradient accumulation steps, read the same rows for the same global batch. A batch that
    reaches past the end of an epoch continues in the next epoch.

    `rows_per_step`: rows of one optimizer step over all ranks and micro-batches, used by `fit.balance="area"`. Default: one
    batch per rank.

    With a `manifest`, every epoch has exactly the manifest's rows in the manifest's order, without shuffling or packing. The
    settings used to pack the manifest are compared with the arguments.

    Raises SpecError: `seq_len`, `micro_batch_size` or `dp_size` below 1, `dp_rank` outside [0, dp_size), a negative seed,
    `rows_per_step` that is not a multiple of `dp_size * micro_batch_size`, or an error of `fit_rows`. DataError: no token
    to train on; a document longer than a row with `long_documents="refuse"`; a manifest of another corpus, tokenizer, split,
    seed, row length or packing.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        seq_len: int,
        micro_batch_size: int = 1,
        dp_rank: int,
        dp_size: int,
        seed: int,
        shuffle: bool = True,
        fit: FitConfig | None = None,
        rows_per_step: int | None = None,
        manifest: Manifest | None = None,
    ) -> None:
        _check_rank(dp_rank, dp_size)
        if micro_batch_size < 1:
            raise SpecError(f"micro_batch_size {micro_batch_size} is below 1")
        if seed < 0:
            raise SpecError(f"seed {seed} is negative")
        rows_per_step = dp_size * micro_batch_size if rows_per_step is None else rows_per_step
        if rows_per_step < 1 or rows_per_step % (dp_size * micro_batch_size):
            raise SpecError(
                f"rows_per_step {rows_per_step} is not a multiple of dp_size {dp_size} x micro_batch_size {micro_batch_size}",
                hint="set rows_per_step to dp_size x micro_batch_size x gradient_accumulation_steps",
            )
        self._store = store
        self._seq_len = seq_len
        self._micro_batch_size = micro_batch_size
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self._seed = seed
        self._shuffle = shuffle
        self._fit = fit
        self._rows_per_step = rows_per_step
        self._manifest = manifest
        if manifest is not None:
            _check_manifest(manifest, self.stream, store)
        self._row = 0  # rows of the global stream that all ranks together have consumed
        self._epoch = self._make_epoch(0, 0)
        if not len(self._epoch.rows):
            raise DataError("there is no token to train on", hint="give a non-empty document")

    @property
    def rows_per_epoch(self) -> int:
        """Rows, over all ranks, of the epoch in which the next batch begins.

        Without `fit`: ceil(training tokens / seq_len) in every epoch. With `fit` and shuffling, epochs differ by a few rows.
        """
        return len(self._epoch_of(self._row).rows)

    @property
    def epoch(self) -> int:
        """Index of the epoch in which the next batch begins, from 0."""
        return self._epoch_of(self._row).number

    def steps_per_epoch(self, dp_size: int, gradient_accumulation_steps: int = 1) -> int:
        """Return the number of optimizer steps, rounded up, that read all rows of an epoch."""
        if dp_size < 1 or gradient_accumulation_steps < 1:
            raise SpecError(
                f"dp_size {dp_size} and gradient_accumulation_steps {gradient_accumulation_steps} must be 1 or more"
            )
        return -(-self.rows_per_epoch // (dp_size * self._micro_batch_size * gradient_accumulation_steps))

    def __next__(self) -> Batch:
        first = self._row + self._dp_rank
        rows = range(first, first + self._dp_size * self._micro_batch_size, self._dp_size)
        documents = [self._row_documents(row) for row in rows]
        self._row += self._dp_size * self._micro_batch_size
        numbers = [
            row * self._seq_len + np.arange(sum(map(len, parts)), dtype=np.int64)
            for row, parts in zip(rows, documents, strict=True)
        ]
        return Batch.from_documents(list(chain(*documents)), numbers=np.concatenate(numbers))

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next batch and `stream` as JSON values, the same on every rank."""
        epoch = self._epoch_of(self._row)
        return {"row": self._row, "epoch": epoch.number, "epoch_start": epoch.start, **self.stream}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batches of the saved loader, without reading them. dp degree and micro-batch size may differ.

        With `fit.balance="area"` and no manifest, `rows_per_step` must stay the same: adjust gradient_accumulation_steps to
        the dp degree.

        Raises DataError: a state of another corpus, tokenizer, split, seed, row length, packing or manifest.
        """
        here = self.stream
        keys = {"row", "epoch", "epoch_start", *here}
        if set(state) != keys:
            raise DataError(f"loader state has the keys {sorted(state)}, not {sorted(keys)}")
        if differing := _differing(state, here, "state"):
            hint = "set the values of the run that saved the loader state, or start without the loader state"
            if state["rows_per_step"] and here["rows_per_step"] != state["rows_per_step"]:
                rows = state["rows_per_step"]
                hint = f"keep micro_batch_size x dp x gradient_accumulation_steps at {rows}; or {hint}"
            raise DataError(f"loader state is of another stream: {differing}", hint=hint)
        row, number, start = (_count(state, name) for name in ("row", "epoch", "epoch_start"))
        epoch = self._make_epoch(number, start)
        if not start <= row < epoch.stop:
            raise DataError(
                f"loader state has row {row}, which is not in epoch {number} of rows {start} to {epoch.stop - 1}"
            )
        self._row, self._epoch = row, epoch

    @property
    def stream(self) -> dict[str, Any]:
        """All settings that determine the global stream of rows, as JSON values."""
        evened = self._fit is not None and self._fit.balance == "area" and self._manifest is None
        return {
            "corpus": self._store.corpus,
            "tokenizer": self._store.tokenizer,
            "heldout_fraction": self._store.heldout_fraction,
            "split_seed": self._store.seed,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "seq_len": self._seq_len,
            "packing": "stream" if self._fit is None else "fit",
            **dict.fromkeys(FitConfig.model_fields),
            **({} if self._fit is None else self._fit.model_dump(mode="json")),
            "rows_per_step": self._rows_per_step if evened else None,
            "manifest": None if self._manifest is None else self._manifest.digest,
        }

    def packs(self, epochs: int) -> Iterator[tuple[int, list[Piece]]]:
        """Yield (epoch, pieces) for every row of the first `epochs` epochs, independent of the position of the stream. Documents
        are numbered as in the store."""
        start = 0
        for number in range(epochs):
            epoch = self._make_epoch(number, start)
            yield from ((number, epoch.pieces(row)) for row in range(start, epoch.stop))
            start = epoch.stop

    def _row_documents(self, row: int) -> list[np.ndarray[Any, Any]]:
        return _documents(self._store, self._epoch_of(row).pieces(row))

    def _epoch_of(self, row: int) -> _Epoch:
        """Return the epoch that holds `row`. Rows are requested in ascending order: past epochs are not kept."""
        while row >= self._epoch.stop:
            self._epoch = self._make_epoch(self._epoch.number + 1, self._epoch.stop)
        return self._epoch

    def _make_epoch(self, number: int, start: int) -> _Epoch:
        if self._manifest is not None:
            return _Epoch(number, start, np.arange(self._store.num_documents), self._manifest.rows)
        order = self._store.train
        if self._shuffle:
            # Sort raw bits instead of calling Generator.permutation: NumPy guarantees the stream of a bit generator across
            # versions, but not of a Generator, and a run must resume under a newer NumPy.
            bits = np.random.PCG64([self._seed, number]).random_raw(order.size)
            order = order[np.argsort(bits, kind="stable")]
        rows = _rows(self._store, order, self._seq_len, self._fit, self._rows_per_step, start)
        return _Epoch(number, start, order, rows)


def eval_batches(
    store: TokenStore,
    seq_len: int,
    dp_rank: int,
    dp_size: int,
    max_rows: int | None = None,
    fit: FitConfig | None = None,
) -> Iterator[Batch | None]:
    """Yield the first `max_rows` held-out rows in order, one per batch, each on exactly one data-parallel rank.

    Every rank gets the same number of items, so that collectives match. A rank that has no row left gets None and takes part
    with 0 targets: a repeated or dropped row would change the token-weighted mean. Rows are packed as `Loader` packs with the
    same `fit`, but without `balance`, which depends on the number of ranks.

    Raises SpecError: see `Loader`, or `max_rows` below 1. DataError: nothing is held out.
    """
    _check_rank(dp_rank, dp_size)
    if max_rows is not None and max_rows < 1:
        raise SpecError(f"max_rows {max_rows} is below 1", hint="set max_rows=None to read every held-out row")
    if store.heldout.size == 0:
        raise DataError("no document is held out", hint="set heldout_fraction above 0")
    rows = _rows(store, store.heldout, seq_len, fit)
    count = len(rows) if max_rows is None else min(len(rows), max_rows)
    return (
        Batch.from_documents(_documents(store, _in_store(store.heldout, rows[row]))) if row < count else None
        for row in range(dp_rank, -(-count // dp_size) * dp_size, dp_size)
    )


def _rows(
    store: TokenStore,
    order: IntArray,
    seq_len: int,
    config: FitConfig | None,
    rows_per_step: int = 1,
    first_row: int = 0,
) -> Sequence[list[Piece]]:
    lengths = store.lengths[order]
    if config is None:
        return Rows(lengths, seq_len)

    def name_of(place: int) -> str:
        number = int(order[place])
        return f"{number} ({source})" if (source := store.sources[number]) else str(number)

    return fit_rows(lengths, seq_len, config, rows_per_step=rows_per_step, first_row=first_row, name_of=name_of)


def _in_store(order: IntArray, pieces: list[Piece]) -> list[Piece]:
    return [piece._replace(document=int(order[piece.document])) for piece in pieces]


def _documents(store: TokenStore, pieces: list[Piece]) -> list[np.ndarray[Any, Any]]:
    return [store.document(*piece) for piece in pieces]


def _check_rank(dp_rank: int, dp_size: int) -> None:
    if dp_size < 1:
        raise SpecError(f"dp_size {dp_size} is below 1")
    if not 0 <= dp_rank < dp_size:
        raise SpecError(f"dp_rank {dp_rank} is not in 0..{dp_size - 1} (dp_size {dp_size})")


def _check_manifest(manifest: Manifest, here: dict[str, Any], store: TokenStore) -> None:
    """Raise DataError if the manifest was packed with other settings or holds documents outside the training split."""
    decides = {name: value for name, value in here.items() if name not in ("rows_per_step", "manifest")}
    if differing := _differing(manifest.stream, decides, "manifest"):
        raise DataError(
            f"{manifest.path} holds rows of another stream: {differing}",
            hint="set the [data] values used to pack it, or pack again: longspan pack",
        )
    manifest.check(store.lengths, store.train, here["seq_len"])


def _differing(there: dict[str, Any], here: dict[str, Any], where: str) -> str:
    """Describe the values that differ between the state or manifest and this loader. Return "" if no value differs."""
    return "; ".join(
        f"{name} is {_short(there.get(name))} in the {where}, {_short(here[name])} here"
        for name in here
        if there.get(name) != here[name]
    )


def _count(state: dict[str, Any], name: str) -> int:
    value = state[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise DataError(f"loader state has {name} {value!r}, not a count")
    return value


def _short(value: object) -> str:
    return f"{value[:12]}..." if isinstance(value, str) and len(value) > 16 else repr(value)
