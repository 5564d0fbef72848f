"""Measured bytes, pairs and seconds of attention calls.

with record() as calls:
    ...
calls[0].bytes_sent

Under `torch.profiler.profile` each call and each activity in it is a `record_function` range.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch.autograd import profiler
from torch.profiler import record_function

from longspan.plan import share_of_heads

Phase = Literal["forward", "backward"]
Activity = Literal["kernels", "waiting", "merging"]
Timed = Literal["all", "waiting"]

_recorders: list["Calls"] = []
"""Lists of the open `record()` blocks, innermost last. The only global state that attention calls read."""


class Clock(Protocol):
    """Marks moments cheaply, and measures the time between two marks later."""

    def now(self) -> Any: ...

    def seconds(self, start: Any, end: Any) -> float: ...


class WallClock:
    """Wall-clock time, for CPU."""

    def now(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start


class StreamClock:
    """Device time by CUDA events on the current stream. Reuses the events in `spare`."""

    def __init__(self) -> None:
        self.spare: list[torch.cuda.Event] = []

    def now(self) -> torch.cuda.Event:
        event = self.spare.pop() if self.spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


class NoClock:
    """No timing: costs nothing, and all seconds are NaN."""

    def now(self) -> None:
        return None

    def seconds(self, start: None, end: None) -> float:
        return float("nan")


class Interval(NamedTuple):
    """Two marks of the clock around an activity of the call, or around a hop in flight."""

    name: Activity | Literal["hop"]
    start: Any
    end: Any


@dataclass
class Call:
    """One attention call and phase on this rank, filled in while it runs.

    Bytes are payloads handed to the backend. `pairs` are the query-key pairs that kernels computed, per batch row,
    times this rank's share of the heads. `blocks` are the 128 x 128 blocks of the computed tiles, counted like `pairs`.
    `rows_received` counts KV rows. On CUDA, seconds are device time, and reading seconds synchronises. Seconds are NaN
    if not requested.
    """

    phase: Phase
    route: str
    kernel: str
    rank: int
    clock: Clock = field(default_factory=WallClock, repr=False)
    """Times activities and hops."""
    outer_clock: Clock | None = field(default=None, repr=False)
    """Times the call as a whole and its waits. Default: `clock`."""
    bytes_sent: int = 0
    bytes_received: int = 0
    rows_received: int = 0
    messages_sent: int = 0
    collectives: int = 0
    kernel_calls: int = 0
    pairs_computed: int = 0
    """Pairs on this rank's heads. This rank has `1 / head_shares` of the heads."""
    blocks_computed: int = 0
    """Blocks on this rank's heads, counted on the plan's tiles, not on the tiles into which a kernel splits these."""
    head_shares: int = 1
    start: Any = field(default=None, repr=False)
    end: Any = field(default=None, repr=False)
    intervals: list[Interval] = field(default_factory=list, repr=False)

    @contextmanager
    def spend(self, activity: Activity) -> Iterator[None]:
        """Count the time of the block as `activity`."""
        clock = self._outer if activity == "waiting" else self.clock
        start = clock.now()
        with _profiled(activity):
            yield
        if start is not None:
            self.intervals.append(Interval(activity, start, clock.now()))

    def flew(self, start: Any) -> None:
        """Count a hop posted at `start` as arrived now."""
        if start is not None:
            self.intervals.append(Interval("hop", start, self.clock.now()))

    def open(self) -> None:
        self.start = self._outer.now()

    def close(self) -> None:
        self.end = self._outer.now()

    def settle(self) -> None:
        """Replace CUDA events by seconds, and return the events to the pool. The end event must have completed."""
        clock = self._outer
        if not isinstance(clock, StreamClock) or self.end is None:
            return
        marks = [self.start, self.end, *(mark for one in self.intervals for mark in (one.start, one.end))]
        start, end, *others = (self.start.elapsed_time(mark) / 1e3 if mark is not self.start else 0.0 for mark in marks)
        clock.spare += marks
        self.start, self.end, self.outer_clock = start, end, WallClock()
        self.intervals = [
            one._replace(start=a, end=b) for one, a, b in zip(self.intervals, others[::2], others[1::2], strict=True)
        ]
        if isinstance(self.clock, StreamClock):
            self.clock = self.outer_clock

    @property
    def _outer(self) -> Clock:
        return self.outer_clock or self.clock

    @property
    def pairs(self) -> float:
        return share_of_heads(self.pairs_computed, 1, self.head_shares)

    @property
    def blocks(self) -> float:
        return share_of_heads(self.blocks_computed, 1, self.head_shares)

    @property
    def seconds_total(self) -> float:
        return self._outer.seconds(self.start, self.end)

    @property
    def seconds_kernels(self) -> float:
        return self._seconds("kernels")

    @property
    def seconds_waiting(self) -> float:
        return self._seconds("waiting")

    @property
    def seconds_merging(self) -> float:
        return self._seconds("merging")

    @property
    def seconds_communication(self) -> float:
        """Seconds in which at least one hop was in flight, from its post to the end of its wait."""
        if isinstance(self.clock, NoClock):
            return float("nan")
        total = reached = 0.0
        for start, end in sorted(self._spans("hop")):
            total += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        return total

    @property
    def overlap(self) -> float:
        """Fraction of communication hidden under compute: 1 - waiting / communication. 1 without communication."""
        under_way = self.seconds_communication
        return 1 - self.seconds_waiting / under_way if under_way else 1.0

    def _span(self, interval: Interval) -> tuple[float, float]:
        return self._outer.seconds(self.start, interval.start), self._outer.seconds(self.start, interval.end)

    def _spans(self, name: str) -> list[tuple[float, float]]:
        return [self._span(interval) for interval in self.intervals if interval.name == name]

    def _seconds(self, name: str) -> float:
        clock = self._outer if name == "waiting" else self.clock
        if isinstance(clock, NoClock):
            return float("nan")
        return sum(clock.seconds(i.start, i.end) for i in self.intervals if i.name == name)


