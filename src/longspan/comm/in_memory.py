"""A transport in memory: ranks are threads of one process, and messages obey NCCL's rules, which are stricter than gloo's.

    run(4, function, *arguments)  ->  [function(group, 0, *arguments), ..., function(group, 3, *arguments)]

Batches of a communicator run in posting order, and a batch finishes when all its messages are matched. Both ends of a
message must agree in size and dtype, tensors must be on the world's device, and every rank must take part in a
collective. A deadlock raises an error that lists which rank waits for which ranks. Data moves only when a rank waits for
the message, so that reading or overwriting a buffer too early gives wrong numbers, as it may on a GPU.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from longspan.comm.matching import Batch, Communicator, Part
from longspan.comm.transport import Message, Transport
from longspan.errors import CommError, SpecError


class MemoryWorld:
    """The ranks of one `run`, and their posted batches. Deterministic: one rank runs at a time, until that rank waits.

    Messages must be on `device`. Sends of up to `buffered` bytes finish without a receiver.
    """

    def __init__(self, ranks: int, *, device: torch.device | str = "cpu", buffered: int = 0) -> None:
        self.ranks, self.device, self.buffered = ranks, torch.device(device), buffered
        self._turns = [threading.Semaphore(0) for _ in range(ranks)]
        self._ready = deque(range(ranks))
        self._blocked: dict[int, tuple[MemoryGroup, Batch]] = {}
        self._ended: list[int] = []
        self._communicators: dict[tuple[tuple[int, ...], str], Communicator] = {}
        self._failure = ""

    def group(self, rank: int, ranks: Sequence[int] | None = None, name: str = "") -> "MemoryGroup":
        """Return the group of `ranks` (default: all) for its member `rank`. Each `name` is its own communicator."""
        return MemoryGroup(self, rank, tuple(range(self.ranks) if ranks is None else ranks), name)

    def start(self) -> None:
        """Let the first rank run."""
        self._pass_on()

    def enter(self, rank: int) -> None:
        """Block until it is this rank's turn to run."""
        self._turns[rank].acquire()

    def end(self, rank: int, error: BaseException | None) -> None:
        """Record that a rank has returned or raised. If it raised, all waiting ranks get an error."""
        self._ended.append(rank)
        if error is not None:
            self._fail(f"rank {rank} ended: {type(error).__name__}: {error}")
        self._pass_on()

    def post(self, group: "MemoryGroup", batch: Batch) -> "MemoryWork":
        """Queue a batch, and wake the ranks whose batches this batch completes."""
        self._check()
        communicator = self._communicators.setdefault(
            (group.ranks, group.name), Communicator(group.size, self.buffered)
        )
        try:
            done = communicator.post(batch)
        except CommError as error:
            self._fail(str(error))
            raise
        for other in done:
            rank = group.ranks[other.rank]
            if rank in self._blocked and self._blocked[rank][1] is other:
                del self._blocked[rank]
                self._ready.append(rank)
        return MemoryWork(self, group, batch)

    def wait(self, group: "MemoryGroup", batch: Batch) -> None:
        """Block until a batch is done and its messages have been copied."""
        if not batch.done:
            self._check()
            self._blocked[group.own] = group, batch
            self._pass_on()
            self.enter(group.own)
            if not batch.done:
                self._check()
        for part in batch.receives:
            _move(part.other, part)
        for part in batch.sends:
            if part.other is not None:  # a buffered send may have no receiver yet; it holds a copy
                _move(part, part.other)

    def _pass_on(self) -> None:
        """Let the next ready rank run. If none is ready and some are blocked, fail with a deadlock."""
        if not self._ready and self._blocked:
            self._fail(self._stuck())
        if self._ready:
            self._turns[self._ready.popleft()].release()

    def _stuck(self) -> str:
        lines = []
        for rank, (group, _) in sorted(self._blocked.items()):
            lacks, peers = self._communicators[group.ranks, group.name].waits_for(group.rank)
            lines.append(f"rank {rank} waits for {', '.join(str(group.ranks[p]) for p in peers)}: {lacks}{group.label}")
        if self._ended:
            lines.append(f"rank {', '.join(map(str, sorted(self._ended)))} has ended")
        return f"deadlock: {'; '.join(lines)}"

    def _fail(self, reason: str) -> None:
        """Wake all blocked ranks, which then raise."""
        self._failure = self._failure or reason
        self._ready.extend(self._blocked)
        self._blocked.clear()

    def _check(self) -> None:
        if self._failure:
            raise CommError(self._failure)


