"""Records and the error tree. No torch."""

from longspan.spec.errors import (
    CheckpointError,
    CommError,
    DataError,
    DisagreementError,
    DivergedError,
    LongspanError,
    SpecError,
)

__all__ = [
    "CheckpointError",
    "CommError",
    "DataError",
    "DisagreementError",
    "DivergedError",
    "LongspanError",
    "SpecError",
]
