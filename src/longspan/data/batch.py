"""Batch: one flattened axis of S tokens with labels, positions and document lengths, all of the GLOBAL row.
Labels are shifted once, here, before sharding. No target and no position crosses a document boundary.

    documents               from_documents      a b c | d e
    padded rows             from_padded         . a b c / . . d e   and a mask
    rows with position ids  from_positions      a b c d e           and 0 1 2 0 1
    a row with cu_seqlens   from_cu_seqlens     a b c d e           and 0 3 5
    a prompt and responses  from_shared_prompt  a b c, d e, f

Shapes: S global tokens of the row (in an input array: its columns), B rows of an input array, N documents.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from longspan.data.arrays import (
    Flags,
    IntArray,
    check_runs,
    first,
    flags,
    integers,
    joined,
    of_shape,
    one_each,
    place,
    short,
    sizes_of,
    targets,
)
from longspan.errors import DataError
from longspan.names import IGNORED

if TYPE_CHECKING:
    import torch

Values = TypeVar("Values", npt.NDArray[Any], "torch.Tensor")


@dataclass(frozen=True, eq=False)
class Batch:
    """Packed documents on one token axis, ready to shard.

        documents     a b c | d e             lengths       3 2
        input_ids     a b c   d e
        labels        b c -   e -             '-' is -100: no target
        position_ids  0 1 2   0 1

    `input_ids`, `labels` and `position_ids` are int64 (S,), read-only. `lengths` holds N document lengths; 0 is allowed.
    Labels are already shifted. Each label is checked to be -100 or the next token of its document.

    `parents`: for each document, the index of the earlier document that this document continues, or -1; () if no document
    has a parent. A child sees all tokens of its parent, and its positions continue the parent's. A parent has no parent.

    `numbers`: None, or int64 (S,), the global number of each token in the run, from which dropout masks are drawn. `Loader`
    numbers tokens by their training row in the stream, so the numbers do not depend on dp or gradient accumulation.

    The constructors `from_...` copy NumPy arrays or CPU tensors. Targets are selected by `loss_mask` (1:
    this token is to be predicted) or by `labels` as Hugging Face's collators return them: aligned with the ids, not yet
    shifted, -100 where ignored. By default, every token except the first of its document is a target.

    Raises DataError: no token, a wrong shape or dtype, a negative id, lengths that do not sum to S, labels or
    positions that do not follow from ids and lengths, labels already shifted, both labels and a loss mask.
    """

    input_ids: IntArray
    labels: IntArray
    position_ids: IntArray
    lengths: tuple[int, ...]
    parents: tuple[int, ...] = ()
    numbers: IntArray | None = None

    def __post_init__(self) -> None:
        self._check_shapes()
        _check_labels(self.labels, shift_labels(self.input_ids, self.lengths))
        _check_positions(self.position_ids, positions(self.lengths, self.parents))

    def _check_shapes(self) -> None:
        """Make the arrays read-only. Raise DataError if their dtypes, sizes or parents are wrong."""
        for name in ("input_ids", "labels", "position_ids", *(("numbers",) if self.numbers is not None else ())):
            view = _int64_row(getattr(self, name), name).view()
            view.flags.writeable = False
            object.__setattr__(self, name, view)
        sizes = sizes_of(self.lengths)
        object.__setattr__(self, "lengths", tuple(sizes.tolist()))
        parents = _checked_parents(self.parents, sizes.size)
        object.__setattr__(self, "parents", tuple(parents.tolist()) if (parents >= 0).any() else ())
        S = self.input_ids.size
        if S == 0:
            raise DataError("a batch has no token", hint="give at least one non-empty document")
        if not S == self.labels.size == self.position_ids.size:
            raise DataError(
                f"{S} input_ids, {self.labels.size} labels and {self.position_ids.size} position_ids differ in number"
            )
        if self.numbers is not None and self.numbers.size != S:
            raise DataError(f"{self.numbers.size} token numbers for {S} tokens")
        if self.input_ids.min() < 0:
            raise DataError(f"input id {self.input_ids.min()} at token {self.input_ids.argmin()} is negative")

    @classmethod
    def from_documents(
        cls,
        documents: Sequence[npt.ArrayLike],
        loss_masks: Sequence[npt.ArrayLike | None] | None = None,
        *,
        labels: Sequence[npt.ArrayLike | None] | None = None,
        numbers: IntArray | None = None,
    ) -> "Batch":
        """Concatenate documents, each integer (n,). A document's loss mask is (n,) of 0 and 1, its labels are (n,), or None.

        `numbers` int64 (S,): the global number of each token in the run.
        """
        rows = [integers(document, f"document {i}") for i, document in enumerate(documents)]
        given = zip(rows, one_each(labels, rows, "labels"), one_each(loss_masks, rows, "loss masks"), strict=True)
        wanted = [targets(row, label, mask, of=f" of document {i}") for i, (row, label, mask) in enumerate(given)]
        return cls._packed(
            joined(rows, np.int64), [row.size for row in rows], joined(wanted, np.bool_), numbers=numbers
        )

    @classmethod
    def from_padded(
        cls,
        input_ids: npt.ArrayLike,
        attention_mask: npt.ArrayLike,
        *,
        labels: npt.ArrayLike | None = None,
        loss_mask: npt.ArrayLike | None = None,
    ) -> "Batch":
        """Pack rows (B, S) padded on the left or right, where `attention_mask` (B, S) is 0.

        The tokens of a row, where the mask is 1, become one document. A row of padding alone becomes a document of length 0.
        Padding is removed and never computed; `labels` and `loss_mask` of padding are ignored. The inverse, `to_padded`,
        puts one value per token back into rows.

        Raises DataError: padding between the tokens of a row.
        """
        ids = integers(input_ids, "input_ids", (2,))
        real = flags(attention_mask, ids.shape, "attention_mask")
        check_runs(real)
        wanted = targets(ids, labels, loss_mask, within=real)
        return cls._packed(ids[real], real.sum(1), wanted[real])

    @classmethod
    def from_positions(
        cls,
        input_ids: npt.ArrayLike,
        position_ids: npt.ArrayLike,
        *,
        labels: npt.ArrayLike | None = None,
        loss_mask: npt.ArrayLike | None = None,
    ) -> "Batch":
        """Flatten packed rows, (S,) or (B, S), whose documents begin where `position_ids`, of the same shape, are 0.

        Raises DataError: a row that does not begin at position 0, or a gap in positions (see `lengths_from_positions`).
        """
        ids = integers(input_ids, "input_ids", (1, 2))
        places = of_shape(integers(position_ids, "position_ids", (1, 2)), ids.shape, "position_ids")
        return cls._packed(ids, lengths_from_positions(places), targets(ids, labels, loss_mask))

    @classmethod
    def from_cu_seqlens(
        cls,
        input_ids: npt.ArrayLike,
        cu_seqlens: npt.ArrayLike,
        *,
        labels: npt.ArrayLike | None = None,
        loss_mask: npt.ArrayLike | None = None,
    ) -> "Batch":
        """Take a packed row, (S,) or (1, S), with document boundaries `cu_seqlens`, integer (N + 1,), from 0 to S.

        Two equal boundaries make a document of length 0. Raises DataError: boundaries that do not ascend from 0 to S.
        """
        ids = integers(input_ids, "input_ids", (1, 2))
        if ids.ndim == 2 and len(ids) != 1:
            raise DataError(
                f"input_ids have {len(ids)} rows, but cu_seqlens describe the documents of one row",
                hint="flatten the rows, and add to each row's cu_seqlens the number of tokens before that row",
            )
        bounds = integers(cu_seqlens, "cu_seqlens")
        if not bounds.size or bounds[0] != 0 or bounds[-1] != ids.size or (np.diff(bounds) < 0).any():
            raise DataError(
                f"cu_seqlens {short(bounds)} do not ascend from 0 to the {ids.size} input_ids",
                hint="give the start of each document, then the end of the last document; drop tokens that belong to no document",
            )
        return cls._packed(ids, np.diff(bounds), targets(ids, labels, loss_mask))

    @classmethod
    def from_shared_prompt(
        cls,
        prompt: npt.ArrayLike,
        responses: Sequence[npt.ArrayLike],
        loss_masks: Sequence[npt.ArrayLike | None] | None = None,
    ) -> "Batch":
        """Share one prompt, integer (n,), among responses, integer (m,) each with an optional loss mask (m,).

            prompt a b c      documents     a b | c d e | c f       parents    -1 0 0
            responses         input_ids     a b   c d e   c f
              d e             labels        - -   d e -   f -
              f               position_ids  0 1   2 3 4   2 3

        The last token of the prompt predicts the first token of every response, so it is copied to the start of each
        response. Losses and gradients then equal those of separate documents, each prompt + response. Tokens of the prompt
        are not targets. For several prompts use `Batch.concat`.

        Raises DataError: an empty prompt, or no response.
        """
        ids = integers(prompt, "prompt")
        answers = [integers(response, f"response {i}") for i, response in enumerate(responses)]
        if not ids.size or not answers:
            raise DataError(
                f"a prompt of {ids.size} tokens with {len(answers)} responses; both must be at least 1",
                hint="without a prompt use Batch.from_documents",
            )
        rows, wanted = [ids[:-1]], [np.zeros(ids.size - 1, np.bool_)]
        for i, (answer, mask) in enumerate(zip(answers, one_each(loss_masks, answers, "loss masks"), strict=True)):
            rows.append(np.append(ids[-1:], answer))
            wanted.append(np.append(False, targets(answer, None, mask, of=f" of response {i}")))
        parents = (-1, *[0] * len(answers))
        return cls._packed(joined(rows, np.int64), [row.size for row in rows], joined(wanted, np.bool_), parents)

    @classmethod
    def concat(cls, batches: Sequence["Batch"]) -> "Batch":
        """Concatenate `batches` along the token axis. Raises DataError: no batch."""
        if not batches:
            raise DataError("nothing to concatenate", hint="give at least one batch")
        before = np.cumsum([0, *(len(batch.lengths) for batch in batches)]).tolist()
        parents = [
            parent + offset if parent >= 0 else -1
            for batch, offset in zip(batches, before, strict=False)
            for parent in batch.parents or [-1] * len(batch.lengths)
        ]
        given = [batch.numbers for batch in batches]
        return cls._derived(
            np.concatenate([batch.input_ids for batch in batches]),
            np.concatenate([batch.labels for batch in batches]),
            np.concatenate([batch.position_ids for batch in batches]),
            tuple(length for batch in batches for length in batch.lengths),
            tuple(parents),
            None if any(numbers is None for numbers in given) else np.concatenate(given),  # type: ignore[arg-type]
        )

    @classmethod
    def _packed(
        cls,
        ids: IntArray,
        lengths: Sequence[int] | IntArray,
        wanted: Flags,
        parents: tuple[int, ...] = (),
        numbers: IntArray | None = None,
    ) -> "Batch":
        """Make a batch of ids and target flags, flattened row by row, with labels and positions derived from them."""
        row, sizes = ids.flatten(), tuple(int(n) for n in lengths)
        labels, places = shift_labels(row, sizes, wanted.flatten()), positions(sizes, parents)
        return cls._derived(row, labels, places, sizes, parents, numbers)

    @classmethod
    def _derived(cls, *values: Any) -> "Batch":
        """Make a batch from labels and positions derived from ids and lengths, which need no check."""
        made = object.__new__(cls)
        for field, value in zip(fields(cls), values, strict=True):
            object.__setattr__(made, field.name, value)
        made._check_shapes()
        return made

    @property
    def seq_len(self) -> int:
        """S, the number of tokens of the global row."""
        return self.input_ids.size

    @property
    def num_targets(self) -> int:
        """Number of labels that are not -100: this batch's part of the loss denominator."""
        return int(np.count_nonzero(self.labels != IGNORED))

    def digest(self) -> bytes:
        """Return the sha256 (32 bytes) of all contents but `numbers`, equal on every rank that read the same batch."""
        digest = hashlib.sha256(f"longspan.Batch {self.seq_len} {len(self.lengths)}\n".encode())
        for values in (self.input_ids, self.labels, self.position_ids, self.lengths, self.parents):
            digest.update(np.asarray(values, dtype="<i8").tobytes())
        return digest.digest()

    def tensors(self) -> dict[str, "torch.Tensor"]:
        """Return `input_ids`, `labels` and `position_ids` as int64 tensors (1, S), copied."""
        import torch  # not at the top: a corpus is prepared without torch

        arrays = {"input_ids": self.input_ids, "labels": self.labels, "position_ids": self.position_ids}
        return {name: torch.from_numpy(array.copy()).unsqueeze(0) for name, array in arrays.items()}


