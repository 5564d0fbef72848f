"""The record of what attention calls did: who hears of a call, what seconds add up to, and its ranges in a profiler's trace."""

import time
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from longspan.comm import traffic
from longspan.comm.sharding import shard
from longspan.comm.traffic import Call, Interval, StreamClock, WallClock, call, record
from longspan.cp.attention import attention
from longspan.plan import Layout, Mask, plan_attention
from tests.oracle import make_inputs
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def test_a_call_goes_to_every_open_recorder_and_to_no_other():
    with record() as outer:
        with call("forward", "ring", "sdpa", 0, CPU) as first:
            pass
        with record() as inner, call("backward", "ring", "sdpa", 1, CPU) as second:
            second.pairs_computed += 3
    with call("forward", "ring", "sdpa", 0, CPU):
        pass
    assert [entry is right for entry, right in zip(outer, (first, second), strict=True)] == [True, True]
    assert len(inner) == 1
    assert inner[0] is second
    assert (second.phase, second.route, second.kernel, second.rank, second.pairs) == ("backward", "ring", "sdpa", 1, 3)


def test_two_recorders_with_equal_contents_close_one_by_one():
    with record() as outer:
        with record() as inner:
            pass
        with call("forward", "ring", "sdpa", 0, CPU):
            pass
    assert (len(outer), len(inner)) == (1, 0)


def test_an_error_inside_comes_out_and_closes_the_recorder():
    with pytest.raises(ZeroDivisionError), record() as calls:
        _ = 1 / 0
    with call("forward", "ring", "sdpa", 0, CPU):
        pass
    assert calls == []


def test_seconds_are_those_of_the_blocks():
    with call("forward", "ring", "sdpa", 0, CPU) as meter:
        for _ in range(2):
            with meter.spend("kernels"):
                time.sleep(0.02)
        with meter.spend("merging"):
            time.sleep(0.01)
    assert meter.seconds_kernels >= 0.04
    assert meter.seconds_merging >= 0.01
    assert meter.seconds_waiting == 0.0
    assert meter.seconds_total >= meter.seconds_kernels + meter.seconds_merging
    assert isinstance(meter.clock, WallClock)


def made(*intervals, start=0.0, end=10.0, **values) -> Call:
    """A call whose marks are given."""
    entry = Call("forward", "ring", "sdpa", 3, start=start, end=end, **values)
    entry.intervals = [Interval(*one) for one in intervals]
    return entry


@pytest.mark.parametrize(
    ("hops", "waiting", "under_way", "overlap"),
    [
        ([], [], 0.0, 1.0),  # no communication hides completely
        ([(1, 3)], [(2, 3)], 2.0, 0.5),
        ([(1, 3)], [(1, 3)], 2.0, 0.0),
        ([(1, 3)], [], 2.0, 1.0),
        ([(1, 4), (2, 6)], [(5, 6)], 5.0, 0.8),  # side by side: once
        ([(2, 6), (1, 4)], [(5, 6)], 5.0, 0.8),  # in whichever order they were found to have arrived
        ([(1, 9), (2, 3), (4, 5)], [(7, 9)], 8.0, 0.75),  # one within another
        ([(1, 2), (2, 3), (5, 6)], [(5, 6)], 3.0, 2 / 3),
        ([(1, 3), (1, 3)], [(1, 2), (2, 3)], 2.0, 0.0),
    ],
)
def test_hops_side_by_side_count_once(hops, waiting, under_way, overlap):
    entry = made(*(("hop", a, b) for a, b in hops), *(("waiting", a, b) for a, b in waiting), ("kernels", 0, 9))
    assert entry.seconds_communication == pytest.approx(under_way)
    assert entry.overlap == pytest.approx(overlap)
    assert (entry.seconds_kernels, entry.seconds_total) == (9, 10)


