"""Check the arrays that a `Batch` is made from: ids, masks, lengths and labels.
NumPy arrays, lists and CPU tensors are accepted. An error names the array, its shape and the position.
"""

from collections.abc import Sequence, Sized
from typing import Any

import numpy as np
import numpy.typing as npt

from longspan.errors import DataError
from longspan.names import IGNORED

IntArray = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
_SHAPES = {1: "(S,)", 2: "(B, S)"}


def targets(
    ids: IntArray,
    labels: npt.ArrayLike | None,
    loss_mask: npt.ArrayLike | None,
    *,
    within: Flags | None = None,
    of: str = "",
) -> Flags:
    """Return which tokens are targets, bool in the shape of `ids`: all tokens if `labels` and `loss_mask` are None.

    `labels` are not shifted: a label is the id at the same index, or -100. Labels are checked where `within` is True.
    `of` completes the array's name in errors, as in " of document 3".
    """
    if labels is None:
        return np.ones(ids.shape, np.bool_) if loss_mask is None else flags(loss_mask, ids.shape, f"loss_mask{of}")
    if loss_mask is not None:
        raise DataError(
            f"labels and loss_mask{of} are both given",
            hint="labels and loss_mask both select the targets: give only one",
        )
    given = of_shape(integers(labels, f"labels{of}", (ids.ndim,)), ids.shape, f"labels{of}")
    wrong = (given != IGNORED) & (given != ids)
    if within is not None:
        wrong &= within
    if wrong.any():
        at = first(wrong)
        raise DataError(
            f"label {given[at]} at {place(at)}{of}, whose id is {ids[at]}: a label must be the id at the same index",
            hint=f"give labels that are not shifted, with {IGNORED} where ignored: Batch shifts them",
        )
    return given != IGNORED


def integers(values: npt.ArrayLike, name: str, ndims: tuple[int, ...] = (1,)) -> IntArray:
    """Return `values` as int64. Raises DataError: the number of dims is not in `ndims`, or the dtype is not integer.

    An empty array may have any type.
    """
    array = _array(values, name)
    if array.size == 0 and array.ndim in ndims:
        return np.empty(array.shape, np.int64)
    if array.ndim not in ndims or array.dtype.kind not in "iu":
        shapes = " or ".join(_SHAPES[ndim] for ndim in ndims)
        raise DataError(f"{name} has shape {array.shape} and dtype {array.dtype}, not {shapes} and integer")
    return array.astype(np.int64, copy=False)


def flags(values: npt.ArrayLike, shape: tuple[int, ...] | None, name: str) -> Flags:
    """Return `values` of 0 and 1 as bool. Raises DataError: other values, or not `shape`, where `shape` is given."""
    array = _array(values, name)
    if shape is not None:
        of_shape(array, shape, name)
    if not np.isin(array, (0, 1)).all():
        raise DataError(f"{name} holds {array[~np.isin(array, (0, 1))][0]}; its values are 0 and 1")
    return array.astype(np.bool_)


def of_shape(array: npt.NDArray[Any], shape: tuple[int, ...], name: str) -> npt.NDArray[Any]:
    """Return `array`. Raises DataError: the array's shape is not `shape`, the shape of the ids."""
    if array.shape != shape:
        raise DataError(f"{name} has shape {array.shape}, but the ids have shape {shape}")
    return array


def sizes_of(lengths: Sequence[int] | IntArray) -> IntArray:
    """Return document lengths as int64 (N,). Raises DataError: a negative length."""
    sizes = integers(lengths, "lengths")
    if sizes.size and sizes.min() < 0:
        raise DataError(f"lengths {short(sizes)} contain {sizes.min()}; a document has 0 tokens or more")
    return sizes


def check_runs(real: Flags) -> None:
    """Raise DataError if the tokens of a row of (B, S) are not contiguous."""
    begins = real & ~np.pad(real, ((0, 0), (1, 0)))[:, :-1]
    broken = begins.sum(1) > 1
    if broken.any():
        raise DataError(
            f"attention_mask of row {broken.argmax()} has padding between tokens; padding must be on the left or right of a row",
            hint="for several documents in one row use Batch.from_positions",
        )


def one_each(
    values: Sequence[npt.ArrayLike | None] | None, documents: Sized, name: str
) -> Sequence[npt.ArrayLike | None]:
    """Return one value, or None, for each document."""
    if values is not None and len(values) != len(documents):
        raise DataError(
            f"{len(values)} {name} for {len(documents)} documents", hint="give one for each document, or None"
        )
    return [None] * len(documents) if values is None else values


def joined(parts: Sequence[npt.NDArray[Any]], dtype: type[np.generic]) -> npt.NDArray[Any]:
    """Return `parts` concatenated; an empty array of `dtype` if there are none."""
    return np.concatenate([np.empty(0, dtype), *parts])


def first(wrong: Flags) -> tuple[int, ...]:
    """Return the index of the first True."""
    return tuple(int(i) for i in np.argwhere(wrong)[0])


def place(at: tuple[int, ...]) -> str:
    """Format an index into (S,) or (B, S)."""
    return f"token {at[0]}" if len(at) == 1 else f"row {at[0]}, token {at[1]}"


def short(values: IntArray) -> str:
    """Format at most 8 of `values`."""
    return str(values.tolist()) if values.size <= 8 else f"[{', '.join(map(str, values[:8]))}, ...]"


def _array(values: npt.ArrayLike, name: str) -> npt.NDArray[Any]:
    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{name} is not an array: {error}", hint="give rows of equal length, and tensors on the CPU"
        ) from None
