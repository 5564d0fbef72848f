"""Checks of integer arguments. An error names the value; no value is rounded."""

from operator import index
from typing import Any

from longspan.errors import SpecError


def check_rank(rank: int, ranks: int) -> int:
    """Return `rank`. Raises `SpecError` unless `0 <= rank < ranks`."""
    if not 0 <= rank < ranks:
        raise SpecError(f"rank {rank} is not one of the {ranks} ranks 0..{ranks - 1}")
    return rank


def whole(name: str, value: Any) -> int:
    """Return `value` as an int. Raises `SpecError` unless its type is an integer type."""
    try:
        return index(value)
    except TypeError:
        raise SpecError(f"{name}={value!r} is not an integer") from None
