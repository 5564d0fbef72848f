"""What a program did on the device, and from where."""

import os
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

import longspan

_LONGSPAN = os.path.dirname(longspan.__file__) + os.sep
_PLUMBING = (os.path.join(_LONGSPAN, "comm", "upload.py"),)
_OWN = os.path.dirname(__file__) + os.sep
_SKIPPED = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.__file__) + os.sep)


class Site(NamedTuple):
    """A line of longspan, or of the test where none of longspan is on the stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}"


class Launch(NamedTuple):
    """An operator that computes on the device, or a call of NCCL, on a stream."""

    operator: str
    stream: str
    site: Site


class Sync(NamedTuple):
    """The host waits for the device."""

    cause: str
    site: Site


class Copy(NamedTuple):
    """Bytes between host and device, "to device" or "to host"."""

    direction: str
    nbytes: int
    pinned: bool
    site: Site


class Allocation(NamedTuple):
    """A block from the caching allocator's pool of a stream."""

    nbytes: int
    stream: str
    site: Site


@dataclass
class Ledger:
    """Entries in the order of the program."""

    launches: list[Launch] = field(default_factory=list)
    collectives: list[Launch] = field(default_factory=list)
    syncs: list[Sync] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    allocations: list[Allocation] = field(default_factory=list)
    streams_made: int = 0
    events_made: int = 0

    def bytes_copied(self, direction: str) -> int:
        return sum(copy.nbytes for copy in self.copies if copy.direction == direction)

    def launches_by_function(self) -> dict[str, int]:
        """File and function -> launches, most first. Those of autograd's own nodes are of the function that called backward."""
        return dict(Counter(f"{launch.site.file} {launch.site.function}" for launch in self.launches).most_common())

    def syncs_by_site(self) -> dict[str, int]:
        """Cause and line -> times, most first."""
        return dict(Counter(f"{sync.cause} at {sync.site}" for sync in self.syncs).most_common())


def site() -> Site:
    """The line that is being run: the innermost of longspan that does more than pass a copy on, else of a test."""
    frame, other = sys._getframe(1), None
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_LONGSPAN) and file not in _PLUMBING:
            return Site(file[len(_LONGSPAN) :], frame.f_lineno, frame.f_code.co_name)
        own = file in _PLUMBING or (file.startswith(_OWN) and not file.startswith(_OWN + "test_"))
        if other is None and not own and not file.startswith(_SKIPPED):
            other = Site(os.path.basename(file), frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    return other or Site("unknown", 0, "unknown")
