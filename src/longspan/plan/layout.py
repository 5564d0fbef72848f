"""Which rank holds which tokens: an ordered list of spans per rank.

contiguous   0 0 0 0 1 1 1 1        zigzag   0 0 1 1 1 1 0 0        striped   0 1 0 1 0 1 0 1
balanced     by the masks: of documents 4 + 2 + 2   1 1 1 0 0 0 0 1
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np

from longspan.errors import SpecError
from longspan.names import BALANCED, LAYOUTS, check_name
from longspan.plan.arguments import check_rank, whole
from longspan.plan.balance import balanced_spans
from longspan.plan.density import Density
from longspan.plan.mask import Mask

Array = np.ndarray


@dataclass(frozen=True, eq=False)
class Layout:
    """A partition of `seq_len` tokens over `ranks`; rank `r` numbers its tokens by local slots, in the order of its spans.

    `spans` is int64 `(n, 3)`: owner, start, stop, sorted by owner and then by slot, without empty ones. With `step` above 1
    every span is a whole stripe `(s, seq_len, step)`, one a rank (or several, if `merged`). `slots` fixes the local length;
    slots beyond a rank's tokens are dead.
    """

    name: str
    seq_len: int
    ranks: int
    step: int
    spans: Array
    slots: int | None = None

    def __post_init__(self) -> None:
        most = int(self.counts.max())
        if self.slots is not None and whole("slots", self.slots) < most:
            raise SpecError(
                f"slots={self.slots} is less than the {most} tokens that {self.name} puts on one of {self.ranks} ranks",
                hint=f"set slots to at least {most}, or leave it out",
            )

    @classmethod
    def contiguous(cls, seq_len: int, ranks: int, slots: int | None = None) -> Self:
        """Rank `r` holds the `r`-th of `ranks` runs, whose lengths differ by at most one."""
        _check(seq_len, ranks)
        return cls("contiguous", seq_len, ranks, 1, _chunks(seq_len, ranks, np.arange(ranks)), slots)

    @classmethod
    def zigzag(cls, seq_len: int, ranks: int, slots: int | None = None) -> Self:
        """Rank `r` holds chunks `r` and `2 * ranks - 1 - r` of `2 * ranks`, so that causal attention costs all ranks the same.

        Token counts differ by at most one: the remainder goes to the first chunks, one per rank before any rank gets a second.
        """
        _check(seq_len, ranks)
        first = np.arange(ranks)
        return cls(
            "zigzag", seq_len, ranks, 1, _chunks(seq_len, 2 * ranks, np.concatenate((first, first[::-1]))), slots
        )

    @classmethod
    def striped(cls, seq_len: int, ranks: int, slots: int | None = None) -> Self:
        """Rank `r` holds tokens `r, r + ranks, r + 2 * ranks, ...`."""
        _check(seq_len, ranks)
        owner = np.arange(min(ranks, seq_len))
        spans = np.stack((owner, owner, np.full(len(owner), seq_len)), axis=1)
        return cls("striped", seq_len, ranks, ranks, spans, slots)

    @classmethod
    def balanced(
        cls,
        mask: Mask | Sequence[Mask],
        ranks: int,
        slots: int | None = None,
        *,
        weights: Sequence[int] | None = None,
        min_split_tokens: int = 0,
    ) -> Self:
        """Ranks have equal tokens, nearly equal visible pairs and few foreign rows; short documents stay whole.

        Several masks over the same tokens count by their `weights`: the number of layers that use each. Token counts differ
        by one at most, but where documents shorter than `min_split_tokens` stay whole instead, or where `slots`
        leave room to keep
        one whole (up to 1% of a share), or where there are four or more documents a rank and all have one length: then by one.
        """
        masks = [mask] if isinstance(mask, Mask) else list(mask)
        if strange := [one for one in masks if not isinstance(one, Mask)]:
            raise SpecError(f"{strange[0]!r} is not a Mask", hint="make one, such as Mask.documents([3000, 5000])")
        weights = [1] * len(masks) if weights is None else [whole("weight", weight) for weight in weights]
        if not masks or len(masks) != len(weights) or min(weights) < 1 or len({m.seq_len for m in masks}) > 1:
            raise SpecError(
                f"{len(masks)} masks over {sorted({m.seq_len for m in masks})} tokens, with weights {weights}",
                hint="give masks over the same tokens, and for each the number of layers that use it",
            )
        seq_len = masks[0].seq_len
        _check(seq_len, ranks)
        if slots is not None and slots * ranks < seq_len:
            raise SpecError(
                f"{ranks} ranks of slots={slots} hold less than {seq_len} tokens",
                hint=f"set slots to at least {-(-seq_len // ranks)}",
            )
        spans = balanced_spans(Density(list(zip(masks, weights, strict=True))), ranks, slots, min_split_tokens)
        return cls(BALANCED, seq_len, ranks, 1, spans, slots)

    @classmethod
    def named(
        cls,
        name: str,
        seq_len: int,
        ranks: int,
        slots: int | None = None,
        *,
        masks: Sequence[Mask] = (),
        weights: Sequence[int] | None = None,
        min_split_tokens: int = 0,
    ) -> Self:
        """The layout of that name; for configuration files. Only "balanced" looks at masks, weights and `min_split_tokens`."""
        if name == BALANCED:
            return cls.balanced(masks, ranks, slots, weights=weights, min_split_tokens=min_split_tokens)
        layout: Self = getattr(cls, check_name("layout", name, LAYOUTS))(seq_len, ranks, slots)
        return layout

    @cached_property
    def counts(self) -> Array:
        """Tokens of each rank: int64 `(ranks,)`."""
        owner, start, stop = self.spans.T
        counts = np.zeros(self.ranks, dtype=np.int64)
        np.add.at(counts, owner, -((start - stop) // self.step))
        return counts

    def num_slots(self, rank: int) -> int:
        """Local length of `rank`: its tokens, or `slots` where that is fixed."""
        return int(self.counts[check_rank(rank, self.ranks)]) if self.slots is None else self.slots

    def positions(self, rank: int) -> Array:
        """Global index of each local slot of `rank`, -1 for a dead slot: int64 `(num_slots(rank),)`."""
        positions = np.full(self.num_slots(rank), -1, dtype=np.int64)
        owned = self.spans[self.spans[:, 0] == rank]
        if len(owned):
            tokens = np.concatenate([np.arange(start, stop, self.step) for _, start, stop in owned.tolist()])
            positions[: len(tokens)] = tokens
        return positions

    def fingerprint(self) -> bytes:
        """What the layout says, as bytes: equal layouts, equal bytes."""
        head = f"layout {self.seq_len} {self.ranks} {self.step} {self.slots} "
        return head.encode() + self.spans.astype("<i8").tobytes()

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Layout) and self.fingerprint() == other.fingerprint()

    def __hash__(self) -> int:
        return hash(self.fingerprint())

    def merged(self, degree: int, adjacent: bool) -> "Layout":
        """What `ranks / degree` groups of `degree` ranks hold: spans in the order of the sequence, touching ones joined, and the
        slots of all members.

        Groups are neighbours (0, 1 | 2, 3) if `adjacent`, else strided (0, 2 | 1, 3). Neighbouring stripes stay apart, one
        after the other: their tokens in order would not be one span.
        """
        ranks = self.ranks // degree
        slots = None if self.slots is None else self.slots * degree
        owner, start, stop = self.spans.T
        group = owner // degree if adjacent else owner % ranks
        if self.step > 1 and (not adjacent or ranks == 1):
            return Layout.striped(self.seq_len, ranks, slots)
        if self.step == 1:
            order = np.lexsort((start, group))
            group, start, stop = group[order], start[order], stop[order]
            begins = np.concatenate(([True], (group[1:] != group[:-1]) | (start[1:] != stop[:-1])))
            group, start, stop = group[begins], start[begins], stop[np.append(np.flatnonzero(begins)[1:] - 1, -1)]
        return Layout(self.name, self.seq_len, ranks, self.step, np.stack((group, start, stop), axis=1), slots)

    def find(self, token: int) -> tuple[int, int]:
        """The span of `token`: its first local slot, and its start."""
        _, start, stop, slot = self.by_start.T
        (span,) = np.flatnonzero((start <= token) & (token < stop) & ((token - start) % self.step == 0))
        return int(slot[span]), int(start[span])

    @cached_property
    def by_start(self) -> Array:
        """Spans in the order of their first tokens, int64 `(n, 4)`: owner, start, stop, first local slot."""
        owner, start, stop = self.spans.T
        length = -((start - stop) // self.step)
        before = np.cumsum(length) - length
        slot = before - before[np.searchsorted(owner, owner, side="left")]
        return np.column_stack((owner, start, stop, slot))[np.argsort(start, kind="stable")]


def slots_of(seq_len: int, ranks: int, multiple: int | None) -> int | None:
    """Slots of every rank where these are a multiple: no layout puts more tokens on a rank, and "balanced" keeps to them."""
    return None if multiple is None else -(-seq_len // (ranks * multiple)) * multiple


def _check(seq_len: int, ranks: int) -> None:
    seq_len, ranks = whole("seq_len", seq_len), whole("ranks", ranks)
    if seq_len < 1:
        raise SpecError(f"seq_len={seq_len}: a sequence has at least one token")
    if ranks < 1:
        raise SpecError(f"ranks={ranks}: a layout needs at least one rank")


def _chunks(seq_len: int, num_chunks: int, owner: Array) -> Array:
    """Spans `(n, 3)` of `num_chunks` runs, the first ones a token longer, sorted by owner; empty ones left out."""
    size, longer = divmod(seq_len, num_chunks)
    index = np.arange(num_chunks + 1)
    edges = index * size + np.minimum(index, longer)
    spans = np.stack((owner, edges[:-1], edges[1:]), axis=1)[np.argsort(owner, kind="stable")]
    return spans[spans[:, 1] < spans[:, 2]]


def spans_of(layout: Layout, rank: int) -> Sequence[tuple[int, int, int]]:
    """Spans `(start, stop, step)` of `rank`, in slot order; for drawings and messages."""
    return [(start, stop, layout.step) for owner, start, stop in layout.spans.tolist() if owner == rank]
