"""What attention calls really did: bytes, pairs and seconds, counted where they happen.

with record() as calls:
    ...
calls[0].bytes_sent
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

Activity = Literal["kernels", "waiting", "merging"]

_recorders: list[list["Call"]] = []
"""The lists that `record()` has open, innermost last. The one piece of state that attention calls look at."""


@dataclass
class Call:
    """One attention call and phase on this rank, filled in while it runs.

    Bytes count payloads handed to the backend. `pairs` are the query-key pairs that kernels computed, per head and batch
    row. Seconds are wall time of the calling thread; on CUDA, where calls return early, they are not measured (None).
    """

    phase: Literal["forward", "backward"]
    route: str
    kernel: str
    rank: int
    bytes_sent: int = 0
    bytes_received: int = 0
    rows_received: int = 0
    messages_sent: int = 0
    kernel_calls: int = 0
    pairs: int = 0
    seconds_total: float | None = 0.0
    seconds_kernels: float | None = 0.0
    seconds_waiting: float | None = 0.0
    seconds_merging: float | None = 0.0

    @contextmanager
    def spend(self, activity: Activity) -> Iterator[None]:
        """Add the time of the block to `seconds_<activity>`."""
        name = f"seconds_{activity}"
        if getattr(self, name) is None:
            yield
            return
        began = time.perf_counter()
        yield
        setattr(self, name, getattr(self, name) + time.perf_counter() - began)


@contextmanager
def record() -> Iterator[list[Call]]:
    """Collect a `Call` for every attention call and phase of this process that starts inside the block, backward included."""
    calls: list[Call] = []
    _recorders.append(calls)
    try:
        yield calls
    finally:
        # By identity: two recorders with equal contents are still two.
        _recorders[:] = [other for other in _recorders if other is not calls]


@contextmanager
def call(phase: Literal["forward", "backward"], route: str, kernel: str, rank: int, timed: bool) -> Iterator[Call]:
    """Open a `Call` and hand it to every recorder."""
    entry = Call(phase, route, kernel, rank)
    if not timed:
        entry.seconds_total = entry.seconds_kernels = entry.seconds_waiting = entry.seconds_merging = None
    for calls in _recorders:
        calls.append(entry)
    began = time.perf_counter()
    yield entry
    if entry.seconds_total is not None:
        entry.seconds_total = time.perf_counter() - began
