"""Bytes of a key or value row in flight, by communication dtype.

none   the tensors' own dtype
bf16   2 bytes an element
fp8    1 byte (e4m3) an element, and 1 byte of shared exponent for every 32 elements of a head: MXFP8 of the OCP
       Microscaling Formats specification 1.0. No group of 32 spans two rows, so any range of rows can be sent on its own.
"""

from longspan.errors import SpecError
from longspan.names import COMM_DTYPES

FP8_BLOCK = 32
"""Elements that share an exponent."""


def check_comm_dtype(name: str | None) -> str | None:
    """Return `name`. Raises `SpecError` unless it is None or a communication dtype."""
    if name is not None and name not in COMM_DTYPES:
        raise SpecError(
            f"comm_dtype {name!r} is not known",
            hint=f"choose one of {', '.join(COMM_DTYPES)}, or leave comm_dtype out to send rows in their own dtype",
        )
    return name


def row_bytes(comm_dtype: str | None, dim: int, itemsize: int) -> int:
    """Bytes in flight of one row of one head: `dim` elements of `itemsize` bytes each before conversion."""
    if comm_dtype is None:
        return dim * itemsize
    return dim * 2 if comm_dtype == "bf16" else dim - (-dim // FP8_BLOCK)