@pytest.mark.parametrize(("pairs", "shares", "right"), [(12, 1, 12), (12, 4, 3), (7, 2, 3.5), (0, 3, 0)])
def test_pairs_and_blocks_of_a_share_of_the_heads(pairs, shares, right):
    entry = Call("forward", "ulysses", "sdpa", 0, pairs_computed=pairs, blocks_computed=pairs, head_shares=shares)
    assert entry.pairs == entry.blocks == right
    assert isinstance(entry.pairs, int if right == int(right) else float)


def _recorded(group, rank, plans):
    found = []
    for plan in plans:
        q, k, v, dout = (shard(x, plan.layout, rank, 2) for x in make_inputs(plan.seq_len, plan.heads, dim=16))
        with record() as calls:
            attention(q.requires_grad_(), k, v, plan=plan, group=group).backward(dout)
        for entry in calls:
            parts = entry.seconds_kernels + entry.seconds_waiting + entry.seconds_merging
            assert 0 < parts <= entry.seconds_total, entry
            assert 0 <= entry.overlap <= 1, entry
            assert entry.seconds_waiting <= entry.seconds_communication + 1e-9, entry
            assert entry.seconds_communication <= entry.seconds_total, entry
            assert (entry.bytes_received > 0) == (entry.seconds_communication > 0) or entry.collectives, entry
        with torch.profiler.profile() as profile:
            attention(q, k, v, plan=plan, group=group).backward(dout)
        names = [event.name for event in profile.events() if event.name.startswith("longspan ")]
        found.append({name: names.count(name) for name in set(names)})
    return found


def test_seconds_and_ranges_of_real_calls():
    """Work of one thread: its parts never exceed the whole. A profiler's trace has a range for each call and each part of it."""
    S, P = 256, 3
    routes = ("ring", "exchange", "allgather", "rotate", "ulysses")
    plans = [plan_attention(Layout.zigzag(S, P), Mask.causal(S), route, (6, 3)) for route in routes]
    for ranges in run_ranks(P, _recorded, plans):
        for route, found in zip(routes, ranges, strict=True):
            assert found[f"longspan forward {route}"] == found[f"longspan backward {route}"] == 1
            assert found["longspan kernels"] > 0
            assert found["longspan merging"] > 0
            assert found["longspan waiting"] > 0


class EventOnDevice:
    """Stands in for `torch.cuda.Event`: a device that is 5 ms behind, and marks it has not reached until it is waited for."""

    now, waited = 0.0, 0

    def __init__(self, enable_timing=False):
        assert enable_timing, "an event without timing has no elapsed time"
        self.at, self.reached = None, False

    def record(self):
        EventOnDevice.now += 5.0
        self.at = EventOnDevice.now

    def synchronize(self):
        assert self.at is not None
        EventOnDevice.waited += 1
        self.reached = True

    def elapsed_time(self, end):
        assert end.reached, "read before the device got there"
        return end.at - self.at


def test_on_a_gpu_seconds_are_those_of_events_in_the_stream(monkeypatch):
    monkeypatch.setattr(
        traffic, "torch", SimpleNamespace(cuda=SimpleNamespace(Event=EventOnDevice), device=torch.device)
    )
    with record(), call("forward", "ring", "sdpa", 0, torch.device("cuda")) as meter:
        start = meter.clock.now()
        with meter.spend("kernels"):
            pass
        with meter.spend("waiting"):
            pass
        meter.flew(start)
    assert isinstance(meter.clock, StreamClock)
    # Nothing waits for the device while the call runs.
    assert EventOnDevice.waited == 0
    # Marks 5 ms apart: start, hop, kernels (2), waiting (2), arrival, end.
    assert meter.seconds_total == pytest.approx(0.035)
    assert meter.seconds_kernels == meter.seconds_waiting == pytest.approx(0.005)
    assert meter.seconds_communication == pytest.approx(0.025)
    assert meter.overlap == pytest.approx(0.8)
    assert EventOnDevice.waited > 0


