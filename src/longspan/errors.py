"""Every error that longspan raises on purpose.

    LongspanError
    ├── SpecError        (ValueError)    a value that breaks a rule: degree, length, heads, bands, option
    ├── DataError        (ValueError)    documents, tokenizers, packs, loader state
    ├── CheckpointError  (ValueError)    a checkpoint that does not fit the model or the run
    ├── DisagreementError(RuntimeError)  ranks of one group that got different inputs; names the ranks
    ├── CommError        (RuntimeError)  a rank that died, a hop that timed out
    └── DivergedError    (RuntimeError)  gradients that are not finite, except while fp16 searches for a loss scale

A message names the values and the rule they broke; `hint` names what to set instead.
"""


class LongspanError(Exception):
    """Base of all errors of this library. `str(error)` is the message, and `hint: ...` after a blank line if given."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n\nhint: {self.hint}"


class SpecError(LongspanError, ValueError):
    """A layout, mask, route, shape or option that breaks a rule."""


class DataError(LongspanError, ValueError):
    """Documents, a tokenizer or a loader state that cannot be used."""


class CheckpointError(LongspanError, ValueError):
    """A checkpoint that does not fit the model or the run."""


class DisagreementError(LongspanError, RuntimeError):
    """Ranks of one group that got different batches, plans or shapes."""


class CommError(LongspanError, RuntimeError):
    """A peer that died, or a transfer that timed out."""


class DivergedError(LongspanError, RuntimeError):
    """A run whose loss or gradients are no longer finite."""
