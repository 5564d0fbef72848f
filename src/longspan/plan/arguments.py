"""Arguments that must be whole numbers or ranks: said so by value, never rounded."""

from operator import index
from typing import Any

from longspan.errors import SpecError


def check_rank(rank: int, ranks: int) -> int:
    """`rank` itself if it is one of `ranks`, else an error."""
    if not 0 <= rank < ranks:
        raise SpecError(f"rank {rank} is not one of the {ranks} ranks 0..{ranks - 1}")
    return rank


def whole(name: str, value: Any) -> int:
    """`value` as an int if it is a whole number by type, else an error: 8.7 tokens are not rounded."""
    try:
        return index(value)
    except TypeError:
        raise SpecError(f"{name}={value!r} is not an integer") from None
