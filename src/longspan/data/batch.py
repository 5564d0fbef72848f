"""Batch: one flattened axis of S tokens with its labels, positions and document lengths, all of the GLOBAL row.
Labels are shifted here, once, before any sharding; no target and no position crosses a document.

Shape suffixes: S global tokens of the row, N documents.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from longspan.spec import DataError

if TYPE_CHECKING:
    import torch

IGNORE = -100
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Batch:
    """Packed documents on one token axis, ready to shard.

        documents     a b c | d e             lengths       3 2
        input_ids     a b c   d e
        labels        b c -   e -             '-' is -100: no target
        position_ids  0 1 2   0 1

    `input_ids`, `labels`, `position_ids` are int64 (S,), read-only; `lengths` N document lengths (zeros harmless).
    Labels are already shifted. A label is either -100 or the next token of its document, which is checked: labels
    still to be shifted cannot pass for a batch. To ignore targets, give `from_documents` loss masks.

    Raises DataError: no token, another shape or dtype, a negative id, lengths that do not sum to S, labels or
    positions that do not follow from ids and lengths.
    """

    input_ids: IntArray
    labels: IntArray
    position_ids: IntArray
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("input_ids", "labels", "position_ids"):
            view = _int64_row(getattr(self, name), name).view()
            view.flags.writeable = False
            object.__setattr__(self, name, view)
        object.__setattr__(self, "lengths", tuple(int(n) for n in _checked_lengths(self.lengths)))
        S = self.input_ids.size
        if S == 0:
            raise DataError("a batch has no token", hint="give at least one document that is not empty")
        if not S == self.labels.size == self.position_ids.size:
            raise DataError(
                f"{S} input_ids, {self.labels.size} labels and {self.position_ids.size} position_ids are not of one row"
            )
        if self.input_ids.min() < 0:
            raise DataError(f"input id {self.input_ids.min()} at token {self.input_ids.argmin()} is negative")
        _check_labels(self.labels, shift_labels(self.input_ids, self.lengths))
        _check_positions(self.position_ids, positions(self.lengths))

    @classmethod
    def from_documents(
        cls, documents: Sequence[npt.ArrayLike], loss_masks: Sequence[npt.ArrayLike | None] | None = None
    ) -> "Batch":
        """Documents, each integer (n,), end to end; loss masks, (n,) of 0 and 1 or None, say what is a target."""
        rows = [_integers(document, f"document {i}") for i, document in enumerate(documents)]
        lengths = [row.size for row in rows]
        mask = None if loss_masks is None else _joined_masks(loss_masks, lengths)
        ids = np.concatenate([np.empty(0, np.int64), *rows])
        return cls(ids, shift_labels(ids, lengths, mask), positions(lengths), tuple(lengths))

    @classmethod
    def concat(cls, batches: Sequence["Batch"]) -> "Batch":
        """One batch whose token axis is that of `batches` end to end. Raises DataError: no batch."""
        if not batches:
            raise DataError("nothing to concatenate", hint="give at least one batch")
        return cls(
            np.concatenate([batch.input_ids for batch in batches]),
            np.concatenate([batch.labels for batch in batches]),
            np.concatenate([batch.position_ids for batch in batches]),
            tuple(length for batch in batches for length in batch.lengths),
        )

    @property
    def seq_len(self) -> int:
        """S, the tokens of the global row."""
        return self.input_ids.size

    @property
    def num_targets(self) -> int:
        """Labels that are not -100: what this batch adds to the denominator of the loss."""
        return int(np.count_nonzero(self.labels != IGNORE))

    def digest(self) -> bytes:
        """sha256 (32 bytes) of all contents; equal on every rank that read the same batch."""
        digest = hashlib.sha256(f"longspan.Batch {self.seq_len} {len(self.lengths)}\n".encode())
        for values in (self.input_ids, self.labels, self.position_ids, self.lengths):
            digest.update(np.asarray(values, dtype="<i8").tobytes())
        return digest.digest()

    def tensors(self) -> dict[str, "torch.Tensor"]:
        """`input_ids`, `labels` and `position_ids` as int64 tensors (1, S), which share no memory with the batch."""
        import torch  # here, so that a corpus can be prepared without it

        arrays = {"input_ids": self.input_ids, "labels": self.labels, "position_ids": self.position_ids}
        return {name: torch.from_numpy(array.copy()).unsqueeze(0) for name, array in arrays.items()}


def shift_labels(
    ids: npt.ArrayLike, lengths: Sequence[int] | IntArray, loss_mask: npt.ArrayLike | None = None
) -> IntArray:
    """Labels int64 (S,): `ids[i + 1]` within a document; -100 at its last token and before a token of `loss_mask` 0.

    `ids` integer (S,); `lengths` of the documents, sum S, zeros harmless; `loss_mask` (S,) of 0 and 1, indexed like
    `ids`: it says which tokens are to be predicted. All of the global row: never of a shard.

    Raises DataError: lengths that do not sum to S, a mask of another length or with other values.
    """
    row = _integers(ids, "ids")
    sizes = _checked_lengths(lengths)
    if sizes.sum() != row.size:
        raise DataError(
            f"lengths {_short(sizes)} sum to {sizes.sum()}, but there are {row.size} ids",
            hint="give the lengths of the documents of this row, all of them",
        )
    labels = np.full(row.size, IGNORE, np.int64)
    labels[:-1] = row[1:]
    labels[np.cumsum(sizes)[sizes > 0] - 1] = IGNORE
    if loss_mask is not None:
        mask = _checked_mask(loss_mask, row.size, "loss_mask")
        labels[:-1][~mask[1:]] = IGNORE
    return labels


def positions(lengths: Sequence[int] | IntArray) -> IntArray:
    """Positions int64 (S,) that restart at 0 in every document: `positions([3, 2])` is `[0, 1, 2, 0, 1]`."""
    sizes = _checked_lengths(lengths)
    return np.arange(sizes.sum(), dtype=np.int64) - np.repeat(np.cumsum(sizes) - sizes, sizes)


def lengths_from_positions(position_ids: npt.ArrayLike) -> tuple[int, ...]:
    """Document lengths of a packed row given by its position ids, integer (S,): every 0 begins a document.

    Raises DataError: a position that is neither 0 nor one more than the last, as in a shard of a row.
    """
    row = _integers(position_ids, "position_ids")
    starts = row == 0
    broken = ~starts & (row != np.concatenate([[-1], row[:-1]]) + 1)
    if row.size and not starts[0]:
        broken[0] = True
    if broken.any():
        i = int(broken.argmax())
        before = "begins the row" if i == 0 else f"follows {row[i - 1]}"
        raise DataError(
            f"position {row[i]} at token {i} {before}; a position is 0 or one more than the last",
            hint="give the positions of the global row, before it is sharded",
        )
    return tuple(int(n) for n in np.diff(np.append(np.flatnonzero(starts), row.size)))


def _integers(values: npt.ArrayLike, name: str) -> IntArray:
    array = np.asarray(values)
    if array.size == 0 and array.ndim == 1:
        return np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(f"{name} has shape {array.shape} and dtype {array.dtype}, not (S,) and integer")
    return array.astype(np.int64, copy=False)


def _int64_row(values: object, name: str) -> IntArray:
    if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype != np.int64:
        shape, dtype = getattr(values, "shape", "none"), getattr(values, "dtype", type(values).__name__)
        raise DataError(
            f"{name} has shape {shape} and dtype {dtype}, not (S,) and int64", hint="use Batch.from_documents"
        )
    return values


def _checked_lengths(lengths: Sequence[int] | IntArray) -> IntArray:
    sizes = _integers(lengths, "lengths")
    if sizes.size and sizes.min() < 0:
        raise DataError(f"lengths {_short(sizes)} hold {sizes.min()}; a document has 0 tokens or more")
    return sizes


def _checked_mask(loss_mask: npt.ArrayLike, size: int, name: str) -> npt.NDArray[np.bool_]:
    mask = np.asarray(loss_mask)
    if mask.shape != (size,):
        raise DataError(f"{name} has shape {mask.shape}, but there are {size} ids")
    if not np.isin(mask, (0, 1)).all():
        raise DataError(f"{name} holds {mask[~np.isin(mask, (0, 1))][0]}; its values are 0 and 1")
    return mask.astype(np.bool_)


def _joined_masks(loss_masks: Sequence[npt.ArrayLike | None], lengths: list[int]) -> npt.NDArray[np.bool_]:
    if len(loss_masks) != len(lengths):
        raise DataError(
            f"{len(loss_masks)} loss masks for {len(lengths)} documents", hint="give one, or None, for each"
        )
    masks = [
        np.ones(length, np.bool_) if mask is None else _checked_mask(mask, length, f"loss mask {i}")
        for i, (mask, length) in enumerate(zip(loss_masks, lengths, strict=True))
    ]
    return np.concatenate([np.empty(0, np.bool_), *masks])


def _check_labels(labels: IntArray, expected: IntArray) -> None:
    wrong = (labels != IGNORE) & (labels != expected)
    if wrong.any():
        i = int(wrong.argmax())
        right = "the last of its document" if expected[i] == IGNORE else f"followed by {expected[i]}"
        raise DataError(
            f"label {labels[i]} at token {i}, which is {right}: labels of a batch are shifted, once",
            hint="use Batch.from_documents(documents, loss_masks), which shifts",
        )


def _check_positions(position_ids: IntArray, expected: IntArray) -> None:
    if (position_ids != expected).any():
        i = int((position_ids != expected).argmax())
        raise DataError(
            f"position {position_ids[i]} at token {i} should be {expected[i]}: positions restart in every document",
            hint="use positions(lengths)",
        )


def _short(values: IntArray) -> str:
    return str(values.tolist()) if values.size <= 8 else f"[{', '.join(map(str, values[:8]))}, ...]"