class CountedEvent(EventOnDevice):
    """One whose device is waited for as a whole: what was recorded before it is then reached too."""

    made, recorded = 0, 0
    everything: ClassVar[list["CountedEvent"]] = []

    def __init__(self, enable_timing=False):
        super().__init__(enable_timing)
        CountedEvent.made += 1

    def record(self):
        super().record()
        CountedEvent.recorded += 1
        self.reached = False
        CountedEvent.everything.append(self)

    def synchronize(self):
        super().synchronize()
        for event in CountedEvent.everything:
            event.reached |= event.at <= self.at

    def query(self):
        return self.reached

    def elapsed_time(self, end):
        assert self.reached
        return super().elapsed_time(end)


@pytest.fixture
def events(monkeypatch):
    stand_in = SimpleNamespace(cuda=SimpleNamespace(Event=CountedEvent), device=torch.device)
    monkeypatch.setattr(traffic, "torch", stand_in)
    CountedEvent.made = CountedEvent.recorded = EventOnDevice.waited = 0
    CountedEvent.everything.clear()
    traffic._pooled.cache_clear()
    yield CountedEvent
    traffic._pooled.cache_clear()


def _a_call_on_a_gpu():
    """Of 3 kernels, 3 merges and 2 waits for hops."""
    with call("forward", "ring", "sdpa", 0, torch.device("cuda")) as meter:
        for index in range(3):
            posted = meter.clock.now()
            with meter.spend("kernels"):
                meter.kernel_calls += 1
                meter.pairs_computed += 10
            with meter.spend("merging"):
                pass
            if index < 2:
                with meter.spend("waiting"):
                    meter.bytes_received += 8
                meter.flew(posted)
    return meter


def test_nobody_who_asks_no_event(events):
    meter = _a_call_on_a_gpu()
    assert (events.made, events.recorded, events.waited) == (0, 0, 0)
    assert (meter.kernel_calls, meter.pairs, meter.bytes_received) == (3, 30, 16)


def test_a_run_takes_two_events_a_call_and_two_a_wait_and_uses_them_again(events):
    for step in range(1, 4):
        with record("waiting") as calls:
            for _ in range(5):
                _a_call_on_a_gpu()
            assert events.waited == step - 1  # nothing waits for the device while the step runs
        assert events.recorded == step * 5 * (2 + 2 * 2)
        assert events.made == 5 * (2 + 2 * 2)
        assert events.waited == step
        for entry in calls:
            # Marks 5 ms apart: start, two of each wait, end.
            assert entry.seconds_total == pytest.approx(0.025)
            assert entry.seconds_waiting == pytest.approx(0.010)
            assert (entry.kernel_calls, entry.pairs, entry.bytes_received) == (3, 30, 16)
            unknown = (entry.seconds_kernels, entry.seconds_merging, entry.seconds_communication, entry.overlap)
            assert all(seconds != seconds for seconds in unknown)
        assert events.waited == step


def test_a_recorder_that_asks_for_everything_gets_it_beside_one_that_does_not(events):
    with record() as detailed, record("waiting") as calls:
        meter = _a_call_on_a_gpu()
    assert calls[0] is detailed[0] is meter
    # 2 of the call, 2 of each of 3 kernels, 3 merges and 2 waits; 3 hops are posted, and 2 land.
    assert events.recorded == 2 + 2 * 8 + 3 + 2
    assert events.waited == 1
    assert (meter.seconds_kernels, meter.seconds_merging) == pytest.approx((0.015, 0.015))
    assert meter.seconds_total == pytest.approx(0.110)
    assert meter.seconds_communication == pytest.approx(2 * 0.035)  # posted, 2 x 3 activities, landed
    assert events.waited == 1


def test_on_cpu_everything_is_timed_whatever_is_asked_for():
    with record("waiting") as calls, call("forward", "ring", "sdpa", 0, CPU) as meter, meter.spend("kernels"):
        time.sleep(0.01)
    assert calls[0].seconds_kernels >= 0.01
    assert calls[0].seconds_merging == 0.0
