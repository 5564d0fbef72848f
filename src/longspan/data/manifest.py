"""Manifest: a Parquet file with one record per training row, and the counts of that row per rank.

    row  epoch  documents                               lengths  tokens  padding  pairs  rank_tokens  rank_pairs  ...
    0    0      {7, "a.txt", 0, 5}, {2, "b.txt", 0, 3}  5 3      8       2        21     4 4          10 11
    1    0      {4, "c.txt", 0, 9}                      9        9       1        45     5 4          25 20

The four fields of a document are its number in the corpus, its source, and the start and stop of the range of its tokens that
the row holds; token 0 is the document's first, and stop is exclusive.
`longspan pack` writes a manifest, and `longspan show --manifest` draws it. `Loader` reads the documents and ignores the counts.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from longspan.data.fit import FittedRows
from longspan.data.packing import IntArray, Piece
from longspan.data.store import TokenStore
from longspan.errors import DataError
from longspan.names import with_current_names

if TYPE_CHECKING:
    import pyarrow as pa

_FORMAT = 1
_GROUP = 256  # records per Parquet row group
_KEY = b"longspan"
_COLUMNS = {
    "row": ("int64", "index of the training row in the packed stream, from 0"),
    "epoch": ("int64", "epoch of the row, from 0"),
    "documents": (
        "documents",
        "documents in order: number in the corpus, source, and the range [start, stop) of the document's tokens",
    ),
    "lengths": ("int64s", "tokens of each document"),
    "tokens": ("int64", "tokens of the row"),
    "padding": ("int64", "unused tokens of the row: seq_len - tokens"),
    "pairs": ("int64", "visible (query, key) pairs of all layers, forward"),
    "rank_tokens": ("int64s", "tokens held by each rank of the CP group"),
    "rank_pairs": (
        "float64s",
        "pairs that each rank computes in forward, all layers, multiplied by the rank's share of the heads",
    ),
    "rank_blocks": (
        "float64s",
        "blocks of 128 x 128 pairs that each rank computes at least partly, summed like rank_pairs",
    ),
    "rank_bytes": ("int64s", "bytes sent by each rank, all layers and heads, forward and backward"),
}


@dataclass(frozen=True)
class Counted:
    """The setup that the counts of a manifest refer to. `masks` gives the number of layers with each mask, "full" or
    "window-w".

    If there is no model, `heads` is None and the counts describe one layer of full causal attention with one KV head.
    """

    cp: int
    layout: str
    route: str
    inner: int | None
    ranks_per_node: int | None
    comm_dtype: str | None
    pad_to_multiple_of: int | None
    masks: dict[str, int]
    heads: tuple[int, int] | None
    head_dim: int
    itemsize: int


@dataclass(frozen=True)
class Counts:
    """Work and traffic of one training row. The columns of the same names describe the fields."""

    pairs: int
    rank_tokens: Sequence[int]
    rank_pairs: Sequence[float]
    rank_blocks: Sequence[float]
    rank_bytes: Sequence[int]


@dataclass(frozen=True)
class Pack:
    """A training row to write. Pieces number documents as the store does."""

    epoch: int
    pieces: Sequence[Piece]
    counts: Counts


@dataclass(frozen=True, eq=False)
class Manifest:
    """Training rows, and the settings used to pack them (`Loader.stream`). Documents are numbered as in the store."""

    path: Path
    stream: dict[str, Any]
    rows: FittedRows

    @cached_property
    def digest(self) -> str:
        """sha256 of the token ranges of all rows."""
        digest = hashlib.sha256(f"longspan.Manifest {len(self.rows)}\n".encode())
        for values in (self.rows.edges, self.rows.pieces):
            digest.update(values.astype("<i8").tobytes())
        return digest.hexdigest()

    def check(self, lengths: IntArray, train: IntArray, seq_len: int) -> None:
        """Raise DataError if a row is longer than `seq_len`, has a document outside `train`, or has tokens past a document's
        end."""
        (longer,) = np.nonzero(self.rows.tokens > seq_len)
        if longer.size:
            raise self._wrong(longer[0], f"has {self.rows.tokens[longer[0]]} tokens, more than seq_len {seq_len}")
        document, start, stop = self.rows.pieces.T
        (strange,) = np.nonzero(~np.isin(document, train))
        if strange.size:
            raise self._wrong(
                self._row_of(strange[0]), f"holds document {document[strange[0]]}, which is not in the training split"
            )
        (wrong,) = np.nonzero((start < 0) | (start >= stop) | (stop > lengths[document]))
        if wrong.size:
            number, first, after = self.rows.pieces[wrong[0]].tolist()
            tokens = f"holds tokens {first} to {after} of document {number}, which has {lengths[number]} tokens"
            raise self._wrong(self._row_of(wrong[0]), tokens)

    def _row_of(self, piece: int) -> int:
        return int(np.searchsorted(self.rows.edges, piece, side="right")) - 1

    def _wrong(self, row: int, what: str) -> DataError:
        return DataError(f"row {row} of {self.path} {what}", hint="pack again: longspan pack")


def write_manifest(
    path: Path, packs: Iterable[Pack], store: TokenStore, stream: dict[str, Any], epochs: int, counted: Counted
) -> None:
    """Write `packs`, the rows of `epochs` epochs, to a Parquet file at `path`. A failure leaves no partial file.

    `stream` is the `Loader.stream` of the loader that packed the rows. Raises DataError: the file cannot be written.
    """
    import pyarrow.parquet as pq  # slow to import, and planning does not need it

    about = {"format": _FORMAT, "stream": stream, "epochs": epochs, "counted": asdict(counted)}
    schema = _schema(about)
    scratch = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with pq.ParquetWriter(scratch, schema) as writer:
            for group in _groups(packs, store.sources, stream["seq_len"]):
                writer.write_table(_table(group, schema))
        scratch.replace(path)
    except OSError as error:
        raise DataError(
            f"{path} cannot be written: {error.strerror or error}", hint="name a file in an existing folder"
        ) from error
    finally:
        scratch.unlink(missing_ok=True)


def read_manifest(path: Path) -> Manifest:
    """Read the training rows of a manifest. Raises DataError: the file is not a manifest or has no row."""
    table, about = read_table(path, ["documents"])
    edges, documents = flat(table, "documents")
    pieces = np.stack([documents[name].astype(np.int64) for name in Piece._fields], axis=1)
    return Manifest(path, about["stream"], FittedRows(pieces, edges))


def read_table(path: Path, columns: Sequence[str]) -> tuple["pa.Table", dict[str, Any]]:
    """Return (columns of a manifest, metadata). The metadata are `stream`, `epochs` and `counted`.

    Raises DataError: the file is not a manifest, has no row, or a column has null values.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with path.open("rb") as source, pq.ParquetFile(source) as file:
            about = with_current_names(json.loads((file.schema_arrow.metadata or {}).get(_KEY, b"{}")))
            if about.get("format") != _FORMAT or not set(columns) <= set(file.schema_arrow.names):
                raise DataError(f"{path} is not a manifest of this version", hint="write one with: longspan pack")
            table = file.read(list(columns))
    except (OSError, ValueError, pa.ArrowException) as error:
        if isinstance(error, DataError):
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise DataError(f"manifest {path} cannot be read: {reason}", hint="write one with: longspan pack") from error
    if not table.num_rows:
        raise DataError(f"manifest {path} has no row", hint="pack again: longspan pack")
    if empty := [name for name in columns if table.column(name).null_count]:
        raise DataError(f"manifest {path} has rows without {', '.join(empty)}", hint="pack again: longspan pack")
    return table, about