def shift_labels(
    ids: npt.ArrayLike, lengths: Sequence[int] | IntArray, loss_mask: npt.ArrayLike | None = None
) -> IntArray:
    """Return labels int64 (S,): `ids[i + 1]`, or -100 at a document's last token and before a token of `loss_mask` 0.

    `ids` integer (S,); `lengths` of the documents, with sum S, 0 allowed; `loss_mask` (S,) of 0 and 1, aligned with
    `ids`: 1 for a token to be predicted. All arguments describe the global row, never a shard.

    Raises DataError: lengths that do not sum to S, a mask of another length or with other values.
    """
    row = integers(ids, "ids")
    sizes = sizes_of(lengths)
    if sizes.sum() != row.size:
        raise DataError(
            f"lengths {short(sizes)} sum to {sizes.sum()}, but there are {row.size} ids",
            hint="give the length of every document of this row",
        )
    labels = np.full(row.size, IGNORED, np.int64)
    labels[:-1] = row[1:]
    labels[np.cumsum(sizes)[sizes > 0] - 1] = IGNORED
    if loss_mask is not None:
        mask = flags(loss_mask, row.shape, "loss_mask")
        labels[:-1][~mask[1:]] = IGNORED
    return labels


def positions(lengths: Sequence[int] | IntArray, parents: Sequence[int] = ()) -> IntArray:
    """Return positions int64 (S,) that restart at 0 in every document: `positions([3, 2])` is `[0, 1, 2, 0, 1]`.

    A document with a parent (see `Batch`) continues its positions: `positions([3, 2, 1], [-1, 0, 0])` is
    `[0, 1, 2, 3, 4, 3]`.
    """
    sizes = sizes_of(lengths)
    before = _checked_parents(parents, sizes.size)
    begins = np.cumsum(sizes) - sizes - np.where(before >= 0, sizes[before], 0)
    return np.arange(sizes.sum(), dtype=np.int64) - np.repeat(begins, sizes)


