"""Two nodes on one machine: what crosses their link is what the plan says, its limit holds, and nothing of them stays."""

import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch.distributed as dist
from benchmarks.nodes import HEADER_BYTES, ROOT, NodesError, namespaces, transfer, two_nodes, unavailable
from benchmarks.wire import Case, Crossing, survey

needs_nodes = pytest.mark.skipif(unavailable() is not None, reason=(unavailable() or "").split("\n")[0])


def ours():
    return [name for name in namespaces() if f"-{os.getpid()}-" in name]


def limited(link, count, rate):
    link.limit(rate)
    seconds = transfer(count, count)
    before = link.sent()[0]
    link.limit(None)
    return {"seconds": seconds, "rank": dist.get_rank(), "sent": before}


def failing(link, rank):
    if dist.get_rank() == rank:
        raise ValueError("on purpose")
    dist.barrier()


@needs_nodes
def test_bytes_on_the_link_are_those_of_the_plan():
    cases = [Case("ring", layout, mask, 1024) for layout, mask in (("zigzag", "causal"), ("contiguous", "window"))]
    with two_nodes() as nodes:
        assert len(ours()) == 2
        crossings = survey(nodes, cases)
    assert ours() == []
    # Worked out by hand: 2 KV heads of 2 x 64 fp32 are 1024 bytes a row; a window of 64 sees 63 rows of the rank before.
    planned = {(c.case.mask, c.phase, c.rank): c.planned for c in crossings}
    assert planned["causal", "forward", 0] == 256 * 1024
    assert planned["causal", "forward", 1] == 512 * 1024
    assert planned["window", "forward", 0] == planned["window", "backward", 1] == 63 * 1024
    assert planned["window", "forward", 1] == 0
    assert [c for c in crossings if not c.holds] == []


@needs_nodes
def test_a_limited_link_takes_its_time():
    count, rate = 2_000_000, 100e6
    with two_nodes() as nodes:
        found = nodes.run("tests.benchmarks.test_nodes:limited", count=count, rate=rate)
    assert [answer["rank"] for answer in found] == [0, 1]
    for answer in found:
        assert answer["sent"] > count
        # Both ways at once: one after the other would take twice as long. A burst may go ahead of the rate.
        assert 0.95 < answer["seconds"] / (8 * count / rate) < 1.8


@needs_nodes
@pytest.mark.parametrize("rank", [0, 1])
def test_a_failing_rank_is_named_and_leaves_nothing(rank):
    with pytest.raises(NodesError, match=f"rank {rank} failed: ValueError: on purpose"), two_nodes() as nodes:
        nodes.run("tests.benchmarks.test_nodes:failing", rank=rank)
    assert ours() == []


@needs_nodes
def test_sigterm_leaves_nothing():
    code = (
        "import time; from benchmarks.nodes import two_nodes\nwith two_nodes(): print('up', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "up\n"
        names = [name for name in namespaces() if f"-{process.pid}-" in name]
        process.terminate()
        assert process.wait(timeout=30) == 128 + signal.SIGTERM
    assert len(names) == 2
    assert not set(names) & set(namespaces())


@needs_nodes
def test_what_a_killed_process_left_is_removed_by_the_next():
    code = "import os; from benchmarks.nodes import two_nodes\nwith two_nodes(): os.kill(os.getpid(), 9)"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    process.wait(timeout=60)
    names = {f"longspan-{process.pid}-{rank}" for rank in (0, 1)}
    assert names <= set(namespaces())
    with two_nodes():
        assert not names & set(namespaces())


def test_without_root_the_error_says_so(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NodesError, match=r"need root.*this is user 1000\n\nhint: run it as root"), two_nodes():
        pass


def test_without_the_tools_the_error_names_them(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "tc" else name)
    with pytest.raises(NodesError, match=r"^tc not found\n\nhint: install iproute2"), two_nodes():
        pass


def test_a_crossing_holds_from_the_plan_to_three_percent_above():
    case = Case("ring", "zigzag", "causal", 1024)
    holds = [
        Crossing(case, "forward", 0, 1_000_000, payload + 10 * HEADER_BYTES, 10).holds
        for payload in (999_999, 1_000_000, 1_034_096, 1_034_097)
    ]
    assert holds == [False, True, True, False]
