"""Visible pairs of any range of queries, in closed form: the cost of a cut of the token axis.

The number of keys that a query sees in a band is piecewise linear in the query, and so is the sum over many bands.

keys per query     causal, 5 tokens   1 2 3 4 5        window 3   1 2 3 3 3        sum before token 3   6
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cache, cached_property

import numpy as np

from longspan.plan.mask import Mask

Array = np.ndarray


class Density:
    """Visible pairs by range of queries: the weighted sum over masks, given as (mask, weight) tuples."""

    def __init__(self, masks: Sequence[tuple[Mask, int]]) -> None:
        self.masks = masks
        self.seq_len = masks[0][0].seq_len
        bands = np.concatenate([mask.array for mask, _ in masks])
        weight = np.repeat([weight for _, weight in masks], [len(mask.array) for mask, _ in masks])
        q0, q1, k0, k1, lo, hi = bands.T
        first = np.minimum(k1 - 1, q0 - lo) - np.maximum(k0, q0 - hi) + 1
        last = np.minimum(k1 - 1, q1 - 1 - lo) - np.maximum(k0, q1 - 1 - hi) + 1
        # Each row sees one key more than the row above until its last key is `k1 - 1`, and one fewer once its first key
        # is beyond `k0`.
        full = np.clip(k1 - 1 + lo, q0, q1 - 1) + 1
        leaving = np.minimum(np.maximum(k0 + hi, q0) + 1, q1)
        at = np.concatenate(([0], q0, q1, q0 + 1, full, leaving, q1))
        none = np.zeros_like(weight)
        jump = np.concatenate(([0], weight * first, -weight * last, none, none, none, none))
        turn = np.concatenate(([0], none, none, weight, -weight, -weight, weight))
        edges, inverse = np.unique(at, return_inverse=True)
        jumps, turns = np.zeros((2, len(edges)), dtype=np.int64)
        np.add.at(jumps, inverse, jump)
        np.add.at(turns, inverse, turn)
        slope = np.cumsum(turns)
        width = np.diff(edges)
        rise = np.concatenate(([0], slope[:-1] * (width - 1)))
        value = np.cumsum(rise + slope + jumps)
        sums = np.concatenate(([0], np.cumsum(value[:-1] * width + slope[:-1] * (width * (width - 1) // 2))))
        self._arrays = edges, value, slope, sums
        self._lists = tuple(array.tolist() for array in self._arrays)
        self.before = cache(self._before)
        """Pairs of all queries before a token; cached, because `balance` evaluates the same edges repeatedly."""

    def _before(self, token: int) -> int:
        edges, value, slope, sums = self._lists
        index = bisect_right(edges, token) - 1
        n = token - edges[index]
        return sums[index] + n * value[index] + n * (n - 1) // 2 * slope[index]

    def between(self, start: int, stop: int) -> int:
        """Pairs of the queries `start..stop`."""
        return self.before(stop) - self.before(start)

    def within(self, runs: Sequence[tuple[int, int]]) -> int:
        """Pairs of the queries in all `runs`."""
        edges, value, slope, sums = self._arrays
        tokens = np.array(runs, dtype=np.int64).reshape(-1, 2)
        index = np.searchsorted(edges, tokens, side="right") - 1
        n = tokens - edges[index]
        before = sums[index] + n * value[index] + n * (n - 1) // 2 * slope[index]
        return int((before[:, 1] - before[:, 0]).sum())

    def rising(self, runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Cut `runs` where a query sees fewer keys than the query before, such as between responses to one prompt."""
        if not self._falls:
            return list(runs)
        parts: list[tuple[int, int]] = []
        for start, stop in runs:
            inside = self._falls[bisect_right(self._falls, start) : bisect_left(self._falls, stop)]
            parts += zip([start, *inside], [*inside, stop], strict=True)
        return parts

    @cached_property
    def _falls(self) -> list[int]:
        """Tokens inside a piece at which the number of visible keys drops, ascending."""
        edges, value, slope, _ = self._arrays
        last = value[:-1] + slope[:-1] * (np.diff(edges) - 1)
        falls = edges[1:][value[1:] < last + np.minimum(np.minimum(slope[:-1], slope[1:]), 0)]
        return np.setdiff1d(falls, self.pieces[:, 0]).tolist()

    @property
    def total(self) -> int:
        return self.before(self.seq_len)

    @cached_property
    def pieces(self) -> Array:
        """Ranges of tokens that no band connects, such as documents: int64 `(n, 2)`, (start, stop), ascending."""
        bands = np.concatenate([mask.array for mask, _ in self.masks])
        start, stop = np.minimum(bands[:, 0], bands[:, 2]), np.maximum(bands[:, 1], bands[:, 3])
        order = np.argsort(start, kind="stable")
        start, reach = start[order], np.maximum.accumulate(stop[order])
        begins = np.concatenate(([True], start[1:] >= reach[:-1])) if len(start) else np.empty(0, dtype=bool)
        start, stop = start[begins], reach[np.append(np.flatnonzero(begins)[1:] - 1, -1)] if len(start) else start
        gaps = np.stack((np.append(0, stop), np.append(start, self.seq_len)), axis=1)
        runs = np.concatenate((np.stack((start, stop), axis=1), gaps[gaps[:, 0] < gaps[:, 1]]))
        return runs[np.argsort(runs[:, 0], kind="stable")]
