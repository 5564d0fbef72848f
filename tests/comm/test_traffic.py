"""The record of what attention calls did."""

import time

import pytest

from longspan.comm.traffic import call, record


def test_a_call_goes_to_every_open_recorder_and_to_no_other():
    with record() as outer:
        with call("forward", "ring", "sdpa", 0, timed=True) as first:
            pass
        with record() as inner, call("backward", "ring", "sdpa", 1, timed=True) as second:
            second.pairs += 3
    with call("forward", "ring", "sdpa", 0, timed=True):
        pass
    assert [entry is right for entry, right in zip(outer, (first, second), strict=True)] == [True, True]
    assert len(inner) == 1
    assert inner[0] is second
    assert (second.phase, second.route, second.kernel, second.rank, second.pairs) == ("backward", "ring", "sdpa", 1, 3)


def test_two_recorders_with_equal_contents_close_one_by_one():
    with record() as outer:
        with record() as inner:
            pass
        with call("forward", "ring", "sdpa", 0, timed=True):
            pass
    assert (len(outer), len(inner)) == (1, 0)


def test_an_error_inside_comes_out_and_closes_the_recorder():
    with pytest.raises(ZeroDivisionError), record() as calls:
        _ = 1 / 0
    with call("forward", "ring", "sdpa", 0, timed=True):
        pass
    assert calls == []


def test_seconds_are_those_of_the_blocks():
    with call("forward", "ring", "sdpa", 0, timed=True) as meter:
        for _ in range(2):
            with meter.spend("kernels"):
                time.sleep(0.02)
        with meter.spend("merging"):
            time.sleep(0.01)
    assert meter.seconds_kernels >= 0.04
    assert meter.seconds_merging >= 0.01
    assert meter.seconds_waiting == 0.0
    assert meter.seconds_total >= meter.seconds_kernels + meter.seconds_merging


def test_without_timing_all_seconds_are_none():
    with call("forward", "ring", "sdpa", 0, timed=False) as meter, meter.spend("kernels"):
        pass
    assert [meter.seconds_total, meter.seconds_kernels, meter.seconds_waiting, meter.seconds_merging] == [None] * 4
