"""Determine which batches of messages can finish under NCCL's rules. No tensors, no threads.

A rank's batches on one communicator run in posting order. A batch finishes when each of its messages is matched, and a
message matches only messages of the batch that the other rank runs:

    rank 0   [recv 1]  [send 1]         rank 1   [recv 0]  [send 0]         deadlock

The n-th send from rank a to rank b matches the n-th receive of rank b from rank a.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from longspan.errors import CommError


@dataclass(eq=False)
class Part:
    """One end of a message."""

    peer: int
    num_elements: int
    kind: str
    """Dtype of the elements."""
    num_bytes: int = 0
    tensor: Any = None
    """The message, for the transport. None after the copy."""
    mark: Any = None
    """CUDA event after which the tensor is ready, for the transport."""
    other: "Part | None" = None
    """The other end, once matched."""
    batch: "Batch | None" = None

    def __str__(self) -> str:
        return f"{self.num_elements} x {self.kind}"


@dataclass(eq=False)
class Batch:
    """Messages that a rank posts together, or a rank's part of a collective, which every rank of the communicator posts."""

    rank: int
    sends: Sequence[Part] = ()
    receives: Sequence[Part] = ()
    collective: str = ""
    """Name of the collective and its arguments that must be equal on all ranks. Empty for messages."""
    number: int = -1
    """Number of batches that this rank posted before."""
    unmet: int = -1
    """Number of unmatched ends, or -1 if the batch has not begun."""

    @property
    def done(self) -> bool:
        return self.unmet == 0


@dataclass
class Communicator:
    """One communicator of `size` ranks. Sends of up to `buffered` bytes finish unmatched, as small sends may on NCCL."""

    size: int
    buffered: int = 0
    queues: list[deque[Batch]] = field(init=False)
    _posted: list[int] = field(init=False)
    _offered: dict[tuple[int, int], deque[Part]] = field(default_factory=lambda: defaultdict(deque))
    _awaited: dict[tuple[int, int], deque[Part]] = field(default_factory=lambda: defaultdict(deque))

    def __post_init__(self) -> None:
        self.queues, self._posted = [deque() for _ in range(self.size)], [0] * self.size

    def post(self, batch: Batch) -> list[Batch]:
        """Queue a batch. Returns the batches, of any rank, that it completes. Raises `CommError` if two ends differ."""
        batch.number, self._posted[batch.rank] = self._posted[batch.rank], self._posted[batch.rank] + 1
        for part in (*batch.sends, *batch.receives):
            part.batch = batch
        queue = self.queues[batch.rank]
        queue.append(batch)
        return list(self._advance(batch.rank)) if len(queue) == 1 else []

    def _advance(self, rank: int) -> Iterator[Batch]:
        """Begin the first batch of a rank, and each batch unblocked by this. Yield the finished batches."""
        ready = [rank]
        while ready:
            rank = ready.pop()
            queue = self.queues[rank]
            if not queue or queue[0].unmet != -1:
                continue
            for batch in self._begin(queue[0]):
                yield self.queues[batch.rank].popleft()
                ready.append(batch.rank)

    def _begin(self, batch: Batch) -> list[Batch]:
        """Match the messages of a batch with those of running batches. Return the batches that finish."""
        if batch.collective:
            return self._gather(batch)
        batch.unmet = len(batch.sends) + len(batch.receives)
        touched = {batch: None}
        for part in batch.sends:
            self._offered[batch.rank, part.peer].append(part)
            if part.num_bytes <= self.buffered:
                batch.unmet -= 1
        for part in batch.receives:
            self._awaited[part.peer, batch.rank].append(part)
        for pair in {(batch.rank, part.peer) for part in batch.sends} | {(p.peer, batch.rank) for p in batch.receives}:
            offered, awaited = self._offered[pair], self._awaited[pair]
            while offered and awaited:
                sent, received = offered.popleft(), awaited.popleft()
                if (sent.num_elements, sent.kind) != (received.num_elements, received.kind):
                    raise CommError(f"rank {pair[0]} sends {sent} to rank {pair[1]}, which awaits {received}")
                sent.other, received.other = received, sent
                assert sent.batch is not None, "the batch was posted"
                assert received.batch is not None, "the batch was posted"
                received.batch.unmet -= 1
                if sent.num_bytes > self.buffered:
                    sent.batch.unmet -= 1
                touched |= {sent.batch: None, received.batch: None}
        return [each for each in touched if each.done and each in self.queues[each.rank]]

    def _gather(self, batch: Batch) -> list[Batch]:
        """Begin a collective. Returns the batches of all ranks when the last rank begins, else an empty list."""
        batch.unmet = 1
        firsts = [queue[0] for queue in self.queues if queue and queue[0].collective and queue[0].unmet == 1]
        if odd := next((first for first in firsts if first.collective != batch.collective), None):
            raise CommError(f"rank {batch.rank} runs {batch.collective} while rank {odd.rank} runs {odd.collective}")
        if len(firsts) < self.size:
            return []
        by_pair = {(f.rank, part.peer): part for f in firsts for part in f.sends}
        for first in firsts:
            for part in first.receives:
                sent = by_pair.get((part.peer, first.rank))
                if sent is None or sent.num_elements != part.num_elements:
                    raise CommError(
                        f"rank {part.peer} gives {0 if sent is None else sent} to rank {first.rank}, which awaits {part}"
                    )
                sent.other, part.other = part, sent
        if any(part.other is None for part in by_pair.values()):
            lost = next((pair for pair, part in by_pair.items() if part.other is None))
            raise CommError(f"rank {lost[1]} awaits nothing from rank {lost[0]}, which gives {by_pair[lost]}")
        for first in firsts:
            first.unmet = 0
        return firsts

    def waits_for(self, rank: int) -> tuple[str, list[int]]:
        """Return (what the first batch of a rank waits for, in words; the ranks that have not posted the other end)."""
        if not self.queues[rank]:
            return "has nothing in flight", []
        first = self.queues[rank][0]
        if first.collective:
            missing = [r for r, queue in enumerate(self.queues) if not queue or not queue[0].collective]
            return f"batch {first.number}, {first.collective}", missing
        sends = [part for part in first.sends if part.other is None and part.num_bytes > self.buffered]
        receives = [part for part in first.receives if part.other is None]
        lacks = Counter(
            [f"{part} to {part.peer}" for part in sends] + [f"{part} from {part.peer}" for part in receives]
        )
        missing_parts = ", ".join(text if times == 1 else f"{times} times {text}" for text, times in lacks.items())
        return f"batch {first.number}, {missing_parts}", sorted({part.peer for part in (*sends, *receives)})
