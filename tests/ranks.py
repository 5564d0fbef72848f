"""Ranks for tests: threads, and one pool of gloo processes, started once (torch preloaded), then milliseconds a call.

    run_threads(4, function, *arguments)  ->  [function(group, 0, *arguments), ..., function(group, 3, *arguments)]
    run_ranks(...)                      ->  the same in processes, over gloo
    share_out(function, items)          ->  [function(some), function(others)], on as many processes as there are cores
    own_ranks(...)                      ->  the same in processes of their own, which may be killed; an `Ending` of each

`function(group, rank, *arguments)` is a module-level function; its group is gloo over a file rendezvous.
"""

import atexit
import gc
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple
from unittest.mock import patch

# The profiler of torch announces itself on stderr at every start and stop; it reads this when it is loaded.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
# Each rank that compiles would start processes of its own for that, which import torch.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "longspan.cp.attention", "longspan.train.run"])
_pool: list[tuple[Any, Connection]] = []
TIMEOUT = 120.0
COLD_COMPILE = 900.0
"""Seconds that ranks may take which run the C++ compiler, nothing compiled before, on a machine that does other work too."""
_CORES = min(os.cpu_count() or 1, 4)
_NO_WORLD = "the world could not be set up"


@contextmanager
def warm_launches() -> Iterator[None]:
    """Inside, `launch` forks ranks from a server that has imported torch and the training code, instead of starting afresh."""
    from longspan.comm import launch

    with patch.object(launch, "START_METHOD", "forkserver"):
        yield


class RankFailedError(AssertionError):
    """A rank raised; carries every rank's traceback."""


class Ending(NamedTuple):
    """How a rank of `own_ranks` ended: with a value, an error, or neither (killed, with this exit code)."""

    value: Any
    error: str
    exit_code: int | None
    seconds: float


def run_threads(ranks: int, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
    """Run `function` on `ranks` threads over the in-memory transport, as the pool's processes run it."""
    import torch

    from longspan.comm.in_memory import MemoryWorld, run

    threads, deterministic = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    _like_a_worker()
    try:
        return run(ranks, function, *arguments, world=MemoryWorld(ranks, **options))
    finally:
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode(deterministic)


def share_out(function: Callable[[list[Any]], Any], items: list[Any]) -> list[Any]:
    """Run `function` on a part of the items in each of several processes of the pool."""
    parts = [part for n in range(_CORES) if (part := items[n::_CORES])]
    return _run([(1, 0, _apply, (function, part)) for part in parts])


def _apply(group: Any, rank: int, function: Callable[[list[Any]], Any], part: list[Any]) -> Any:
    return function(part)


def run_ranks(ranks: int, function: Callable[..., Any], *arguments: Any, timeout: float = TIMEOUT) -> list[Any]:
    """Run `function` on `ranks` processes of the pool and return their results in rank order."""
    return _run([(ranks, rank, function, arguments) for rank in range(ranks)], timeout)


def _run(
    jobs: list[tuple[int, int, Callable[..., Any], tuple[Any, ...]]], timeout: float = TIMEOUT, again: bool = True
) -> list[Any]:
    """The results of jobs `(ranks, rank, function, arguments)`, a worker for each; worlds of one rank are apart."""
    workers = _workers(len(jobs))
    with tempfile.TemporaryDirectory(prefix="longspan-ranks-") as folder:
        for number, ((_, pipe), (ranks, *job)) in enumerate(zip(workers, jobs, strict=True)):
            pipe.send((f"{folder}/store{number if ranks == 1 else ''}", ranks, *job))
        results, failures = [], []
        for rank, (process, pipe) in enumerate(workers):
            if not pipe.poll(timeout):
                failures.append(f"rank {rank}: nothing within {timeout} s (exit code {process.exitcode})")
                continue
            try:
                ok, value = pipe.recv()
            except EOFError:
                ok, value = False, f"rank {rank} died"
            (results if ok else failures).append(value)
    if failures:
        _stop()
        if again and any(_NO_WORLD in failure for failure in failures):
            return _run(
                jobs, timeout, again=False
            )  # gloo may lose a connection while it sets up a world on a busy machine
        raise RankFailedError("\n".join(failures))
    return results


def own_ranks(ranks: int, function: Callable[..., Any], *arguments: Any, timeout: float = 60.0) -> list[Ending]:
    """Run `function` on `ranks` fresh processes, none of which needs to survive; those that hang are killed."""
    workers = [_start() for _ in range(ranks)]
    began = time.monotonic()
    endings = []
    with tempfile.TemporaryDirectory(prefix="longspan-ranks-") as folder:
        for rank, (_, pipe) in enumerate(workers):
            pipe.send((f"{folder}/store", ranks, rank, function, arguments))
        for process, pipe in workers:
            value, error = None, ""
            try:
                if pipe.poll(max(0.0, began + timeout - time.monotonic())):
                    ok, result = pipe.recv()
                    value, error = (result, "") if ok else (None, result)
            except EOFError:
                process.join(10)
            seconds = time.monotonic() - began
            pipe.close()
            process.join(10)
            endings.append(Ending(value, error, process.exitcode, seconds))
            process.kill()
    return endings


def _workers(ranks: int) -> list[tuple[Any, Connection]]:
    while len(_pool) < ranks:
        _pool.append(_start())
    return _pool[:ranks]


def _start() -> tuple[Any, Connection]:
    here, there = _context.Pipe()
    process = _context.Process(target=_serve, args=(there,), daemon=True)
    process.start()
    there.close()
    return process, here


@atexit.register
def _stop() -> None:
    for process, pipe in _pool:
        pipe.close()
        process.kill()
    _pool.clear()


def _forget_meshes() -> None:
    """Empty DTensor's caches: they take meshes of the same axes and ranks for one another, and keep their groups."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import _collective_utils, _redistribute, debug

        debug._clear_sharding_prop_cache()
        _redistribute._gen_transform_infos.cache_clear()
        _redistribute._planner_cache.clear()
        _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()


def _like_a_worker() -> None:
    import torch

    torch.set_num_threads(1)
    # Buffers that nobody has written hold NaN, so that reading one shows.
    torch.use_deterministic_algorithms(True, warn_only=True)


def _serve(pipe: Connection) -> None:
    import torch.distributed as dist

    _like_a_worker()
    while True:
        try:
            store, ranks, rank, function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
            )
        except BaseException:
            pipe.send((False, f"rank {rank}: {_NO_WORLD}: {traceback.format_exc()}"))
            continue
        try:
            result = (True, function(dist.group.WORLD, rank, *arguments))
        except BaseException:
            result = (False, f"rank {rank}: {traceback.format_exc()}")
        try:
            _forget_meshes()
            dist.destroy_process_group()
            gc.collect()
        except BaseException:
            result = (False, f"rank {rank}: {traceback.format_exc()}")
        pipe.send(result)
