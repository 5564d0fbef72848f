"""Move key and value rows to the queries, and partial gradients back to the owner, following the stages of a plan.

    B batch, K KV heads, R rows of a buffer, D head dim

Keys and values travel heads first, `(B, K, R, D)`, the layout that kernels read fastest. Gradients are summed and
travel rows first, `(R, B, K, D)`, the layout that kernels write, in which any range of rows is contiguous.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from longspan.comm.groups import RankGroup
from longspan.comm.hops import Flight, Hop
from longspan.comm.traffic import Call
from longspan.cp.engine.sums import Gradient
from longspan.cp.engine.wire import WIRES, Wire
from longspan.plan import RankPlan, Runs, Stage, Step, Transfer

Tensor = torch.Tensor
Rows = tuple[Tensor, Tensor]
"""Keys and values of a buffer: `(B, K, R, D)` and `(B, K, R, Dv)`."""
KVGradient = tuple[Gradient, Gradient]
Group = RankGroup | None


class Lane:
    """The CUDA side stream on which results are merged, so that the next kernel need not wait for a merge. None on CPU.

        main   kernel 1 | kernel 2 | kernel 3                 kernel n + 1 waits for merge n - 1: then the memory of tile n - 1
        lane              merge 1  | merge 2  | merge 3       can be reused, and at most two tiles are held

    The CUDA allocator reuses freed memory at once, ordered only after the work launched on the stream that allocated
    it. A tensor used on both streams must therefore be held until they have synchronised:

    - Results of a tile are allocated on main and read on the lane. `after` holds the results until main has waited
      for the merge.
    - Tensors that outlive the call are allocated on main (`home`), whichever stream writes them first. The lane
      writes these tensors after the work that main launched before the block; main may read them after `join`.
    - Tensors used on the lane alone (temporaries, gradients in flight) are allocated on the lane. Hops are posted and
      waited for in `after` blocks, so that the lane waits for hops, and main does not.
    """

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self.stream = stream
        self._held: tuple[Tensor, ...] = ()
        if stream is not None:
            self._main = torch.cuda.current_stream(stream.device)
            self._ready, self._merged = torch.cuda.Event(), torch.cuda.Event()

    @classmethod
    def on(cls, device: torch.device) -> "Lane":
        return cls(_side_stream(device) if device.type == "cuda" else None)

    def after(self, *tensors: Tensor) -> AbstractContextManager[Any]:
        """Return a context for work on the lane, ordered after all kernels launched so far. Holds `tensors` until merged."""
        return nullcontext() if self.stream is None else self._block(self.stream, tensors)

    def home(self) -> AbstractContextManager[Any]:
        """Inside an `after` block: a context that allocates on main, for tensors that outlive the call."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self._main)

    def join(self) -> None:
        """Make main wait for the lane, so that kernels launched from now on see the lane's results."""
        if self.stream is not None:
            self._merged.record(self.stream)
            self._let_go()

    @contextmanager
    def _block(self, stream: torch.cuda.Stream, tensors: tuple[Tensor, ...]) -> Iterator[None]:
        if self._held and tensors:
            self._let_go()
        self._ready.record(self._main)
        stream.wait_event(self._ready)
        with torch.cuda.stream(stream):
            yield
        if tensors:
            self._held = tensors
            self._merged.record(stream)

    def _let_go(self) -> None:
        self._main.wait_event(self._merged)
        self._held = ()


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a device's side stream, shared by all calls to share its memory. High priority, since merges are short."""
    return torch.cuda.Stream(device, priority=-1)


def arriving_rows(
    work: RankPlan, own: Rows, comm_dtype: str | None, group: Group, meter: Call
) -> Iterator[tuple[Stage, Stage | None, list[tuple[Step, Rows]]]]:
    """Yield (stage, next stage or None, steps of the stage as (step, (keys, values))). The caller may empty the list.

    While the caller computes a stage, the rows of the next stage are in flight; rows of at most these two stages are held.
    A rank waits only for messages that peers post in an earlier stage, so no deadlock is possible.
    """
    wire = WIRES[comm_dtype]
    travels = own if not any(stage.sends for stage in work.stages) else (wire.encode(own[0]), wire.encode(own[1]))
    collective = own[0].new_empty(0, dtype=wire.width(own[0])[1]) if work.means == "collective" else None
    buffers: list[Rows] = [travels]
    for stage, following in zip(work.stages, [*work.stages[1:], None], strict=True):
        hop = Hop()
        leaving = buffers[0] if work.relays else travels
        for transfer in stage.sends:
            peer = work.ranks[transfer.peer]
            hop.sends += [(peer, part) for x in leaving for part in _messages(x, transfer)]
        arriving = []
        for step in following.steps if following is not None else ():
            rows = _buffers(step.rows, own, comm_dtype)
            arriving.append(rows)
            if step.recv is not None:
                peer = work.ranks[step.recv.peer]
                meter.rows_received += step.rows
                hop.receives += [(peer, part) for x in rows for part in _messages(x, step.recv)]
        flight = hop.post(group, meter, collective if following is not None else None)
        del hop, leaving
        steps = [(stage.steps[0], own)] if stage is work.stages[0] else _decoded(stage, buffers, own, wire)
        buffers = arriving  # drops used rows before the rows of the stage after the next arrive
        yield stage, following, steps
        flight.wait(meter)


def _decoded(stage: Stage, buffers: Sequence[Rows], own: Rows, wire: Wire) -> list[tuple[Step, Rows]]:
    rows = [(wire.decode(keys, own[0]), wire.decode(values, own[1])) for keys, values in buffers]
    return list(zip(stage.steps, rows, strict=True))


