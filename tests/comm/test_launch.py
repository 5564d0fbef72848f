"""Processes made by `launch`: what they return, and who is named when one of them fails or is killed."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from longspan.comm import launch as module
from longspan.comm.groups import timeout_of
from longspan.comm.launch import join_world, launch, leave_world
from longspan.comm.meshes import Meshes
from longspan.comm.torchrun import local_ranks, under_torchrun, world_size
from longspan.errors import CommError, SpecError
from longspan.topology import Topology


def test_whether_a_launcher_made_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert not under_torchrun()
    monkeypatch.setenv("RANK", "0")
    assert not under_torchrun()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert under_torchrun()
    assert world_size() == 1


def test_ranks_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert local_ranks(16) == 16
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert local_ranks(16) == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert local_ranks(16) == 8


def look_around(dp: int, cp: int) -> dict[str, Any]:
    try:
        mesh = join_world(Topology(dp=dp, cp=cp), timedelta(seconds=30), threads=3).data
        everyone: list[Any] = [None] * dist.get_world_size()
        here = {name: mesh[name].get_local_rank() for name in ("dp", "cp")}
        dist.all_gather_object(everyone, here | {"threads": torch.get_num_threads(), "rank": dist.get_rank()})
        waits = {name: timeout_of(group).total_seconds() for name, group in
                 {"world": dist.group.WORLD, "cp": mesh["cp"].get_group()}.items()}  # fmt: skip
        return {"everyone": everyone, "axes": mesh.mesh_dim_names, "waits": waits}
    finally:
        leave_world()


@pytest.mark.usefixtures("warm")  # that processes start afresh: the interrupt below, tests/cli/test_train.py
def test_ranks_of_a_cp_group_are_neighbours_and_rank_0_answers() -> None:
    found = launch(look_around, (2, 2), 4)
    assert found["axes"] == ("pp", "dp", "cp", "tp")
    assert found["everyone"] == [{"rank": rank, "dp": rank // 2, "cp": rank % 2, "threads": 3} for rank in range(4)]
    assert found["waits"] == {"world": 30.0, "cp": 30.0}
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("device", "devices", "found"),
    [("auto", 0, "cpu"), ("auto", 2, "cuda"), ("cpu", 0, "cpu"), ("cpu", 2, "cpu"), ("cuda", 2, "cuda")],
)
def test_where_ranks_compute(monkeypatch: pytest.MonkeyPatch, device: str, devices: int, found: str) -> None:
    """On CUDA the world is bound to the rank's device, and has gloo beside NCCL."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(torch, "set_num_threads", calls.append)
    monkeypatch.setattr(dist, "init_process_group", lambda *given, **named: calls.append((*given, named)))
    monkeypatch.setattr(dist, "rendezvous", lambda url, timeout: iter([((url, timeout), 3, 4)]))
    monkeypatch.setattr(module, "meet", lambda store, world: calls.append((store, world)))
    monkeypatch.setattr(Meshes, "of", lambda topology, device_type: (topology, device_type))
    topology, timeout = Topology(dp=4), timedelta(seconds=7)
    assert join_world(topology, timeout, threads=3, device=device) == (topology, found)
    own, store = torch.device("cuda", 1), ("env://", timeout)
    start = {"store": store, "rank": 3, "world_size": 4, "timeout": timeout}
    of_device = {"cpu": [3, ("gloo", start)], "cuda": [own, ("cpu:gloo,cuda:nccl", start | {"device_id": own})]}
    assert calls == [(store, 4), *of_device[found]]


def test_ranks_that_come_late_are_waited_for_beyond_the_timeout() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(milliseconds=100))
    with ThreadPoolExecutor(3) as pool:
        early = [pool.submit(module.meet, store, 3) for _ in range(2)]
        time.sleep(0.5)
        assert not any(rank.done() for rank in early)
        assert [rank.result(10) for rank in (*early, pool.submit(module.meet, store, 3))] == [None] * 3


