"""Which keys each query may see: a list of disjoint bands over one token axis.

causal        documents 3 + 2     window 2        prefix 2        shared prompt 2, answers 1 + 2
# . . . .     # . . . .           # . . . .       # # . . .       # . . . .
# # . . .     # # . . .           # # . . .       # # . . .       # # . . .
# # # . .     # # # . .           . # # . .       # # # . .       # # # . .
# # # # .     . . . # .           . . # # .       # # # # .       # # . # .
# # # # #     . . . # #           . . . # #       # # # # #       # # . # #
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np

from longspan.errors import SpecError
from longspan.plan import bands as algebra
from longspan.plan.arguments import whole
from longspan.plan.bands import UNBOUNDED

Array = np.ndarray
Band = tuple[int, int, int, int, int | None, int | None]
"""`(q_start, q_stop, k_start, k_stop, lo, hi)`, None for a bound that is absent."""


@dataclass(frozen=True, eq=False)
class Mask:
    """Query `i` sees key `j` iff a band holds the pair. `array` is int64 `(n, 6)`: trimmed, disjoint bands."""

    seq_len: int
    array: Array

    @classmethod
    def full(cls, seq_len: int) -> Self:
        """Every query sees every key."""
        return cls._make(seq_len, [[0, seq_len, 0, seq_len, -UNBOUNDED, UNBOUNDED]])

    @classmethod
    def causal(cls, seq_len: int, window: int | None = None) -> Self:
        """Query `i` sees keys `0..i`, or with a window `w` the last `w` of them, itself included."""
        return cls.documents([seq_len], causal=True, window=window)

    @classmethod
    def documents(cls, lengths: Sequence[int] | Array, causal: bool = True, window: int | None = None) -> Self:
        """Packed documents that do not see each other; `seq_len` is the sum of `lengths`, zero lengths are harmless.

        A window `w` keeps keys less than `w` tokens away: behind the query if causal, else on both sides.
        """
        if window is not None and whole("window", window) < 1:
            raise SpecError(f"window={window}: a query sees at least itself", hint="use window=None for no window")
        sizes = _integers("document lengths", lengths, 1)
        if len(sizes) and sizes.min() < 0:
            raise SpecError(f"document lengths {sizes.tolist()} include a negative one")
        stop = np.cumsum(sizes)
        start = stop - sizes
        lo = 0 if causal else (-UNBOUNDED if window is None else 1 - window)
        hi = UNBOUNDED if window is None else window - 1
        columns = (start, stop, start, stop, np.full_like(start, lo), np.full_like(start, hi))
        return cls._make(int(sizes.sum()), np.stack(columns, axis=1))

    @classmethod
    def prefix(cls, seq_len: int, prefix_len: int) -> Self:
        """Prefix-LM: the first `prefix_len` tokens see each other, all later ones are causal."""
        if not 0 <= prefix_len <= seq_len:
            raise SpecError(f"prefix_len={prefix_len} is not within 0..{seq_len}")
        inside = [0, prefix_len, 0, prefix_len, -UNBOUNDED, UNBOUNDED]
        return cls._make(seq_len, [inside, [prefix_len, seq_len, 0, seq_len, 0, UNBOUNDED]])

    @classmethod
    def shared_prefix(cls, prompt_len: int, response_lens: Sequence[int]) -> Self:
        """One prompt and many responses to it: each response sees the prompt and, causally, itself."""
        if prompt_len < 0 or min(response_lens, default=0) < 0:
            raise SpecError(
                f"prompt of {prompt_len} and responses of {list(response_lens)} tokens: none may be negative"
            )
        rows = [[0, prompt_len, 0, prompt_len, 0, UNBOUNDED]]
        start = prompt_len
        for stop in (prompt_len + np.cumsum(np.asarray(response_lens, dtype=np.int64))).tolist():
            rows.append([start, stop, 0, prompt_len, -UNBOUNDED, UNBOUNDED])
            rows.append([start, stop, start, stop, 0, UNBOUNDED])
            start = stop
        return cls._make(start, rows)

    @classmethod
    def bands(cls, seq_len: int, bands: Iterable[Band]) -> Self:
        """Any disjoint bands within `seq_len`; two that share a pair are refused, since the pair would count twice."""
        rows = []
        for q0, q1, k0, k1, lo, hi in bands:
            if not (0 <= q0 <= q1 <= seq_len and 0 <= k0 <= k1 <= seq_len):
                raise SpecError(f"band queries {q0}..{q1}, keys {k0}..{k1} does not lie within 0..{seq_len}")
            rows.append([q0, q1, k0, k1, -UNBOUNDED if lo is None else lo, UNBOUNDED if hi is None else hi])
        mask = cls._make(seq_len, rows)
        if (pair := algebra.first_overlap(mask.array)) is not None:
            first, second = (tuple(mask.array[index].tolist()) for index in pair)
            raise SpecError(
                f"bands {first} and {second} (q_start, q_stop, k_start, k_stop, lo, hi) share a query-key pair",
                hint="make the bands disjoint: cut one where the other begins",
            )
        return mask

    @classmethod
    def concat(cls, masks: Sequence["Mask"]) -> Self:
        """Rows with masks of their own, one after the other on one token axis."""
        offsets = np.cumsum([0, *(mask.seq_len for mask in masks)])
        shifted = [mask.array + np.array([o, o, o, o, 0, 0]) for mask, o in zip(masks, offsets.tolist(), strict=False)]
        return cls._make(int(offsets[-1]), np.concatenate(shifted) if shifted else [])

    @classmethod
    def _make(cls, seq_len: int, rows: Any) -> Self:
        if whole("seq_len", seq_len) < 1:
            raise SpecError(f"seq_len={seq_len}: a mask covers at least one token")
        return cls(whole("seq_len", seq_len), algebra.trim(_integers("bands", rows, 2).reshape(-1, 6))[0])

    @cached_property
    def area(self) -> int:
        """Visible (query, key) pairs."""
        return int(algebra.area(self.array).sum())

    def dense(self) -> Array:
        """The mask itself, bool `(seq_len, seq_len)`: the oracle, for tests and drawings only."""
        index = np.arange(self.seq_len)
        away = index[:, None] - index[None, :]
        seen = np.zeros((self.seq_len, self.seq_len), dtype=bool)
        for q0, q1, k0, k1, lo, hi in self.array.tolist():
            block = away[q0:q1, k0:k1]
            seen[q0:q1, k0:k1] |= (block >= lo) & (block <= hi)
        return seen

    def fingerprint(self) -> bytes:
        """What the mask says, as bytes: equal masks given by equal bands, equal bytes."""
        return f"mask {self.seq_len} ".encode() + self.array.astype("<i8").tobytes()

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Mask) and self.fingerprint() == other.fingerprint()

    def __hash__(self) -> int:
        return hash(self.fingerprint())


def _integers(name: str, values: Any, ndim: int) -> Array:
    """An int64 array of that many dims; empty lists pass, and nothing is rounded or flattened."""
    array = np.asarray(values)
    if array.size and (array.dtype.kind not in "iu" or array.ndim != ndim):
        raise SpecError(f"{name} {values!r} are not integers in {ndim} dim{'s' * (ndim > 1)}")
    return array.astype(np.int64) if array.size else np.empty(0, dtype=np.int64)
