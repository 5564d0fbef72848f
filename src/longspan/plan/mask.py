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
"""`(q_start, q_stop, k_start, k_stop, lo, hi)`; None for `lo` or `hi` means no bound."""


@dataclass(frozen=True, eq=False)
class Mask:
    """The keys that each query sees: query `i` sees key `j` iff one of the bands contains the pair `(i, j)`.

    `array` is int64 `(n, 6)`: trimmed, disjoint bands, as in `plan.bands`.
    """

    seq_len: int
    array: Array

    @classmethod
    def full(cls, seq_len: int) -> Self:
        """Let every query see every key."""
        return cls._make(seq_len, [[0, seq_len, 0, seq_len, -UNBOUNDED, UNBOUNDED]])

    @classmethod
    def causal(cls, seq_len: int, window: int | None = None) -> Self:
        """Let query `i` see keys `0..i`. With a window `w`, query `i` sees only keys `i - w + 1 .. i`."""
        return cls.documents([seq_len], causal=True, window=window)

    @classmethod
    def documents(cls, lengths: Sequence[int] | Array, causal: bool = True, window: int | None = None) -> Self:
        """Pack documents that do not see each other. `seq_len` is the sum of `lengths`; lengths of zero are allowed.

        With a window `w`, a query sees only keys less than `w` tokens away: before the query if causal, else on both sides.
        """
        if window is not None and whole("window", window) < 1:
            raise SpecError(
                f"window={window} is below 1: a query sees at least itself", hint="use window=None for no window"
            )
        sizes = _integers("document lengths", lengths, 1)
        if len(sizes) and sizes.min() < 0:
            raise SpecError(f"document lengths {sizes.tolist()} include a negative length")
        stop = np.cumsum(sizes)
        start = stop - sizes
        lo = 0 if causal else (-UNBOUNDED if window is None else 1 - window)
        hi = UNBOUNDED if window is None else window - 1
        columns = (start, stop, start, stop, np.full_like(start, lo), np.full_like(start, hi))
        return cls._make(int(sizes.sum()), np.stack(columns, axis=1))

    @classmethod
    def chunked(cls, lengths: Sequence[int] | Array, chunk: int) -> Self:
        """Pack documents, each cut into chunks of `chunk` tokens from its first one. A query sees its chunk up to itself.

        The attention of Llama 4's local layers.
        """
        if whole("chunk", chunk) < 1:
            raise SpecError(
                f"chunk={chunk} is below 1: a query sees at least itself", hint="use Mask.documents for none"
            )
        sizes = _integers("document lengths", lengths, 1)
        whole_chunks = np.maximum(sizes, 0) // chunk
        cuts = [
            [chunk] * count + [rest] for count, rest in zip(whole_chunks, sizes - whole_chunks * chunk, strict=True)
        ]
        return cls.documents([size for document in cuts for size in document])

    @classmethod
    def prefix(cls, seq_len: int, prefix_len: int) -> Self:
        """Prefix-LM: the first `prefix_len` tokens all see each other, and later tokens are causal."""
        if not 0 <= prefix_len <= seq_len:
            raise SpecError(f"prefix_len={prefix_len} is not within 0..{seq_len}")
        inside = [0, prefix_len, 0, prefix_len, -UNBOUNDED, UNBOUNDED]
        return cls._make(seq_len, [inside, [prefix_len, seq_len, 0, seq_len, 0, UNBOUNDED]])

    @classmethod
    def shared_prefix(cls, prompt_len: int, response_lens: Sequence[int]) -> Self:
        """Pack one prompt and many responses. The prompt is causal; each response sees the prompt and, causally, itself."""
        if prompt_len < 0 or min(response_lens, default=0) < 0:
            raise SpecError(
                f"prompt_len={prompt_len}, response_lens={list(response_lens)}: lengths must not be negative"
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
        """Make a mask of disjoint bands within `seq_len`. Raises `SpecError` if two bands share a pair."""
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
                hint="make the bands disjoint: end one band where the other begins",
            )
        return mask

    @classmethod
    def concat(cls, masks: Sequence["Mask"]) -> Self:
        """Concatenate the batch's rows on one token axis, each row with its own mask. No row sees another row."""
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
        """Number of visible (query, key) pairs."""
        return int(algebra.area(self.array).sum())

    def dense(self) -> Array:
        """Materialise the mask as bool `(seq_len, seq_len)`: the oracle, for tests and drawings only."""
        index = np.arange(self.seq_len)
        away = index[:, None] - index[None, :]
        seen = np.zeros((self.seq_len, self.seq_len), dtype=bool)
        for q0, q1, k0, k1, lo, hi in self.array.tolist():
            block = away[q0:q1, k0:k1]
            seen[q0:q1, k0:k1] |= (block >= lo) & (block <= hi)
        return seen

    def fingerprint(self) -> bytes:
        """Serialise the bands, for comparison and hashing. The same mask, cut into other bands, gives other bytes."""
        return f"mask {self.seq_len} ".encode() + self.array.astype("<i8").tobytes()

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Mask) and self.fingerprint() == other.fingerprint()

    def __hash__(self) -> int:
        return hash(self.fingerprint())


def _integers(name: str, values: Any, ndim: int) -> Array:
    """Convert to int64. Raises `SpecError` unless `values` is empty or holds integers in `ndim` dims."""
    array = np.asarray(values)
    if array.size and (array.dtype.kind not in "iu" or array.ndim != ndim):
        raise SpecError(f"{name} {values!r} are not integers in {ndim} dim{'s' * (ndim > 1)}")
    return array.astype(np.int64) if array.size else np.empty(0, dtype=np.int64)
