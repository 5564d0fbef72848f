"""What a user gives a Batch, checked: integers, flags, lengths, and which tokens are to be predicted.
Arrays of numpy, lists, and tensors on the CPU; an error names the array, its shape and the place.
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
    """Which tokens are to be predicted, in the shape of `ids`: all, or as the mask or labels in their place say.

    Labels are looked at where `within` is True. `of` names the document, as in " of document 3".
    """
    if labels is None:
        return np.ones(ids.shape, np.bool_) if loss_mask is None else flags(loss_mask, ids.shape, f"loss_mask{of}")
    if loss_mask is not None:
        raise DataError(f"labels and loss_mask{of} are both given", hint="either says what is a target: give one")
    given = of_shape(integers(labels, f"labels{of}", (ids.ndim,)), ids.shape, f"labels{of}")
    wrong = (given != IGNORED) & (given != ids)
    if within is not None:
        wrong &= within
    if wrong.any():
        at = first(wrong)
        raise DataError(
            f"label {given[at]} at {place(at)}{of}, whose id is {ids[at]}: a label is the id at its own place",
            hint=f"give labels that are not shifted, {IGNORED} where ignored: a batch shifts them, once",
        )
    return given != IGNORED


def integers(values: npt.ArrayLike, name: str, ndims: tuple[int, ...] = (1,)) -> IntArray:
    """As int64; another number of dims or type is refused, no value at all is an array of any type."""
    array = _array(values, name)
    if array.size == 0 and array.ndim in ndims:
        return np.empty(array.shape, np.int64)
    if array.ndim not in ndims or array.dtype.kind not in "iu":
        shapes = " or ".join(_SHAPES[ndim] for ndim in ndims)
        raise DataError(f"{name} has shape {array.shape} and dtype {array.dtype}, not {shapes} and integer")
    return array.astype(np.int64, copy=False)


def flags(values: npt.ArrayLike, shape: tuple[int, ...] | None, name: str) -> Flags:
    """0 and 1 as bool, of that shape, or of any."""
    array = _array(values, name)
    if shape is not None:
        of_shape(array, shape, name)
    if not np.isin(array, (0, 1)).all():
        raise DataError(f"{name} holds {array[~np.isin(array, (0, 1))][0]}; its values are 0 and 1")
    return array.astype(np.bool_)


def of_shape(array: npt.NDArray[Any], shape: tuple[int, ...], name: str) -> npt.NDArray[Any]:
    """The array, if it has the shape of the ids."""
    if array.shape != shape:
        raise DataError(f"{name} has shape {array.shape}, but the ids have shape {shape}")
    return array


def sizes_of(lengths: Sequence[int] | IntArray) -> IntArray:
    """Lengths of documents, int64 (N,)."""
    sizes = integers(lengths, "lengths")
    if sizes.size and sizes.min() < 0:
        raise DataError(f"lengths {short(sizes)} hold {sizes.min()}; a document has 0 tokens or more")
    return sizes


def check_runs(real: Flags) -> None:
    """Refuse a row of (B, S) whose tokens are not one run."""
    begins = real & ~np.pad(real, ((0, 0), (1, 0)))[:, :-1]
    broken = begins.sum(1) > 1
    if broken.any():
        raise DataError(
            f"attention_mask of row {broken.argmax()} has padding between tokens; padding is before or behind them",
            hint="for several documents in a row use Batch.from_positions",
        )


def one_each(
    values: Sequence[npt.ArrayLike | None] | None, documents: Sized, name: str
) -> Sequence[npt.ArrayLike | None]:
    """One value, or None, for each document."""
    if values is not None and len(values) != len(documents):
        raise DataError(f"{len(values)} {name} for {len(documents)} documents", hint="give one, or None, for each")
    return [None] * len(documents) if values is None else values


def joined(parts: Sequence[npt.NDArray[Any]], dtype: type[np.generic]) -> npt.NDArray[Any]:
    """End to end; there may be none."""
    return np.concatenate([np.empty(0, dtype), *parts])


def first(wrong: Flags) -> tuple[int, ...]:
    """Index of the first True."""
    return tuple(int(i) for i in np.argwhere(wrong)[0])


def place(at: tuple[int, ...]) -> str:
    """An index into (S,) or (B, S), in words."""
    return f"token {at[0]}" if len(at) == 1 else f"row {at[0]}, token {at[1]}"


def short(values: IntArray) -> str:
    """At most 8 of them."""
    return str(values.tolist()) if values.size <= 8 else f"[{', '.join(map(str, values[:8]))}, ...]"


def _array(values: npt.ArrayLike, name: str) -> npt.NDArray[Any]:
    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{name} is no array: {error}", hint="rows have one length, tensors are on the CPU") from None
