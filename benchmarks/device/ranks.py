"""Stage 3: every route on two or more ranks: results against fp64, bytes against the plan, time in kernels and in waiting.

several GPUs     NCCL, one rank per GPU
one GPU          in-memory transport, ranks as threads: NCCL refuses two ranks on one device, and gloo sends no CUDA tensors.
                 One rank runs at a time, so times do not include communication
CPU              gloo
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.device.case import Case, both
from benchmarks.device.clock import settle
from benchmarks.device.rows import Check, Figures, Options
from longspan import ContextParallel, record
from longspan.comm import in_memory as memory
from longspan.comm.gather import stack
from longspan.comm.groups import RankGroup, rank_and_size
from longspan.comm.launch import launch
from longspan.plan import Phase

ROUTES = ("ring", "rotate", "allgather", "exchange", "ulysses", "usp")
MOST = 8
"""Maximum number of ranks: the GPUs of one node."""
_TIMEOUT = timedelta(seconds=60)


def checks(options: Options) -> Iterator[Check]:
    """Yield a check of each route, each in a new world, so that a hang or crash does not affect the others."""
    ranks, how = world(options.device)
    for route in ROUTES[:2] if options.quick else ROUTES:
        found = cache(partial(ranks_on_one_device, _route, ranks, options.device, route, options))
        yield Check(
            f"{route} {_case(options, torch.device(options.device), ranks)}, {ranks} ranks, {how}",
            lambda found=found: max(error for error, _ in found()),
            lambda found=found: found()[0][1],
        )


def world(device: str) -> tuple[int, str]:
    """Return (number of ranks, transport of the ranks)."""
    if device == "cuda" and torch.cuda.device_count() >= 2:
        return min(torch.cuda.device_count(), MOST), "nccl"
    return 2, "gloo" if device == "cpu" else "memory"


def ranks_on_one_device(function: Callable[..., Any], ranks: int, device: str, *arguments: Any) -> list[Any]:
    """Call `function(group, rank, device, *arguments)` on every rank and return all results. With NCCL, one GPU per rank."""
    how = world(device)[1]
    if how == "memory":
        own = place(0, device, nccl=False)
        return memory.run(ranks, function, own, *arguments, world=memory.MemoryWorld(ranks, device=own))
    results: list[Any] = launch(_enter, (function, device, how == "nccl", arguments), ranks)
    return results


def _enter(function: Callable[..., Any], device: str, nccl: bool, arguments: tuple[Any, ...]) -> list[Any]:
    rank, ranks = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    own = place(rank, device, nccl)
    if own.type == "cuda":
        torch.cuda.set_device(own)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    dist.init_process_group("nccl" if nccl else "gloo", timeout=_TIMEOUT, device_id=own if nccl else None)
    try:
        results: list[Any] = [None] * ranks
        dist.all_gather_object(results, function(dist.group.WORLD, rank, own, *arguments))
        return results
    finally:
        dist.destroy_process_group()


def place(rank: int, device: str, nccl: bool) -> torch.device:
    """Return a rank's device: its own GPU with NCCL, else the first GPU or the CPU."""
    return torch.device("cpu") if device == "cpu" else torch.device("cuda", rank if nccl else 0)


def _case(options: Options, device: torch.device, ranks: int) -> Case:
    """Return three documents. With four or more ranks, KV rows pass through ranks that do not need these rows."""
    parts = (3, 4, 1) if ranks == 2 else (2, 4, 2)
    if options.quick or options.device == "cpu":
        eighth, shape = 64 if options.quick else 1024, ((8, 2), 64, "float32", device)
    else:
        eighth, shape = 4096, ((32, 8), 128, "bfloat16", device)
    return Case(tuple(part * eighth for part in parts), *shape)


def _route(group: RankGroup, rank: int, device: torch.device, route: str, options: Options) -> tuple[float, Figures]:
    """Return (this rank's error / limit, figures)."""
    _, size = rank_and_size(group)
    case = _case(options, device, size)
    cp = ContextParallel(group, layout="zigzag", route=route, heads=case.heads)
    with cp.sequence(case.mask) as sequence:
        q, k, v, dout = (sequence.shard(x, 2) for x in (*case.inputs[:3], case.dout))
        run = both(sequence.attention, (q, k, v, dout))
        run()  # the ranks compare their plans in the first call
        with record() as everyone:
            local = run()
        calls = [call for call in everyone if call.rank == rank]  # ranks as threads share one record
        sent: dict[Phase, int] = {call.phase: call.bytes_sent for call in calls}
        planned = {phase: sequence.plans["full"].bytes(rank, phase, case.head_dim, q.itemsize) for phase in sent}
        assert sent == planned, f"bytes sent {sent}, planned {planned}"
        error = case.error_of([sequence.unshard(x, 2) for x in local])
        if not max(_everyone(error, group)) <= 1:
            return error, {}
        whole = _milliseconds(both(case.sdpa, case.inputs) if rank == 0 else lambda: (), group, device)
        ours = _milliseconds(run, group, device)
    return error, {
        "both_ms": ours,
        "sdpa_one_rank_ms": whole,
        "speed_up": whole / ours,
        **{
            f"{part}_ms": 1e3 * sum(getattr(call, f"seconds_{part}") for call in calls)
            for part in ("kernels", "waiting", "merging")
        },
        "sent_mib": sum(sent.values()) / 2**20,
        "kernel_calls": sum(call.kernel_calls for call in calls),
    }


def _everyone(value: float, group: RankGroup) -> list[float]:
    """Gather a value from each rank. Also acts as a barrier."""
    found: list[float] = stack(torch.tensor(value, dtype=torch.float64), group).tolist()
    return found


def _milliseconds(run: Callable[[], Any], group: RankGroup, device: torch.device) -> float:
    """Return the median milliseconds of the slowest rank. All ranks start together."""
    found = []
    for _ in range(5):
        settle(device)
        _everyone(0.0, group)
        start = time.perf_counter()
        run()
        settle(device)
        found.append(1e3 * max(_everyone(time.perf_counter() - start, group)))
    return statistics.median(found)
