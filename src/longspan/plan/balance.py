"""The balanced layout: spans chosen from the masks for equal tokens, nearly equal visible pairs, and few rows to move.

    a long document, causal    # # # # # # # # # # # #      its last tokens see the most keys
    short documents            .. ... .. ... .. .           see few keys; no short document is cut
    rank 0                     .. ... ..        # # #       takes from the top up to its share of the pairs
    rank 1                     ... .. .   # # # #           takes from the rest; short documents fill up its tokens

Ranks are filled in turn, each up to its share of the remaining tokens and pairs. If the top is too dense and no sparse
tokens are left, a rank takes some of the top and some of the bottom of a document; a single document becomes zigzag.
"""

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from longspan.plan.density import Density

Array = np.ndarray
Run = tuple[int, int]
"""A contiguous range of tokens `(start, stop)`."""

_SHORT = 0.25
"""Documents up to this fraction of a shard are dealt uncut. Until dealt, they count as a "fluid" of mean density."""
_SLACK = 0.001
"""Relative excess over a rank's share of the pairs up to which the top of a document is still taken undiluted."""
_EVEN = 0.01
"""Tolerance of `_even_out`: no rank's pairs exceed the mean by more than this fraction."""


def balanced_spans(density: Density, ranks: int, slots: int | None = None, min_split_tokens: int = 0) -> Array:
    """Choose spans `(n, 3)`: owner, start, stop, sorted by owner and start. Token counts as in `Layout.balanced`."""
    size, longer = divmod(density.seq_len, ranks)
    share = [size + (rank < longer) for rank in range(ranks)]
    documents = density.pieces
    lengths = documents[:, 1] - documents[:, 0]
    if (lengths == lengths[0]).all() and lengths[0] <= _SHORT * size:
        each, more = divmod(len(lengths), ranks)
        even = [int(lengths[0]) * (each + (rank < more)) for rank in range(ranks)]
        if slots is None or even[0] <= slots:
            share, min_split_tokens = even, max(min_split_tokens, int(lengths[0]) + 1)
    limit = max(_SHORT * size, min_split_tokens - 1)
    short = lengths <= limit
    shorts = documents[short][np.argsort(-lengths[short], kind="stable")].tolist()
    longs = documents[~short].tolist()
    holes = _Pouring(density, share, longs, fluid=shorts).holes
    dealt, rest = _deal(shorts, holes, share, slots, min_split_tokens)
    pouring = _Pouring(density, share, longs + rest, dealt)
    for longer_than in (limit, min_split_tokens - 1):  # cut short documents only if long ones do not suffice
        _even_out(density, pouring.taken, pouring.pairs, longer_than)
    return _joined(pouring.taken)


def _deal(
    shorts: Sequence[Run], holes: Sequence[int], share: Sequence[int], slots: int | None, min_split_tokens: int
) -> tuple[list[list[Run]], list[Run]]:
    """Deal uncut documents to ranks, longest first: each into the largest hole, else to the rank with most room.

    Returns (documents of each rank, remaining documents). The remaining documents have to be cut.
    """

    def spare(rank: int, length: int) -> float:
        """Tokens that a rank may take beyond its share, so that a document of `length` tokens is not cut."""
        if length < min_split_tokens:
            return length if slots is None else slots - share[rank]
        return 0 if slots is None else min(slots - share[rank], _EVEN * share[rank])

    dealt: list[list[Run]] = [[] for _ in share]
    left = list(share)
    heap = [(-hole, rank) for rank, hole in enumerate(holes)]
    heapq.heapify(heap)
    waiting, rest = [], []
    for start, stop in shorts:
        hole, rank = heap[0]
        if stop - start > -hole:
            waiting.append((start, stop))
            continue
        heapq.heapreplace(heap, (hole + stop - start, rank))
        dealt[rank].append((start, stop))
        left[rank] -= stop - start
    heap = [(-tokens, rank) for rank, tokens in enumerate(left)]
    heapq.heapify(heap)
    for start, stop in waiting:
        tokens, rank = heap[0]
        over = stop - start + tokens  # tokens that the rank would have beyond its share
        if over <= spare(rank, stop - start):
            heapq.heapreplace(heap, (tokens + stop - start, rank))
            dealt[rank].append((start, stop))
        else:
            rest.append((start, stop))
    return dealt, rest


