"""Who read and wrote a piece of device memory, and whether the streams that did were in order."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided

from tests.cuda.ledger import Allocation, Site, site
from tests.cuda.streams import Clock, Device, Stream, here

Tensor = torch.Tensor


class RaceError(AssertionError):
    """Two streams touch the same memory and nothing says in which order."""


class Place(NamedTuple):
    """The bytes of a tensor in its storage: an element's size, where the first is, and how the others follow."""

    itemsize: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, x: Tensor) -> "Place":
        return cls(x.element_size(), x.storage_offset(), tuple(x.shape), tuple(x.stride()))

    @property
    def extent(self) -> tuple[int, int]:
        last = self.offset + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        return self.offset * self.itemsize, (last + 1) * self.itemsize

    def covers(self, nbytes: int) -> bool:
        """Whether these are all bytes of a storage of that size."""
        return int(np.prod(self.shape)) * self.itemsize == nbytes and self.extent == (0, nbytes)

    def meets(self, other: "Place") -> bool:
        """Whether the two have a byte in common."""
        (start, stop), (begin, end) = self.extent, other.extent
        if self == other or stop <= begin or end <= start:
            return self == other
        size = max(stop, end)
        return bool((self._mark(size) & other._mark(size)).any())

    def _mark(self, size: int) -> np.ndarray:
        """Which of `size` bytes these are."""
        marked = np.zeros(size, dtype=bool)
        strides = (*(stride * self.itemsize for stride in self.strides), 1)
        as_strided(marked[self.offset * self.itemsize :], (*self.shape, self.itemsize), strides)[...] = True
        return marked


class Use(NamedTuple):
    """One launch that read or wrote a place."""

    stream: Stream
    number: int
    operator: str
    place: Place
    site: Site

    def __str__(self) -> str:
        return f"{self.operator} on {self.stream} ({self.site})"


class Memory:
    """A block of the allocator. Its storage alone holds it, so it ends with its storage."""

    def __init__(self, nbytes: int, device: Device) -> None:
        self.home, self.nbytes, self.device, self.made = device.stream, nbytes, device, site()
        self.writes: list[Use] = []
        self.reads: list[Use] = []
        self.recorded: set[Stream] = set()
        self.arrives: tuple[Clock, list[Tensor]] = ({}, [])
        """When a functional collective has filled it, and what that reads until then."""
        device.allocated += nbytes
        device.peak = max(device.peak, device.allocated)

    def __del__(self) -> None:
        self.device.allocated -= self.nbytes
        safe = {self.home, *self.recorded}
        if uses := tuple(use for use in (*self.writes, *self.reads) if use.stream not in safe):
            self.device.freed.append(Freed(self.home, uses, self.nbytes, self.made, site()))

    def touch(self, use: Use, *, write: bool) -> None:
        """Take notice of a launch; raise `RaceError` unless it comes after those that it must come after."""
        for earlier, verb in (*((e, "wrote") for e in self.writes), *((e, "read") for e in self.reads if write)):
            if not use.stream.follows(earlier.stream, earlier.number) and use.place.meets(earlier.place):
                raise RaceError(
                    f"{use} {'writes' if write else 'reads'} a tensor {use.place.shape} that {earlier} {verb}, and "
                    f"{use.stream} does not wait for {earlier.stream}"
                )
        kept = self.writes if write else self.reads
        if write and use.place.covers(self.nbytes):
            # What comes after this write comes after all that this write came after.
            self.writes, self.reads = [use], []
            return
        kept[:] = [other for other in kept if (other.stream, other.place) != (use.stream, use.place)]
        kept.append(use)


class Freed(NamedTuple):
    """A block back in its stream's pool, and what other streams did with it."""

    home: Stream
    uses: tuple[Use, ...]
    nbytes: int
    made: Site
    freed: Site


def memory_of(x: Tensor) -> Memory:
    """The block that a tensor of the device lies in."""
    memory: Memory = x.untyped_storage()._memory
    return memory


def allocate(x: Tensor) -> bool:
    """Give a tensor's storage a block of the current stream's pool; False if it has one.

    A block that was freed there may be the one: raises `RaceError` if another stream may still be at work in such a block.
    """
    storage = x.untyped_storage()
    if getattr(storage, "_memory", None) is not None:
        return False
    device, nbytes = here(), storage.nbytes()
    back = [block for block in device.freed if block.home is device.stream]
    device.freed[:] = [block for block in device.freed if block.home is not device.stream]
    for block in back:
        for use in block.uses:
            if not device.stream.follows(use.stream, use.number):
                raise RaceError(
                    f"{block.nbytes} bytes that {block.made} made on {block.home} were freed at {block.freed} and may be "
                    f"given out again, while {use} may not be done: wait for {use.stream} before, or record_stream"
                )
    storage._memory = Memory(nbytes, device)
    for ledger in device.ledgers if nbytes else ():
        ledger.allocations.append(Allocation(nbytes, device.stream.name, storage._memory.made))
    return True
