"""Start ranks: join the world that torchrun made, or make one with torchrun's own library."""

import logging
import os
import signal
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from longspan.comm.meshes import Meshes
from longspan.plan import Topology
from longspan.spec import CommError

_LINGER_SECONDS = 2.0


def launch(function: Callable[..., Any], arguments: tuple[Any, ...], ranks: int) -> Any:
    """Run `function(*arguments)` on `ranks` new processes of this machine and return what rank 0 returned.

    `function` is at the top level of a module. If a rank fails or is killed the others are ended at once, and a `CommError`
    names the first that failed and its error. SIGINT and SIGTERM end all ranks and raise `KeyboardInterrupt`.
    """
    # What the launcher logs of a failed rank, the CommError says in a line.
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
        start_method="spawn",
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
    """In the new process: run `function`, and write its error where the launcher reads it.

    A rank that lost a peer does not end at once: the launcher, which looks every 0.1 s, is to find the peer first.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank without a word: the launcher has the last one.
    try:
        return record(function)(*arguments)
    except RuntimeError as error:
        if isinstance(error, CommError | dist.DistError) or "gloo" in str(error):
            time.sleep(_LINGER_SECONDS)
        raise


def join_world(topology: Topology, timeout: timedelta, threads: int | None = None) -> Meshes:
    """Initialise this rank and return its meshes."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    else:
        torch.set_num_threads(threads or max(1, (os.cpu_count() or 1) // local))
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timeout)
    return Meshes.of(topology, "cuda" if cuda else "cpu")


def leave_world() -> None:
    """Tear the groups down, so that no rank ends while another still needs it."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _hint(exit_code: int) -> str | None:
    killed = exit_code == -signal.SIGKILL
    return "the system kills so what takes too much memory: its log tells" if killed else None


def _describe(exit_code: int, message: Any) -> str:
    if exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}; the others were ended"
    text = message.get("message", message) if isinstance(message, dict) else message
    return f"failed: {text}"