@dataclass(frozen=True)
class MemoryGroup(Transport):
    """A group of ranks of a `MemoryWorld`, from the view of its member `own`."""

    world: MemoryWorld = field(repr=False)
    own: int
    ranks: tuple[int, ...]
    name: str = ""

    @property
    def rank(self) -> int:
        return self.ranks.index(self.own)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def label(self) -> str:
        return f" on {self.name!r}" if self.name else ""

    def global_rank(self, rank: int) -> int:
        return self.ranks[rank]

    def carries(self, device: torch.device) -> torch.device:
        return device

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Sequence["MemoryWork"]:
        for _, x in (*sends, *receives):
            self._check(x)
        return [self.world.post(self, Batch(self.rank, self._parts(sends, True), self._parts(receives, False)))]

    def all_to_all(
        self, incoming: torch.Tensor, outgoing: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> "MemoryWork":
        self._check(incoming)
        self._check(outgoing)
        sends = self._parts(list(enumerate(torch.split(outgoing, list(sent)))), False)
        receives = self._parts(list(enumerate(torch.split(incoming, list(received)))), False)
        return self.world.post(self, Batch(self.rank, sends, receives, f"all-to-all of {outgoing.dtype}"))

    def all_gather(self, everyone: torch.Tensor, mine: torch.Tensor) -> None:
        sends = self._parts([(rank, mine) for rank in range(self.size)], False)
        receives = self._parts(list(enumerate(everyone.chunk(self.size))), False)
        kind = f"all-gather of {mine.numel()} x {mine.dtype}"
        self.world.post(self, Batch(self.rank, sends, receives, kind)).wait()

    def _check(self, x: torch.Tensor) -> None:
        if x.device.type != self.world.device.type:
            raise CommError(f"a tensor on {x.device} was given to ranks that exchange tensors on {self.world.device}")
        if not x.is_contiguous():
            raise CommError(f"a tensor of shape {tuple(x.shape)} and strides {x.stride()} is not contiguous")

    def _parts(self, messages: Sequence[Message], may_be_buffered: bool) -> list[Part]:
        return [
            Part(
                peer, x.numel(), str(x.dtype), x.nbytes,
                x.clone() if may_be_buffered and x.nbytes <= self.world.buffered else x, mark=_mark(x),
            )
            for peer, x in messages
        ]  # fmt: skip


@dataclass(frozen=True, eq=False)
class MemoryWork:
    """A batch in flight."""

    world: MemoryWorld
    group: MemoryGroup
    batch: Batch

    def wait(self) -> None:
        self.world.wait(self.group, self.batch)


def run(ranks: int, function: Callable[..., Any], *arguments: Any, world: MemoryWorld | None = None) -> list[Any]:
    """Call `function(group, rank, *arguments)` on a thread for each rank, and return the results in rank order.

    Raises the first error of a rank, with a note of the rank. The other ranks get a `CommError`.
    """
    if ranks < 1:
        raise SpecError(f"ranks={ranks} is not positive", hint="give at least one rank")
    world = world or MemoryWorld(ranks)
    results: list[Any] = [None] * ranks
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        world.enter(rank)
        try:
            # Run backward on this thread: on a GPU all ranks would share one autograd thread and block it.
            with torch.autograd.set_multithreading_enabled(False):
                results[rank] = function(world.group(rank), rank, *arguments)
        except BaseException as error:
            error.add_note(f"on rank {rank} of {ranks}")
            errors.append(error)
            world.end(rank, error)
        else:
            world.end(rank, None)

    threads = [threading.Thread(target=work, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    world.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def _move(sent: Part | None, received: Part) -> None:
    """Copy a matched message, unless already copied. On CUDA, order the copy after the stream that wrote the source and the
    stream that posted the receive."""
    assert sent is not None, "the batch is done"
    if sent.tensor is not None:
        _follow(sent.mark)
        _follow(received.mark)
        received.tensor.copy_(sent.tensor.detach())
        sent.mark = received.mark = _mark(received.tensor)
        sent.tensor = received.tensor = None
    else:
        _follow(received.mark)


def _mark(x: torch.Tensor) -> torch.cuda.Event | None:
    """Record an event on the current stream, for CUDA tensors."""
    if x.device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def _follow(mark: torch.cuda.Event | None) -> None:
    if mark is not None:
        torch.cuda.current_stream().wait_event(mark)