def lengths_from_positions(position_ids: npt.ArrayLike) -> tuple[int, ...]:
    """Return document lengths from the position ids of packed rows, integer (S,) or (B, S): every 0 begins a document.

    Raises DataError: a position that is neither 0 nor one more than the position before, as in a shard of a row.
    """
    rows = np.atleast_2d(integers(position_ids, "position_ids", (1, 2)))
    last = np.concatenate([np.full_like(rows[:, :1], -1), rows[:, :-1]], axis=1)
    broken = (rows != 0) & (rows != last + 1)
    if broken.any():
        at = first(broken)
        before = "begins the row" if at[1] == 0 else f"follows {last[at]}"
        raise DataError(
            f"position {rows[at]} at {place(at if len(rows) > 1 else at[1:])} {before}; "
            "a position must be 0 or one more than the position before",
            hint="give the positions of the global row, before sharding",
        )
    return tuple(np.diff(np.append(np.flatnonzero(rows == 0), rows.size)).tolist())


def to_padded(values: Values, attention_mask: npt.ArrayLike, fill: float = 0.0) -> Values:
    """Invert `Batch.from_padded`: scatter one value per token, (S,) or (1, S), to rows (B, S) with `fill` at padding.

    `attention_mask` (B, S) is the mask passed to `Batch.from_padded`. An array returns an array; a tensor returns a tensor on
    the same device, differentiably.

    Raises DataError: the number of values is not the number of tokens in the mask.
    """
    real = flags(attention_mask, None, "attention_mask")
    if (given := math.prod(values.shape)) != real.sum():
        raise DataError(f"{given} values for the {real.sum()} tokens of attention_mask {real.shape}")
    if isinstance(values, np.ndarray):
        rows = np.full(real.shape, fill, values.dtype)
        rows[real] = values.reshape(-1)
        return rows
    import torch  # not at the top: a corpus is prepared without torch

    empty = values.new_full(real.shape, fill)
    return empty.masked_scatter(torch.from_numpy(real).to(values.device), values.reshape(-1))