def flat(table: "pa.Table", name: str) -> tuple[IntArray, Any]:
    """Flatten a list column of R rows. Return (row offsets int64 (R + 1,), values; for "documents" a dict of fields)."""
    import pyarrow.compute as pc

    column = table.column(name)
    edges = np.concatenate([[0], np.cumsum(pc.list_value_length(column).to_numpy(), dtype=np.int64)])
    values = pc.list_flatten(column)
    if name != "documents":
        return edges, values.to_numpy()
    return edges, {field: pc.struct_field(values, field).to_numpy() for field in Piece._fields}


def _schema(about: dict[str, Any]) -> "pa.Schema":
    import pyarrow as pa

    document = pa.struct(
        [("document", pa.int64()), ("source", pa.string()), ("start", pa.int64()), ("stop", pa.int64())]
    )
    kinds = {
        "int64": pa.int64(), "int64s": pa.list_(pa.int64()), "float64s": pa.list_(pa.float64()),
        "documents": pa.list_(document),
    }  # fmt: skip
    fields = [
        pa.field(name, kinds[kind], nullable=False, metadata={"what": what}) for name, (kind, what) in _COLUMNS.items()
    ]
    return pa.schema(fields, metadata={_KEY: json.dumps(about)})


def _groups(packs: Iterable[Pack], sources: Sequence[str], seq_len: int) -> Iterator[list[dict[str, Any]]]:
    values = (_values(row, pack, sources, seq_len) for row, pack in enumerate(packs))
    while group := list(islice(values, _GROUP)):
        yield group


def _values(row: int, pack: Pack, sources: Sequence[str], seq_len: int) -> dict[str, Any]:
    lengths = [piece.stop - piece.start for piece in pack.pieces]
    documents = [
        # A file name may hold bytes that are not UTF-8.
        {**piece._asdict(), "source": sources[piece.document].encode(errors="backslashreplace").decode()}
        for piece in pack.pieces
    ]
    tokens = sum(lengths)
    return {
        "row": row, "epoch": pack.epoch, "documents": documents, "lengths": lengths, "tokens": tokens,
        "padding": seq_len - tokens, **asdict(pack.counts),
    }  # fmt: skip


def _table(group: list[dict[str, Any]], schema: "pa.Schema") -> "pa.Table":
    import pyarrow as pa

    return pa.Table.from_pylist(group, schema=schema)