class Calls(list[Call]):
    """Calls of this process, in the order in which they began."""

    timed: Timed = "all"

    def settle(self) -> None:
        """Read all device times after one synchronisation, so that reading seconds later does not synchronise."""
        on_device = [call for call in self if isinstance(call._outer, StreamClock) and call.end is not None]
        if on_device:
            on_device[-1].end.synchronize()
        for call in on_device:
            if not call.end.query():  # on another stream than the last call
                call.end.synchronize()
            call.settle()


@contextmanager
def record(timed: Timed = "all") -> Iterator[Calls]:
    """Collect a `Call` for every attention call and phase that this process starts inside the block.

    On CUDA each measured interval costs two events. `timed="waiting"` measures only each call and its waits, with
    pooled events, and reads all events when the block ends, after one synchronisation. Seconds in kernels, merging and
    communication are then NaN. On CPU everything is timed.
    """
    calls = Calls()
    calls.timed = timed
    _recorders.append(calls)
    try:
        yield calls
    finally:
        # By identity: two recorders may have equal contents.
        _recorders[:] = [other for other in _recorders if other is not calls]
    if timed != "all":
        calls.settle()


@contextmanager
def call(phase: Phase, route: str, kernel: str, rank: int, device: torch.device) -> Iterator[Call]:
    """Open a `Call` and append it to every open recorder."""
    entry = Call(phase, route, kernel, rank, *_clocks(device))
    for calls in _recorders:
        calls.append(entry)
    entry.open()
    with _profiled(f"{phase} {route}"):
        yield entry
    entry.close()


def _profiled(name: str) -> AbstractContextManager[Any]:
    """Return a profiler range, or a null context if no profiler runs."""
    return record_function(f"longspan {name}") if profiler._is_profiler_enabled else nullcontext()


def _clocks(device: torch.device) -> tuple[Clock, Clock]:
    """Return (clock of activities and hops, clock of the call and its waits), as the open recorders request on CUDA."""
    if device.type != "cuda":
        clock = WallClock()
        return clock, clock
    if any(calls.timed == "all" for calls in _recorders):
        events = StreamClock()
        return events, events
    return NoClock(), _pooled(device) if _recorders else NoClock()


@cache
def _pooled(device: torch.device) -> StreamClock:
    """Return the clock of a device whose events are reused."""
    return StreamClock()