def _int64_row(values: object, name: str) -> IntArray:
    if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype != np.int64:
        shape, dtype = getattr(values, "shape", "none"), getattr(values, "dtype", type(values).__name__)
        raise DataError(
            f"{name} has shape {shape} and dtype {dtype}, not (S,) and int64", hint="use Batch.from_documents"
        )
    return values


def _checked_parents(parents: Sequence[int], count: int) -> IntArray:
    given = integers(parents, "parents")
    if not given.size:
        return np.full(count, -1, np.int64)
    if given.size != count:
        raise DataError(
            f"{given.size} parents for {count} documents", hint="give one parent for each document: an index, or -1"
        )
    continues = given >= 0
    wrong = (given < -1) | (given >= np.arange(count)) | (continues & continues[given.clip(0, count - 1)])
    if wrong.any():
        i = int(wrong.argmax())
        raise DataError(
            f"parent {given[i]} of document {i} is not an earlier document without a parent",
            hint="give the index of such a document, or -1",
        )
    return given


def _check_labels(labels: IntArray, expected: IntArray) -> None:
    wrong = (labels != IGNORED) & (labels != expected)
    if wrong.any():
        i = int(wrong.argmax())
        right = "the last of its document" if expected[i] == IGNORED else f"followed by {expected[i]}"
        raise DataError(
            f"label {labels[i]} at token {i}, which is {right}: labels of a Batch are shifted exactly once",
            hint="use Batch.from_documents(documents, loss_masks), which shifts labels",
        )


def _check_positions(position_ids: IntArray, expected: IntArray) -> None:
    if (position_ids != expected).any():
        i = int((position_ids != expected).argmax())
        raise DataError(
            f"position {position_ids[i]} at token {i} should be {expected[i]}: "
            "positions restart in every document that has no parent",
            hint="use positions(lengths, parents)",
        )