@dataclass
class _Incoming:
    """Gradients in flight. Packed rows are added to their target sum on arrival."""

    flight: Flight
    packed: list[tuple[Tensor, Gradient, Runs]] = field(default_factory=list)

    def wait(self, meter: Call) -> None:
        self.flight.wait(meter)
        for rows, gradient, runs in self.packed:
            with meter.spend("merging"):
                gradient.add_runs(runs, rows)
        self.packed = []


class ReturningGradients:
    """Partial dK, dV in flight: received from the previous rank, sent to the next rank, and by the last rank to the owner.

    Gradients that have returned to their owner are added to `home` after the next stage is computed.
    """

    def __init__(self, work: RankPlan, own: Rows, group: Group, meter: Call, lane: Lane) -> None:
        self._work, self._like, self._group, self._meter = work, own, group, meter
        self._arriving = self._homing = _Incoming(Flight())
        self._adopts = lane.stream is None  # on CUDA tiles are allocated on main, gradients in flight on the lane
        keys, values = (Gradient(x, x.shape[2], home=lane.home) for x in own)
        self.home = (keys, values)
        self.here: list[KVGradient] = [self.home]
        self._collective = self.home[0].buffer(0) if work.means == "collective" else None

    def expect(self, stage: Stage | None) -> None:
        """Allocate and receive the gradients of the first stage after the own shard. Call before any gradient is computed."""
        hop = Hop()
        self._arriving = self._make_room(hop, stage)
        self._arriving.flight = hop.post(self._group, self._meter)

    def arrive(self) -> None:
        """Block until this stage's partial gradients have arrived, and those of the stage before have been sent."""
        self._arriving.wait(self._meter)

    def hand_over(self, stage: Stage, following: Stage | None) -> None:
        """Send the finished gradients of `stage` to the next rank and the owner; receive those of the `following` stage."""
        self._homing.wait(self._meter)
        onwards, homewards = Hop(), Hop()
        for step, gradients in zip(stage.steps, self.here, strict=True):
            for hop, transfer in ((onwards, step.grad_send), (homewards, step.home_send)):
                if transfer is not None:
                    peer = self._work.ranks[transfer.peer]
                    hop.sends += [(peer, pick(gradient.rows(), transfer.runs, dim=0)) for gradient in gradients]
        self._arriving = self._make_room(onwards, following)
        self._arriving.flight = onwards.post(
            self._group, self._meter, self._collective if following is not None else None
        )
        self._homing = _Incoming(Flight())
        for transfer in stage.home_recvs:
            self._receive(homewards, transfer, self.home, self._homing)
        self._homing.flight = homewards.post(self._group, self._meter, self._collective)

    def bring_home(self) -> None:
        """Wait for all messages in flight, and add the gradients that returned to this rank, in the plan's order."""
        self.arrive()
        self._homing.wait(self._meter)

    def _make_room(self, onwards: Hop, following: Stage | None) -> _Incoming:
        incoming = _Incoming(Flight())
        self.here = []
        for step in following.steps if following is not None else ():
            keys, values = (Gradient(x, step.rows, adopts=self._adopts) for x in self._like)
            gradients = (keys, values)
            self.here.append(gradients)
            if step.grad_recv is not None:
                self._receive(onwards, step.grad_recv, gradients, incoming, in_place=True)
        return incoming

    def _receive(
        self, hop: Hop, transfer: Transfer, gradients: KVGradient, incoming: _Incoming, in_place: bool = False
    ) -> None:
        """Receive rows for `gradients`: directly into the sum if `in_place` and the rows are one range, otherwise packed."""
        for gradient in gradients:
            if in_place and len(transfer.runs) == 1:
                start, stop = transfer.runs[0]
                rows = gradient.rows()[start:stop]
            else:
                rows = gradient.buffer(transfer.rows)
                incoming.packed.append((rows, gradient, transfer.runs))
            hop.receives.append((self._work.ranks[transfer.peer], rows))


def _buffers(rows: int, own: Rows, comm_dtype: str | None) -> Rows:
    """Allocate receive buffers for keys and values, adjacent in memory."""
    (width, dtype), (width_v, _) = (WIRES[comm_dtype].width(x) for x in own)
    keys, values = in_one_piece(own[0], [(*own[0].shape[:2], rows, width), (*own[1].shape[:2], rows, width_v)], dtype)
    return keys, values


def in_one_piece(like: Tensor, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> list[Tensor]:
    """Allocate uninitialised tensors, adjacent in one buffer, so that a collective needs no copy."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    flat = torch.split(like.new_empty(sum(sizes), dtype=dtype), sizes) if sizes else ()
    return [piece.view(tuple(shape)) for piece, shape in zip(flat, shapes, strict=True)]


def _messages(x: Tensor, transfer: Transfer) -> list[Tensor]:
    """Return rows of `x (B, K, R, D)` as contiguous messages: one view per head if `by_head`, else one for all heads.

    For a received transfer, the messages are the buffers to fill.
    """
    if transfer.by_head:
        start, stop = transfer.runs[0]
        return [head[start:stop] for head in x.flatten(0, 1)]
    return [pick(x, transfer.runs, dim=2)]


def pick(x: Tensor, runs: Runs, dim: int) -> Tensor:
    """Return the rows of `runs` in one contiguous tensor: a view if the rows are contiguous already, otherwise a copy."""
    parts: Sequence[Tensor] = [x.narrow(dim, start, stop - start) for start, stop in runs]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(tuple(parts), dim)
