"""The lane on which CUDA merges, on a CPU: streams and events that keep count of what was ordered before what, and an allocator
that hands memory out again as soon as the host lets go of it, as CUDA's does."""

from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from longspan.comm.hops import Flight, Hop
from longspan.cp.engine import executor
from longspan.cp.engine import row_transport as rows
from longspan.cp.engine.executor import Share, run_backward, run_forward
from longspan.cp.engine.row_transport import Lane, ReturningGradients
from longspan.cp.engine.sums import Gradient, Output
from longspan.kernels.choice import KERNELS
from longspan.plan import Layout, Mask, plan_attention
from tests.oracle import dense_attention, make_inputs, relative_error
from tests.ranks import run_ranks

SDPA, REFERENCE = type(KERNELS["sdpa"]), type(KERNELS["reference"])


class Memory:
    """A storage: the stream it was allocated on, and by stream the newest operation that read and that wrote it."""

    def __init__(self, storage, stream, reused):
        self.ref, self.stream = StorageWeakRef(storage), stream
        self.reused = reused  # what must be over before the first operation, since the memory may have been used before
        self.reads, self.writes = {}, {}


class Device(TorchDispatchMode):
    """Every operation happens on the current stream, after what that stream has waited for, and after nothing else."""

    def __init__(self):
        super().__init__()
        self.clocks = {name: {} for name in ("main", "lane", "nccl")}
        self.current, self.memories, self.free, self.faults, self.done = "main", {}, {}, [], []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        schema = function._schema
        written = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
        if any(r.alias_info is not None for r in schema.returns) and not any(written):
            return result  # a view
        clock = self.tick(self.current)
        given = [*arguments, *((keywords or {}).get(a.name) for a in schema.arguments[len(arguments) :])]
        for value, is_written in zip(given, written, strict=True):
            for x in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(x, torch.Tensor):
                    self.access(x, self.current, clock, is_written, function)
        for x in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(x, torch.Tensor) and not any(written):
                self.memory(x, allocated=True)
                if "empty" not in schema.name:
                    self.access(x, self.current, clock, True, function)
        return result

    def tick(self, stream):
        self.clocks[stream][stream] = self.clocks[stream].get(stream, 0) + 1
        return self.clocks[stream]

    def memory(self, x, allocated=False):
        storage = x.untyped_storage()
        if storage._cdata not in self.memories or self.memories[storage._cdata].ref.expired():
            for key, memory in list(self.memories.items()):
                if memory.ref.expired():
                    del self.memories[key]
                    merge(self.free.setdefault(memory.stream, {}), memory.reads, memory.writes, memory.reused)
            reused = dict(self.free.get(self.current, {})) if allocated else {}
            self.memories[storage._cdata] = Memory(storage, self.current if allocated else "main", reused)
        return self.memories[storage._cdata]

    def access(self, x, stream, clock, is_written, what):
        memory = self.memory(x)
        before = merge({}, memory.reused, memory.writes, memory.reads if is_written else {})
        late = {other: n for other, n in before.items() if clock.get(other, 0) < n}
        if late:
            self.faults.append(f"{what} on {stream} {'writes' if is_written else 'reads'} what {late} may still be at")
        (memory.writes if is_written else memory.reads)[stream] = clock[stream]

    def note(self, what, method):
        def call(*arguments, **keywords):
            self.done.append((what, self.current))
            return method(*arguments, **keywords)

        return call

    @contextmanager
    def on(self, stream):
        before, self.current = self.current, stream.name
        yield
        self.current = before

    def stream(self, name):
        return SimpleNamespace(
            name=name, device="cuda:0", wait_event=lambda event: merge(self.clocks[name], event.clock)
        )

    def post(self, real):
        def post(hop, group, call, collective=None):
            flight = real(hop, group, call, collective)
            if not flight.works:
                return flight
            merge(self.clocks["nccl"], self.clocks[self.current])
            clock = self.tick("nccl")
            # A collective takes messages that do not lie one after the other as copies, which the flight holds.
            kept = [[("", x)] for x in flight.kept or ()] if collective is not None else (hop.sends, hop.receives)
            for messages, is_written in zip(kept, (False, True), strict=False):
                for _, x in messages:
                    self.access(x, "nccl", clock, is_written, "hop")
            flight.landed_at = dict(clock)
            return flight

        return post

    def wait(self, real):
        def wait(flight, *arguments):
            merge(self.clocks[self.current], getattr(flight, "landed_at", {}))
            real(flight, *arguments)

        return wait

    @contextmanager
    def patched(self):
        device, lane, main = self, self.stream("lane"), self.stream("main")

        class Event:
            def record(self, stream):
                self.clock = dict(device.clocks[stream.name])

        with ExitStack() as stack:
            for name, stand_in in {
                "torch.cuda.current_stream": lambda device=None: main if self.current == "main" else lane,
                "torch.cuda.stream": self.on, "torch.cuda.Event": Event,
            }.items():  # fmt: skip
                stack.enter_context(patch(name, stand_in))
            stack.enter_context(patch.object(Lane, "on", lambda device: Lane(lane)))
            stack.enter_context(patch.object(Hop, "post", self.post(Hop.post)))
            stack.enter_context(patch.object(Flight, "wait", self.wait(Flight.wait)))
            for what, owner, method in (
                *(("kernel", kernel, method) for kernel in (SDPA, REFERENCE) for method in ("forward", "backward")),
                ("merge", Output, "add"),
                ("merge", Gradient, "add"), ("hand over", ReturningGradients, "hand_over"), ("finish", Output, "finish"),
                ("finish", Gradient, "finish"),
            ):  # fmt: skip
                stack.enter_context(patch.object(owner, method, self.note(what, getattr(owner, method))))
            yield self