class _Pouring:
    """Distribute documents to ranks, one rank after the other.

    Results by rank: `taken` ranges of tokens, `pairs` visible in these ranges, `holes` tokens left for documents in `fluid`.
    """

    def __init__(
        self,
        density: Density,
        share: Sequence[int],
        documents: Sequence[Run],
        dealt: Sequence[Sequence[Run]] | None = None,
        fluid: Sequence[Run] = (),
    ) -> None:
        ranks = len(share)
        self._between = density.between
        # Sorted by the keys that the last token sees, then by length, both descending.
        self._whole = sorted((-density.between(stop - 1, stop), start - stop, start, stop) for start, stop in documents)
        self._cut: list[Run] = []
        self._fluid = sum(stop - start for start, stop in fluid)
        self._thin = density.within(fluid) / max(self._fluid, 1)
        self.taken = [list(runs) for runs in dealt] if dealt else [[] for _ in share]
        self.pairs = [density.within(runs) for runs in self.taken]
        self.holes = [0] * ranks
        pairs_left, tokens_left = float(density.total), density.seq_len
        for rank in range(ranks):
            before = self.pairs[rank]
            self._rank = rank
            self._mean = pairs_left / max(tokens_left, 1)
            self._tokens = share[rank] - sum(stop - start for start, stop in self.taken[rank])
            self._pairs = target = pairs_left / (ranks - rank) - before
            self._fill()
            pairs_left -= before + target - self._pairs
            tokens_left -= share[rank]

    def _fill(self) -> None:
        while self._tokens > 0 and (self._whole or self._cut):
            start, stop = self._pop_densest()
            if self._top(start, stop, self._tokens) > self._pairs * (1 + _SLACK):
                self._dilute(start, stop)
            self._pour(start, stop)
        self._take_fluid(self._tokens)

    def _pop_densest(self) -> Run:
        """Remove and return the document whose last n tokens see most keys, where n is the number of tokens the rank lacks."""
        index = max(range(len(self._cut)), key=lambda i: self._top(*self._cut[i], self._tokens), default=None)
        if self._whole:
            start, stop = self._whole[0][2:]
            if index is None or self._top(start, stop, self._tokens) >= self._top(*self._cut[index], self._tokens):
                del self._whole[0]
                return start, stop
        assert index is not None, "some document is left"
        return self._cut.pop(index)

    def _pour(self, start: int, stop: int) -> None:
        """Take the tokens that the rank lacks from the top of a document, and from the bottom if the top is too dense."""
        tokens = min(self._tokens, stop - start)
        between = self._between

        def pairs(top: int) -> int:
            return between(stop - top, stop) + between(start, start + tokens - top)

        top = tokens
        if tokens < stop - start and pairs(tokens) > self._pairs:
            top = _least(pairs, tokens, self._pairs)
            if top and self._pairs - pairs(top - 1) < pairs(top) - self._pairs:
                top -= 1
        self._take(stop - top, stop)
        self._take(start, start + tokens - top)
        self._put_back(start + tokens - top, stop - top)

    def _dilute(self, start: int, stop: int) -> None:
        """Take tokens that see few keys, as long as the top of `start..stop` still has the pairs that the rank lacks."""
        index = 0
        while index < len(self._whole) and self._tokens > 0:
            _, length, first, last = self._whole[index]
            pairs = self._pairs - self._between(first, last)
            if -length <= self._tokens and 0 <= pairs <= self._top(start, stop, self._tokens + length):
                del self._whole[index]
                self._take(first, last)
            else:
                index += 1
        most = min(self._fluid, self._tokens)
        if most:
            self._take_fluid(
                _least(lambda n: -self._top(start, stop, self._tokens - n) - n * self._thin, most, -self._pairs)
            )
        # The bottom of a document denser than the mean does not offset its top: it runs out first.
        while self._tokens > 0 and self._top(start, stop, self._tokens) > self._pairs:
            if self._between(start, stop) <= self._mean * (stop - start) or not self._take_sparse(start, stop):
                break

    def _take_sparse(self, start: int, stop: int) -> bool:
        """Take from the bottom of the sparsest document, if it is sparser than the mean. Prefers documents already cut."""
        mean = {run: self._between(*run) / (run[1] - run[0]) for run in self._cut}
        run = min(mean, key=mean.__getitem__, default=None)
        if run is not None and mean[run] < self._mean:
            self._cut.remove(run)
        elif self._whole and self._between(*self._whole[-1][2:]) < self._mean * -self._whole[-1][1]:
            run = self._whole.pop()[2:]
        else:
            return False
        low, high = run
        most = min(self._tokens, high - low)
        n = _least(
            lambda n: -self._top(start, stop, self._tokens - n) - self._between(low, low + n), most, -self._pairs
        )
        self._take(low, low + n)
        self._put_back(low + n, high)
        return n > 0

    def _top(self, start: int, stop: int, tokens: int) -> int:
        return self._between(max(start, stop - tokens), stop)

    def _take(self, start: int, stop: int) -> None:
        if start < stop:
            pairs = self._between(start, stop)
            self.taken[self._rank].append((start, stop))
            self.pairs[self._rank] += pairs
            self._pairs -= pairs
            self._tokens -= stop - start

    def _take_fluid(self, tokens: int) -> None:
        tokens = min(tokens, self._fluid)
        self.holes[self._rank] += tokens
        self._fluid -= tokens
        self._tokens -= tokens
        self._pairs -= tokens * self._thin

    def _put_back(self, start: int, stop: int) -> None:
        if start < stop:
            self._cut.append((start, stop))


