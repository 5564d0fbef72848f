"""Which rank holds which tokens: an ordered list of spans per rank.

The owner of each of 8 tokens, on 2 ranks:

contiguous   0 0 0 0 1 1 1 1        zigzag   0 0 1 1 1 1 0 0        striped   0 1 0 1 0 1 0 1
balanced     chosen from the masks; for documents of 4 + 2 + 2 tokens   1 1 1 0 0 0 0 1
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
    """A partition of `seq_len` tokens over `ranks`. A rank's local slots number its tokens in the order of its spans.

    `spans` is int64 `(n, 3)`: owner, start, stop; sorted by owner, then by slot; no span is empty. With `step` above 1,
    every span is a complete stripe `(s, seq_len, step)`: one per rank, or several after `merged`. `slots` fixes the local
    length of every rank; slots beyond a rank's tokens are padding slots.
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
                hint=f"set slots to at least {most}, or leave slots out",
            )

    @classmethod
    def contiguous(cls, seq_len: int, ranks: int, slots: int | None = None) -> Self:
        """Give rank `r` the `r`-th of `ranks` contiguous chunks, whose lengths differ by at most one."""
        _check(seq_len, ranks)
        return cls("contiguous", seq_len, ranks, 1, _chunks(seq_len, ranks, np.arange(ranks)), slots)

    @classmethod
    def zigzag(cls, seq_len: int, ranks: int, slots: int | None = None) -> Self:
        """Give rank `r` chunks `r` and `2 * ranks - 1 - r` of `2 * ranks`, which balances causal attention.

        Token counts differ by at most one: the first chunks are one token longer, and no rank holds two longer chunks
        before every rank holds one.
        """
        _check(seq_len, ranks)
        first = np.arange(ranks)
        return cls(
            "zigzag", seq_len, ranks, 1, _chunks(seq_len, 2 * ranks, np.concatenate((first, first[::-1]))), slots
        )

    @classmethod
    def striped(cls, seq_len: int, ranks: int, slots: int | None = None) -> Self:
        """Give rank `r` the tokens `r, r + ranks, r + 2 * ranks, ...`."""
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
        """Give all ranks equal tokens and nearly equal visible pairs, avoid cuts of short documents, and move few rows.

        `weights` is the number of layers that use each mask; all masks cover the same tokens. Token counts differ by at
        most one, except where this avoids cutting a document in one of three cases:

        - the document is shorter than `min_split_tokens`;
        - `slots` leaves room for the document (up to 1% of a rank's tokens);
        - all documents have one length, with four or more per rank: counts then differ by at most one document.
        """
        masks = [mask] if isinstance(mask, Mask) else list(mask)
        if strange := [one for one in masks if not isinstance(one, Mask)]:
            raise SpecError(f"{strange[0]!r} is not a Mask", hint="pass a Mask, such as Mask.documents([3000, 5000])")
        weights = [1] * len(masks) if weights is None else [whole("weight", weight) for weight in weights]
        if not masks or len(masks) != len(weights) or min(weights) < 1 or len({m.seq_len for m in masks}) > 1:
            raise SpecError(
                f"{len(masks)} masks over {sorted({m.seq_len for m in masks})} tokens, with weights {weights}",
                hint="give masks of one seq_len, and one weight per mask: the number of layers that use the mask",
            )
        seq_len = masks[0].seq_len
        _check(seq_len, ranks)
        if slots is not None and slots * ranks < seq_len:
            raise SpecError(
                f"{ranks} ranks with slots={slots} cannot hold {seq_len} tokens",
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
        """Make the layout called `name`, for configuration files.

        Only "balanced" uses `masks`, `weights` and `min_split_tokens`.
        """
        if name == BALANCED:
            return cls.balanced(masks, ranks, slots, weights=weights, min_split_tokens=min_split_tokens)
        layout: Self = getattr(cls, check_name("layout", name, LAYOUTS))(seq_len, ranks, slots)
        return layout

    @cached_property
    def counts(self) -> Array:
        """Number of tokens on each rank: int64 `(ranks,)`."""
        owner, start, stop = self.spans.T
        counts = np.zeros(self.ranks, dtype=np.int64)
        np.add.at(counts, owner, -((start - stop) // self.step))
        return counts

    def num_slots(self, rank: int) -> int:
        """Local length of `rank`: `slots` if fixed, else the rank's number of tokens."""
        return int(self.counts[check_rank(rank, self.ranks)]) if self.slots is None else self.slots

    def positions(self, rank: int) -> Array:
        """Global index of each local slot of `rank`, -1 for a padding slot: int64 `(num_slots(rank),)`."""
        positions = np.full(self.num_slots(rank), -1, dtype=np.int64)
        owned = self.spans[self.spans[:, 0] == rank]
        if len(owned):
            tokens = np.concatenate([np.arange(start, stop, self.step) for _, start, stop in owned.tolist()])
            positions[: len(tokens)] = tokens
        return positions

    def fingerprint(self) -> bytes:
        """Serialise the layout, without its name, for comparison and hashing."""
        head = f"layout {self.seq_len} {self.ranks} {self.step} {self.slots} "
        return head.encode() + self.spans.astype("<i8").tobytes()

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Layout) and self.fingerprint() == other.fingerprint()

    def __hash__(self) -> int:
        return hash(self.fingerprint())

    def merged(self, degree: int, adjacent: bool) -> "Layout":
        """Return the layout over `ranks / degree` groups of `degree` ranks each, in which each group acts as one rank.

        A group holds its members' spans in sequence order, with touching spans joined, and the sum of their slots.
        Groups are neighbours (0, 1 | 2, 3) if `adjacent`, else strided (0, 2 | 1, 3). Stripes of neighbours stay
        separate spans, one after the other, because their union is not one span.
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
        """Return the first local slot and the first token of the span that holds `token`."""
        _, start, stop, slot = self.by_start.T
        (span,) = np.flatnonzero((start <= token) & (token < stop) & ((token - start) % self.step == 0))
        return int(slot[span]), int(start[span])

    @cached_property
    def by_start(self) -> Array:
        """Spans sorted by first token, int64 `(n, 4)`: owner, start, stop, first local slot."""
        owner, start, stop = self.spans.T
        length = -((start - stop) // self.step)
        before = np.cumsum(length) - length
        slot = before - before[np.searchsorted(owner, owner, side="left")]
        return np.column_stack((owner, start, stop, slot))[np.argsort(start, kind="stable")]


def slots_of(seq_len: int, ranks: int, multiple: int | None) -> int | None:
    """Return `slots` for a layout: `ceil(seq_len / ranks)`, rounded up to a multiple of `multiple`; None if that is None.

    No layout exceeds these slots: token counts differ by at most one, and "balanced" respects `slots`.
    """
    return None if multiple is None else -(-seq_len // (ranks * multiple)) * multiple


def _check(seq_len: int, ranks: int) -> None:
    seq_len, ranks = whole("seq_len", seq_len), whole("ranks", ranks)
    if seq_len < 1:
        raise SpecError(f"seq_len={seq_len}: a sequence has at least one token")
    if ranks < 1:
        raise SpecError(f"ranks={ranks}: a layout needs at least one rank")


def _chunks(seq_len: int, num_chunks: int, owner: Array) -> Array:
    """Cut `seq_len` tokens into `num_chunks` chunks: non-empty spans `(n, 3)`, sorted by owner.

    If the lengths differ, the first chunks are one token longer.
    """
    size, longer = divmod(seq_len, num_chunks)
    index = np.arange(num_chunks + 1)
    edges = index * size + np.minimum(index, longer)
    spans = np.stack((owner, edges[:-1], edges[1:]), axis=1)[np.argsort(owner, kind="stable")]
    return spans[spans[:, 1] < spans[:, 2]]


def spans_of(layout: Layout, rank: int) -> Sequence[tuple[int, int, int]]:
    """List the spans `(start, stop, step)` of `rank` in slot order, for drawings and messages."""
    return [(start, stop, layout.step) for owner, start, stop in layout.spans.tolist() if owner == rank]
