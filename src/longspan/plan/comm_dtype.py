"""What a key or value row weighs on the wire.

none   the tensors' own type
bf16   2 bytes an element
fp8    an e4m3 byte an element, and for every 32 of a head's elements one byte of common exponent (the MXFP8 format of the
       OCP Microscaling Formats specification 1.0): a row stands by itself, however rows are cut, packed and passed on
"""

from longspan.errors import SpecError
from longspan.names import COMM_DTYPES

FP8_BLOCK = 32
"""Elements of a head's row that share an exponent."""


def check_comm_dtype(name: str | None) -> str | None:
    """`name` if it is None or a type that rows can travel in, else an error."""
    if name is not None and name not in COMM_DTYPES:
        raise SpecError(
            f"comm_dtype {name!r} is not known",
            hint=f"choose one of {', '.join(COMM_DTYPES)}, or leave it out to send rows as they are",
        )
    return name


def row_bytes(comm_dtype: str | None, dim: int, itemsize: int) -> int:
    """Bytes of one head's row of `dim` elements on the wire, whose own elements have `itemsize` bytes."""
    if comm_dtype is None:
        return dim * itemsize
    return dim * 2 if comm_dtype == "bf16" else dim - (-dim // FP8_BLOCK)