def test_ranks_that_wait_learn_of_one_that_failed_before_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(dist, "rendezvous", lambda url, timeout: iter([(store, 2, 3)]))
    for name, value in {"RANK": "2", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    with ThreadPoolExecutor(2) as pool:
        early = [pool.submit(module.meet, store, 3) for _ in range(2)]
        with pytest.raises(ValueError, match="no such corpus"), module.telling_others():
            raise ValueError("no such corpus")
        for rank in early:
            with pytest.raises(CommError) as told:
                rank.result(10)
            assert told.value.message == "rank 2 failed: no such corpus; the other ranks do not start without it"


@pytest.mark.parametrize("rank", ["0", "1", "2"])
def test_every_rank_is_refused_where_there_are_fewer_devices(monkeypatch: pytest.MonkeyPatch, rank: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in {"RANK": rank, "WORLD_SIZE": "3", "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SpecError) as told:
        join_world(Topology(dp=3), timedelta(seconds=7))
    assert told.value.message == "3 ranks on this machine, which has 2 CUDA devices: each rank needs its own"
    assert told.value.hint == 'set parallel.device="cpu", or start at most 2 ranks here'
    assert not dist.is_initialized()


def lose_rank_1(how: str, note: Path) -> None:
    """Rank 1 ends while rank 0 waits for it."""
    try:
        join_world(Topology(dp=1, cp=2), timedelta(seconds=300))
        dist.barrier()
        if dist.get_rank() == 1:
            note.write_text(str(time.time()))
            if how == "raises":
                raise ValueError("a row of 7 tokens")
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(3))
    finally:
        leave_world()


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raises", "rank 1 of 2 failed: ValueError: a row of 7 tokens"),
        ("is killed", "rank 1 of 2 was killed by SIGKILL; the others were ended"),
    ],
)
def test_the_rank_that_was_lost_first_is_named_within_seconds(tmp_path: Path, how: str, text: str) -> None:
    with pytest.raises(CommError) as told:
        launch(lose_rank_1, (how, tmp_path / "lost"), 2)
    assert time.time() - float((tmp_path / "lost").read_text()) < 15
    assert told.value.message == text


def fail(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "lingers"),
    [
        (CommError("a hop with rank 1 failed"), True),
        (dist.DistBackendError("NCCL"), True),
        (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"), True),
        (RuntimeError("out of memory"), False),
        (SpecError("cp 3"), False),
    ],
)
def test_a_rank_that_lost_a_peer_lets_the_peer_be_found_first(
    monkeypatch: pytest.MonkeyPatch, error: Exception, lingers: bool
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(module.time, "sleep", slept.append)
    with pytest.raises(type(error)):
        module._enter(fail, error)
    assert slept == ([2.0] if lingers else [])


def test_an_interrupt_ends_all_ranks_and_is_one_line(tmp_path: Path) -> None:
    """As Ctrl-C does it: SIGINT to the whole process group of `longspan train`."""
    (tmp_path / "text.txt").write_text("a line of text\n" * 400)
    (tmp_path / "other.txt").write_text("another line of text\n" * 400)
    config = tmp_path / "run.toml"
    config.write_text(
        f'run_dir = "{tmp_path}/run"\nsteps = 100000\n[data]\npaths = ["{tmp_path}/text.txt", "{tmp_path}/other.txt"]\n'
        f'seq_len = 64\ncache_dir = "{tmp_path}/cache"\n[parallel]\ncp = 2\n'
        "[model]\nvocab_size = 256\nhidden_size = 16\nnum_layers = 1\nnum_heads = 2\nnum_kv_heads = 1\nintermediate_size = 32\n"
    )
    command = [sys.executable, "-m", "longspan.cli.main", "train", str(config), "--quiet"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 180
    try:
        while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        _, told = process.communicate(timeout=60)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130
    assert told.endswith(
        "error: interrupted; all ranks were stopped\n\nhint: set resume=true to continue from the newest checkpoint\n"
    )
    assert "Traceback" not in told
