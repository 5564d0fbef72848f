"""Real ranks for tests: one pool of gloo processes, started once (torch preloaded), then milliseconds a call.

    run_ranks(4, function, *arguments)  ->  [function(rank 0), ..., function(rank 3)]

`function(group, rank, *arguments)` is a module-level function; its group is gloo over a file rendezvous.
"""

import atexit
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "longspan.attention.attention"])
_pool: list[tuple[Any, Connection]] = []
_TIMEOUT = 120.0


class RankFailedError(AssertionError):
    """A rank raised; carries every rank's traceback."""


def run_ranks(ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run `function` on `ranks` processes and return their results in rank order."""
    workers = _workers(ranks)
    with tempfile.NamedTemporaryFile(prefix="longspan-ranks-") as rendezvous:
        for rank, (_, pipe) in enumerate(workers):
            pipe.send((rendezvous.name + ".store", ranks, rank, function, arguments))
        results, failures = [], []
        for rank, (process, pipe) in enumerate(workers):
            if not pipe.poll(_TIMEOUT):
                failures.append(f"rank {rank}: nothing within {_TIMEOUT} s (exit code {process.exitcode})")
                continue
            try:
                ok, value = pipe.recv()
            except EOFError:
                ok, value = False, f"rank {rank} died"
            (results if ok else failures).append(value)
    if failures:
        _stop()
        raise RankFailedError("\n".join(failures))
    return results


def _workers(ranks: int) -> list[tuple[Any, Connection]]:
    while len(_pool) < ranks:
        here, there = _context.Pipe()
        process = _context.Process(target=_serve, args=(there,), daemon=True)
        process.start()
        there.close()
        _pool.append((process, here))
    return _pool[:ranks]


@atexit.register
def _stop() -> None:
    for process, pipe in _pool:
        pipe.close()
        process.kill()
    _pool.clear()


def _serve(pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # Buffers that nobody has written hold NaN, so that reading one shows.
    torch.use_deterministic_algorithms(True, warn_only=True)
    while True:
        try:
            store, ranks, rank, function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
            )
            result = (True, function(dist.group.WORLD, rank, *arguments))
        except BaseException:
            result = (False, f"rank {rank}: {traceback.format_exc()}")
        try:
            dist.destroy_process_group()
        except BaseException:
            result = (False, f"rank {rank}: {traceback.format_exc()}")
        pipe.send(result)
