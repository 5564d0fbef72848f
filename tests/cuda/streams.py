"""A thread's device: its streams and events, and what is ordered after what. A vector clock for each stream, one for the host.

    clock of a stream: stream -> number of its launches that come before whatever this stream launches next

Nothing runs out of order here: a launch is done when its call returns. The clocks say what a device might have reordered.
"""

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch

from tests.cuda.ledger import Ledger, Sync, site

if TYPE_CHECKING:
    from tests.cuda.memory import Freed

DEVICE = torch.device("cuda", 0)
Clock = dict[int, int]
_thread = threading.local()


def join(clock: Clock, other: Clock) -> None:
    """Make `clock` come after `other`, in place."""
    for stream, number in other.items():
        if clock.get(stream, 0) < number:
            clock[stream] = number


class Stream:
    """`torch.cuda.Stream`."""

    _numbers = itertools.count()

    def __init__(self, device: Any = None, priority: int = 0, name: str | None = None) -> None:
        self.id = self.stream_id = self.cuda_stream = next(Stream._numbers)
        self.name = name or f"stream {self.id}"
        self.device, self.priority = DEVICE, priority
        self.clock: Clock = {}
        if name is None:
            here().streams.add(self)
            for ledger in here().ledgers:
                ledger.streams_made += 1

    def __repr__(self) -> str:
        return self.name

    def launch(self) -> int:
        """The number of one more launch, which comes after all that the host has waited for."""
        join(self.clock, here().host)
        self.clock[self.id] = self.clock.get(self.id, 0) + 1
        return self.clock[self.id]

    def follows(self, stream: "Stream", number: int) -> bool:
        """Whether what this stream launches next comes after that launch of another."""
        return max(self.clock.get(stream.id, 0), here().host.get(stream.id, 0)) >= number

    def wait_event(self, event: "Event") -> None:
        event.wait(self)

    def wait_stream(self, stream: "Stream") -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: "Event | None" = None) -> "Event":
        return (Event() if event is None else event).record(self)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        here().wait_for(self.clock, "Stream.synchronize")


class Event:
    """`torch.cuda.Event`."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.enable_timing = enable_timing
        self.clock: Clock = {}
        for ledger in here().ledgers:
            ledger.events_made += 1

    def record(self, stream: Stream | None = None) -> "Event":
        self.clock = dict((here().stream if stream is None else stream).clock)
        return self

    def wait(self, stream: Stream | None = None) -> None:
        join((here().stream if stream is None else stream).clock, self.clock)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        here().wait_for(self.clock, "Event.synchronize")

    def elapsed_time(self, end: "Event") -> float:
        """Of no meaning here but for its sign."""
        if not (self.enable_timing and end.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        return 1e-3


class Device:
    """One GPU, which one thread drives, for as long as the thread lives: what longspan keeps for a device stays right. Or several
    threads, if they `share` it; each has a current stream of its own, as in torch."""

    def __init__(self) -> None:
        self.main = Stream(name="the main stream")
        self._current = threading.local()
        self.streams: WeakSet[Stream] = WeakSet((self.main,))
        self.communicators: dict[str, Stream] = {}
        self.host: Clock = {}
        self.ledgers: list[Ledger] = []
        self.freed: list[Freed] = []
        self.allocated = self.peak = 0

    @property
    def stream(self) -> Stream:
        """The current stream of this thread."""
        return getattr(self._current, "stream", self.main)

    @stream.setter
    def stream(self, stream: Stream) -> None:
        self._current.stream = stream

    def communicator(self, group: str) -> Stream:
        """The stream on which NCCL runs what a group posts."""
        if group not in self.communicators:
            self.communicators[group] = Stream(name=f"the NCCL stream of group {group}")
            self.streams.add(self.communicators[group])
        return self.communicators[group]

    def wait_for(self, clock: Clock, cause: str) -> None:
        """Let the host wait for what `clock` has."""
        join(self.host, clock)
        for ledger in self.ledgers:
            ledger.syncs.append(Sync(cause, site()))

    def synchronize(self) -> None:
        """Let the host wait for everything."""
        self.settle()
        self.wait_for({}, "cuda.synchronize")

    def settle(self) -> None:
        """Be done with everything, without an entry: one program has ended before the next begins."""
        for stream in self.streams:
            join(self.host, stream.clock)
        self.freed.clear()

    @contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        """Make `stream` current; None leaves the current one."""
        before = self.stream
        self.stream = before if stream is None else stream
        try:
            yield
        finally:
            self.stream = before


def share(device: Device) -> None:
    """Let this thread drive the device of another."""
    _thread.device = device


def here() -> Device:
    """The device of this thread."""
    if not hasattr(_thread, "device"):
        _thread.device = Device()
    device: Device = _thread.device
    return device
