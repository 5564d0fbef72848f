"""Measure time and memory of a call: by CUDA events on a GPU, by `benchmarks.harness` on a CPU."""

import statistics
import time
from collections.abc import Callable, Mapping

import torch

from benchmarks.device.rows import NotHereError
from benchmarks.harness import FOREIGN_LIMIT, Usage, foreign_share, peak_bytes

Run = Callable[[], object]
_WARM_UP, _ROUNDS, _SECONDS = 3, 9, 6.0
"""Warm-up rounds, and maximum of timed rounds. After `_SECONDS`, 1 warm-up round and 3 timed rounds suffice."""


def times(runs: Mapping[str, Run], device: torch.device, quick: bool = False) -> dict[str, float]:
    """Return the median milliseconds of each call. Every round runs all calls, in rotating order.

    On a CPU a round is kept only if other programs did not use the cores; `quick` keeps all rounds. Raises NotHereError: no
    round was kept.
    """
    order, rounds = list(runs), 3 if quick else _ROUNDS
    kept: dict[str, list[float]] = {name: [] for name in runs}
    began = time.monotonic()
    for turn in range(1 if quick else _WARM_UP):
        if not turn or time.monotonic() - began < _SECONDS:
            for run in runs.values():
                run()
            settle(device)
    began = time.monotonic()
    for turn in range(2 * rounds):
        if len(kept[order[0]]) >= rounds or (turn >= 3 and time.monotonic() - began > _SECONDS):
            break
        order = order[1:] + order[:1]
        before, start = Usage.now(), time.perf_counter()
        found = {name: _once(runs[name], device) for name in order}
        if device.type == "cuda" or quick or _alone(before, time.perf_counter() - start):
            for name, milliseconds in found.items():
                kept[name].append(milliseconds)
    if not kept[order[0]]:
        raise NotHereError(f"other programs used more than {FOREIGN_LIMIT:.0%} of the cores in every round")
    return {name: statistics.median(kept[name]) for name in runs}


def peak_mib(run: Run, device: torch.device) -> float:
    """Return the peak memory of a call minus the memory allocated before, in MiB."""
    if device.type != "cuda":
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
            run()
        return peak_bytes(profiler) / 2**20
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def settle(device: torch.device) -> None:
    """Synchronise with the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _once(run: Run, device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start)
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start_event.record()
    run()
    end_event.record()
    end_event.synchronize()
    return float(start_event.elapsed_time(end_event))


def _alone(before: Usage, seconds: float) -> bool:
    return foreign_share(before, seconds, total=lambda sums: None) <= FOREIGN_LIMIT
