"""Start ranks: join the world of torchrun, or launch one with torchrun's library."""

import logging
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from longspan.comm.devices import check_devices, device_type
from longspan.comm.meshes import Meshes
from longspan.comm.torchrun import local_ranks, under_torchrun
from longspan.errors import CommError
from longspan.topology import Topology

START_METHOD = "spawn"
"""How `launch` starts processes: afresh, so that each has this process's environment and none of its threads."""
_LINGER_SECONDS = 2.0
_LOOK_SECONDS = 0.05


def launch(function: Callable[..., Any], arguments: tuple[Any, ...], ranks: int) -> Any:
    """Run `function(*arguments)` on `ranks` new processes of this machine and return the result of rank 0.

    `function` must be at the top level of a module. If a rank fails or is killed, all other ranks are ended at once, and
    a `CommError` names the first failed rank and its error. SIGINT and SIGTERM end all ranks and raise
    `KeyboardInterrupt`.
    """
    # The CommError replaces the launcher's log of a failed rank.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=f"longspan-{uuid.uuid4().hex[:8]}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        start_method=START_METHOD,
    )
    try:
        return elastic_launch(config, _enter)(function, *arguments)[0]
    except SignalException as error:
        raise KeyboardInterrupt(error.sigval.name) from None
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise CommError(
            f"rank {rank} of {ranks} {_describe(failure.exitcode, failure.message)}", hint=_hint(failure.exitcode)
        ) from None


def _enter(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run `function` in the new process, and write its error for the launcher.

    A rank that lost a peer waits before it exits, so that the launcher, which polls every 0.1 s, finds the peer first.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank silently; the launcher reports.
    try:
        return record(function)(*arguments)
    except RuntimeError as error:
        if isinstance(error, CommError | dist.DistError) or "gloo" in str(error):
            time.sleep(_LINGER_SECONDS)
        raise


def join_world(topology: Topology, timeout: timedelta, threads: int | None = None, device: str = "auto") -> Meshes:
    """Wait for all ranks, initialise this rank's process groups, all with `timeout`, and return the meshes.

    `device` is "cpu", "cuda" or "auto" (see `device_type`). Raises `SpecError` if this machine has too few devices, and
    `CommError` if another rank has failed.
    """
    local = local_ranks(1)
    with telling_others():
        check_devices(device, local)
    store, rank, world = next(dist.rendezvous("env://", timeout=timeout))
    meet(store, world)
    start: dict[str, Any] = {"store": store, "rank": rank, "world_size": world, "timeout": timeout}
    if device_type(device) == "cuda":
        own = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(own)
        # With device_id, NCCL connects the world at once and splits groups off it. CPU tensors use gloo.
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=own, **start)
    else:
        torch.set_num_threads(threads or max(1, (os.cpu_count() or 1) // local))
        dist.init_process_group("gloo", **start)
    return Meshes.of(topology, device_type(device))


def meet(store: dist.Store, world: int) -> None:
    """Block until `world` ranks have called `meet`. No timeout: other ranks may still tokenise or load.

    If a rank failed before its call, raises a `CommError` that names the rank.
    """
    if store.add("longspan/ranks", 1) == world:
        store.set("longspan/all", "")
    while not store.check(["longspan/all"]):
        if store.check(["longspan/failed"]):
            raise CommError(f"{store.get('longspan/failed').decode()}; the other ranks do not start without it")
        time.sleep(_LOOK_SECONDS)


@contextmanager
def telling_others() -> Iterator[None]:
    """Report an exception inside the block to the ranks that wait in `meet`, on all machines, if under torchrun."""
    try:
        yield
    except Exception as error:
        with suppress(Exception):  # an unreachable store must not hide the original error
            if under_torchrun():
                store, rank, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=30)))
                store.set("longspan/failed", f"rank {rank} failed: {error}")
        raise


def leave_world() -> None:
    """Destroy the process groups, so that no rank exits while another still needs it."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _hint(exit_code: int) -> str | None:
    killed = exit_code == -signal.SIGKILL
    return "SIGKILL usually means the kernel's OOM killer; check dmesg" if killed else None


def _describe(exit_code: int, message: Any) -> str:
    if exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}; the others were ended"
    text = message.get("message", message) if isinstance(message, dict) else message
    return f"failed: {text}"
