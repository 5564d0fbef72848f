"""Shared parts of the benchmarks: CPU use by other programs, medians and quartiles, memory, bytes, JSON records."""

import json
import os
import resource
import socket
import statistics
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from longspan.comm.hops import Flight
from longspan.comm.traffic import Call

FOREIGN_LIMIT = 0.03
"""A repeat is kept only if other programs used at most this share of the cores during the repeat."""


@dataclass(frozen=True)
class Usage:
    """CPU seconds used so far by all processes of the machine and by this process."""

    machine: float
    own: float

    @classmethod
    def now(cls) -> "Usage":
        fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        busy = sum(fields) - fields[3] - fields[4]  # all but idle and iowait; steal is counted as use by other programs
        used = resource.getrusage(resource.RUSAGE_SELF)
        return cls(busy / os.sysconf("SC_CLK_TCK"), used.ru_utime + used.ru_stime)


def foreign_share(before: Usage, seconds: float, total: Callable[[torch.Tensor], Any] = dist.all_reduce) -> float:
    """Return the share of all cores that other programs used since `before`, in `seconds` of wall time. Collective.

    `total` sums a tensor in place over all processes of the benchmark. The share is computed from means over processes, so
    that all processes get the same value and decide alike.
    """
    after = Usage.now()
    sums = torch.tensor([after.own - before.own, after.machine - before.machine, seconds, 1.0], dtype=torch.float64)
    total(sums)
    own, machine, wall, processes = sums.tolist()
    return max(0.0, machine / processes - own) / (wall / processes * (os.cpu_count() or 1))


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of some repeats."""

    median: float
    low: float
    high: float
    repeats: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        if len(values) < 2:
            return cls(*[values[0] if values else float("nan")] * 3, len(values))
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high, len(values))

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f}, n={self.repeats})"


@contextmanager
def freed_here() -> Iterator[None]:
    """Free received buffers on the waiting thread inside the block: the profiler misses frees by gloo's own thread, and the
    buffers would appear to be held. Sleeps after each arrival, so do not time anything meanwhile."""
    wait = Flight.wait

    def patient(flight: Flight, call: Call) -> None:
        held = flight.works, flight.landed, flight.kept
        wait(flight, call)
        time.sleep(0.003 * bool(held[0]))

    with patch.object(Flight, "wait", patient):
        yield


def peak_bytes(profiler: torch.profiler.profile) -> int:
    """Return the maximum of the running sum of profiled allocations and frees."""
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def tcp_bytes_sent() -> int:
    """Return the payload bytes sent by this process's TCP sockets, by the kernel's count (`struct tcp_info`, Linux)."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as copy:
                if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                    info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    sent, again = struct.unpack_from("QQ", info, 200)
                    total += sent - again
        except OSError:
            continue
    return total


def save(path: Path | None, record: Any) -> None:
    """Write a JSON record to `path`, if given."""
    if path is not None:
        path.write_text(json.dumps(record, indent=1, default=vars) + "\n")