def merge(clock, *others):
    for other in others:
        for stream, n in other.items():
            clock[stream] = max(clock.get(stream, 0), n)
    return clock


MASKS = {"documents": Mask.documents([9, 17]), "window": Mask.causal(26, window=11), "full": Mask.full(26)}


def _on_two_streams(group, rank, ranks, route, mask, dtype, fault=None):
    """Two calls, so that the second meets the memory of the first: faults, what was done where, the results' streams."""
    layout, inputs = Layout.zigzag(26, ranks), make_inputs(26, dtype=dtype)
    want = dense_attention(make_inputs(26), MASKS[mask])
    # The first gives gradients rows first, which may become sums as they are.
    kernel = "sdpa" if dtype == torch.float64 else "reference"
    share = Share.of(plan_attention(layout, MASKS[mask], route), rank, group, kernel)
    positions = torch.from_numpy(layout.positions(rank))
    q, k, v, dout = (x[:, :, positions].clone() for x in inputs)
    device, streams = Device(), set()
    with fault() if fault else ExitStack(), device.patched(), device:
        for _ in range(2):
            out, lse, _ = run_forward(share, q, k, v, None, 8**-0.5)
            grads = run_backward(share, dout, q, k, v, out, lse, None, 8**-0.5)[:3]
            used = [x.clone() for x in (out, *grads)]  # by the program, on main
            streams |= {device.memory(x).stream for x in (out, lse, *grads)}
            del out, lse, grads
    if fault is None:
        for got, right in zip(used, want, strict=False):
            assert relative_error(got, right[:, :, positions]) < (1e-10 if dtype == torch.float64 else 2**-5)
    return device.faults, device.done, streams


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("ranks", "route"), [(2, "exchange"), (3, "ring"), (3, "rotate")])
@pytest.mark.parametrize("mask", MASKS)
def test_what_meets_on_two_streams_is_ordered_and_memory_is_let_go_in_time(mask, ranks, route, dtype):
    for faults, done, streams in run_ranks(ranks, _on_two_streams, ranks, route, mask, dtype):
        assert faults == []
        assert {place for what, place in done if what == "kernel"} == {"main"}
        assert {place for what, place in done if what in ("merge", "hand over")} == {"lane"}
        assert {place for what, place in done if what == "finish"} == {"main"}
        assert streams == {"main"}, "memory of the lane went to the program"


def lane_waits_for_nothing():
    real = Device.stream

    def stream(device, name):
        made = real(device, name)
        if name == "lane":
            made.wait_event = lambda event: None
        return made

    return patch.object(Device, "stream", stream)


def main_waits_for_nothing():
    return patch.object(Lane, "_let_go", lambda lane: setattr(lane, "_held", ()))


def no_join():
    return patch.object(Lane, "join", lambda lane: None)


def nothing_is_held():
    real = Lane.after
    return patch.object(Lane, "after", lambda lane, *tensors: real(lane))


def replaced_sums_are_not_held():
    real = Lane.after
    return patch.object(Lane, "after", lambda lane, *tensors: real(lane, *tensors[: 2 if len(tensors) == 4 else 3]))


def tiles_travel_as_they_are():
    real = Gradient.__init__
    return patch.object(
        Gradient, "__init__", lambda x, like, rows, home=ExitStack, adopts=True: real(x, like, rows, home)
    )


def sums_are_the_lanes():
    return patch.object(Lane, "home", lambda lane: ExitStack())


@pytest.mark.parametrize(
    ("fault", "ranks", "route", "mask", "dtype"),
    [
        (lane_waits_for_nothing, 2, "exchange", "documents", torch.float64),
        (main_waits_for_nothing, 2, "exchange", "documents", torch.float64),
        (no_join, 2, "exchange", "documents", torch.float64),
        (nothing_is_held, 2, "exchange", "documents", torch.float64),
        (replaced_sums_are_not_held, 3, "ring", "full", torch.bfloat16),
        (tiles_travel_as_they_are, 3, "ring", "full", torch.float64),
    ],
)  # fmt: skip
def test_an_order_left_out_is_found(fault, ranks, route, mask, dtype):
    assert any(faults for faults, _, _ in run_ranks(ranks, _on_two_streams, ranks, route, mask, dtype, fault))


def test_sums_on_the_lane_are_found():
    for _, _, streams in run_ranks(2, _on_two_streams, 2, "exchange", "documents", torch.float64, sums_are_the_lanes):
        assert "lane" in streams


def test_a_device_has_one_lane_with_a_high_priority_and_a_call_two_events():
    made = []

    class Stream:
        def __init__(self, device, priority=0):
            self.device, self.priority = device, priority
            made.append(self)

    class Event:
        count = 0

        def __init__(self, enable_timing=False):
            assert not enable_timing
            Event.count += 1

    assert executor.Lane is Lane
    rows._side_stream.cache_clear()
    with (
        patch("torch.cuda.Stream", Stream), patch("torch.cuda.Event", Event),
        patch("torch.cuda.current_stream", lambda device: f"main of {device}"),
    ):  # fmt: skip
        lanes = [Lane.on(torch.device("cuda", index)) for index in (0, 1, 0, 0)]
    rows._side_stream.cache_clear()
    assert [stream.priority for stream in made] == [-1, -1]
    assert [lane.stream for lane in lanes] == [made[0], made[1], made[0], made[0]]
    assert Event.count == 2 * len(lanes)
    assert Lane.on(torch.device("cpu")).stream is None