def _even_out(density: Density, taken: list[list[Run]], pairs: list[int], longer_than: float) -> None:
    """Swap a dense end on the rank with most pairs for a sparse beginning on the rank with fewest, until balanced.

    Only ranges longer than `longer_than` tokens are cut.
    """
    mean = sum(pairs) / sum(map(bool, taken))
    if max(pairs) <= (1 + _EVEN) * mean:
        return
    kept = [[run for run in runs if run[1] - run[0] <= longer_than] for runs in taken]
    free = [density.rising([run for run in runs if run[1] - run[0] > longer_than]) for runs in taken]
    light_ones = [rank for rank, runs in enumerate(free) if runs]
    between = density.between
    for _ in range(2 * len(taken)):
        heavy = max(range(len(taken)), key=pairs.__getitem__)
        if pairs[heavy] <= (1 + _EVEN) * mean or not free[heavy]:
            break
        light = min(light_ones, key=pairs.__getitem__)
        dense = max(free[heavy], key=lambda run: between(run[1] - 1, run[1]))
        sparse = _best_for(dense, free[light], between)
        swap = _Swap(between, dense, sparse)
        n = _least(swap.gain, swap.most, min(pairs[heavy] - mean, mean - pairs[light]))
        n = max(0, n - (swap.gain(n) >= pairs[heavy] - pairs[light]))
        if (moved := swap.gain(n)) <= 0:
            break
        _replace(free[heavy], dense, (dense[0], dense[1] - n), (sparse[0], sparse[0] + n))
        _replace(free[light], sparse, (sparse[0] + n, sparse[1]), (dense[1] - n, dense[1]))
        pairs[heavy] -= moved
        pairs[light] += moved
    taken[:] = [stay + swapped for stay, swapped in zip(kept, free, strict=True)]


def _best_for(dense: Run, runs: Sequence[Run], between: Callable[[int, int], int]) -> Run:
    """Choose the range of `runs` with the largest gain in a swap of its beginning for the end of `dense`.

    The gain is estimated as tokens times the first token's gain.
    """
    tokens, most = dense[1] - dense[0], between(dense[1] - 1, dense[1])
    return max(runs, key=lambda run: min(tokens, run[1] - run[0]) * (most - between(run[0], run[0] + 1)))


class _Swap(NamedTuple):
    """A swap of n tokens at the end of `dense` for n tokens at the beginning of `sparse`."""

    between: Callable[[int, int], int]
    dense: Run
    sparse: Run

    @property
    def most(self) -> int:
        """Number of tokens up to which `gain` rises. Beyond it, the dense token swapped sees no more keys than the sparse one."""
        between, end, begin = self.between, self.dense[1], self.sparse[0]
        room = min(end - self.dense[0], self.sparse[1] - begin)
        return _least(lambda n: between(begin + n, begin + n + 1) - between(end - n - 1, end - n), room, 0)

    def gain(self, n: int) -> int:
        end, begin = self.dense[1], self.sparse[0]
        return self.between(end - n, end) - self.between(begin, begin + n)


def _replace(runs: list[Run], run: Run, *parts: Run) -> None:
    runs.remove(run)
    runs += [part for part in parts if part[0] < part[1]]


def _joined(taken: Sequence[Sequence[Run]]) -> Array:
    """Collect the spans `(n, 3)` of all ranks, each rank's in sequence order, with touching ranges joined."""
    owner = np.repeat(np.arange(len(taken)), [len(runs) for runs in taken])
    runs = np.array([run for runs in taken for run in runs], dtype=np.int64).reshape(-1, 2)
    order = np.lexsort((runs[:, 0], owner))
    owner, start, stop = owner[order], runs[order, 0], runs[order, 1]
    begins = np.concatenate(([True], (owner[1:] != owner[:-1]) | (start[1:] != stop[:-1])))
    last = np.append(np.flatnonzero(begins)[1:] - 1, -1)
    return np.stack((owner[begins], start[begins], stop[last]), axis=1)


def _least(value: Callable[[int], float], most: int, target: float) -> int:
    """Bisect for the least `n` in `0..most` with `value(n) >= target`, else `most`. `value` must be non-decreasing."""
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        if value(middle) < target:
            low = middle + 1
        else:
            high = middle
    return low
