"""Check, then measure memory and bytes, then time in pairs: contenders against SDPA, routes against the fastest peer."""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.harness import FOREIGN_LIMIT, Spread, peak_bytes, tcp_bytes_sent
from benchmarks.peers import kernels
from benchmarks.peers.adapters import make_layout
from benchmarks.peers.cases import Case, make_inputs
from benchmarks.peers.roster import OURS, Peer, contenders
from benchmarks.peers.trio import RANKS, Trio
from longspan import Layout, shard

Tensor = torch.Tensor
Run = Callable[[], tuple[Tensor, ...]]
TENSORS = ("out", "dq", "dk", "dv")
TOLERANCE = 1e-3
"""Allowed difference from fp32 SDPA / the tensor's maximum, on any rank; in bfloat16, plus twice SDPA's own error."""


@dataclass(frozen=True)
class Limits:
    """Numbers of pairs to keep and to try. A contender that takes more than `slow` times SDPA's time is timed `few` times."""

    repeats: int
    most: int
    slow: float = 2.0
    few: int = 3
    foreign: float = FOREIGN_LIMIT


@dataclass(frozen=True)
class Result:
    """One contender on one input. `status` is exact, wrong, failed or refused; `note` is the reason of the last three.

    `peak` is the maximum of the ranks' memory in bytes, `sent` the mean of the ranks' TCP payload, of one forward + backward.
    """

    name: str
    package: str
    version: str
    layout: str
    source: str
    stand_in: str
    status: str
    note: str = ""
    error: float | None = None
    peak: int | None = None
    sent: int | None = None
    ratio: Spread | None = None
    seconds: Spread | None = None
    dropped: int = 0

    @property
    def is_ours(self) -> bool:
        return self.package == OURS


@dataclass(frozen=True)
class Report:
    """The results of one input. `rival` is the fastest exact peer. `ideal_seconds` is causal SDPA's time, scaled by the share
    of visible pairs."""

    case: Case
    sdpa_seconds: Spread
    sdpa_peak: int
    results: list[Result]
    rival: str = ""
    ideal_seconds: float | None = None
    against_rival: dict[str, Spread] = field(default_factory=dict)


def measure(cases: list[Case], limits: Limits, only: str, folder: Path) -> list[Report]:
    """Measure all cases, called on each of the three processes."""
    trio = Trio(folder)
    try:
        return [_measure(case, limits, only, trio) for case in cases]
    finally:
        trio.close()


def _measure(case: Case, limits: Limits, only: str, trio: Trio) -> Report:
    ideal = trio.gather(_ideal_seconds(case, make_inputs(case)) if trio.is_baseline else None)[-1]
    report, runs = compare(case, contenders(case, only), limits, trio)
    duels = {}
    for result in report.results:
        if report.rival and result.is_ours and result.ratio:
            duels[result.name] = duel(result.name, report.rival, runs, limits, trio)
    return replace(report, ideal_seconds=ideal, against_rival=duels)


def sdpa_run(case: Case, inputs: list[Tensor]) -> Run:
    """Return forward and backward of SDPA over the unsharded row in one process."""
    return forward_backward(inputs, kernels.plain_attention(case))


def compare(
    case: Case, roster: list[Peer], limits: Limits, trio: Trio, baseline: Callable[[Case, list[Tensor]], Run] = sdpa_run
) -> tuple[Report, dict[str, Run | None]]:
    """Check each of `roster` against SDPA and time it in pairs with `baseline`. Returns the report, and the functions."""
    inputs = make_inputs(case)
    right = _right(case, inputs, trio)
    own = _own_error(sdpa_run(case, inputs)(), right) if trio.is_baseline else None
    allowed = TOLERANCE + 2 * trio.gather(own)[-1]
    sdpa = baseline(case, inputs) if trio.is_baseline else None
    sdpa_peak = trio.gather(_peak(sdpa) if sdpa else None)[-1]

    results: dict[str, Result] = {}
    runs: dict[str, Run | None] = {}
    for peer in roster:
        results[peer.name], runs[peer.name] = _check(peer, case, inputs, right, allowed, trio)
    del right
    sdpa_seconds = _pair_all(case, results, runs, sdpa, limits, trio)
    rival = fastest([result for result in results.values() if not result.is_ours])
    return Report(case, Spread.of(sdpa_seconds), sdpa_peak, list(results.values()), rival), runs


def fastest(results: list[Result]) -> str:
    """Return the name of the result with the lowest time / SDPA's; empty if no contender was timed."""
    timed = [(result.ratio.median, result.name) for result in results if result.ratio and result.ratio.repeats]
    return min(timed)[1] if timed else ""


def _check(
    peer: Peer, case: Case, inputs: list[Tensor], right: tuple[Tensor, ...], allowed: float, trio: Trio
) -> tuple[Result, Run | None]:
    """Check that the peer supports the input, runs and is correct; then measure memory and bytes."""
    _say(trio, f"{case}: {peer.name}")
    named = version(peer.package) if peer.package != OURS else ""
    result = Result(peer.name, peer.package, named, peer.layout, peer.source, peer.stand_in, "exact")
    reason = peer.refuses(case)
    if reason:
        return replace(result, status="refused", note=reason), None
    run, note, error = None, "", 0.0
    if not trio.is_baseline:
        try:
            layout = make_layout(peer.layout, case, RANKS)
            run = _rank_run(peer, case, layout, inputs, trio.rank)
            errors = _errors(run(), right, layout, trio.rank)
            error = max(errors.values())
            note = f"rank {trio.rank}: " + ", ".join(f"{name} {value:.1e}" for name, value in errors.items())
        except Exception as failure:
            run, note, error = None, f"{type(failure).__name__}: {str(failure).strip().splitlines()[0]}", float("inf")
    found = trio.gather((error, note, run is None))[:RANKS]
    if any(failed for _, _, failed in found):
        return replace(result, status="failed", note=next(note for _, note, failed in found if failed)), None
    error, note, _ = max(found)
    if error > allowed:
        return replace(result, status="wrong", note=f"{note}; {allowed:.1e} is allowed", error=error), None
    peak, sent = (None, None) if run is None else (_peak(run), _sent(run))
    ranks = trio.gather((peak, sent))[:RANKS]
    peak, sent = max(peak for peak, _ in ranks), sum(sent for _, sent in ranks) // RANKS
    return replace(result, error=error, peak=peak, sent=sent), run


def _right(case: Case, inputs: list[Tensor], trio: Trio) -> tuple[Tensor, ...]:
    """Return SDPA's output and gradients in fp32, broadcast by the SDPA process."""
    inputs = [x.float() for x in inputs]
    if trio.is_baseline:
        right = forward_backward(inputs, kernels.plain_attention(case))()
    else:
        right = tuple(torch.empty_like(inputs[index]) for index in (0, 0, 1, 2))
    return tuple(trio.from_baseline(x.contiguous()) for x in right)


def _own_error(result: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> float:
    whole = Layout.contiguous(right[0].shape[2], 1)
    return max(_errors(result, right, whole, 0).values())


def _rank_run(peer: Peer, case: Case, layout: Layout, inputs: list[Tensor], rank: int) -> Run:
    """Return forward and backward on this rank's shard, put into the peer's axes before any measurement."""
    attend = peer.build(case, dist.group.WORLD)
    axes = (*[peer.axes[0]] * 3, peer.axes[1])
    local = [_to_axes(shard(x, layout, rank, 2), name) for x, name in zip(inputs, axes, strict=True)]
    run = forward_backward(local, attend)
    swapped = (peer.axes[1], *[peer.axes[0]] * 3)
    return lambda: tuple(_from_axes(x, name) for x, name in zip(run(), swapped, strict=True))


def forward_backward(inputs: list[Tensor], attend: kernels.Local) -> Run:
    *qkv, dout = inputs

    def run() -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in qkv]
        out = attend(*leaves)
        out.backward(dout)
        return out.detach(), *(x.grad for x in leaves)

    return run


def _to_axes(x: Tensor, axes: str) -> Tensor:
    return x.contiguous() if axes == "bhtd" else x.transpose(1, 2).contiguous()


def _from_axes(x: Tensor, axes: str) -> Tensor:
    return x if axes == "bhtd" else x.transpose(1, 2)


def _errors(result: tuple[Tensor, ...], right: tuple[Tensor, ...], layout: Layout, rank: int) -> dict[str, float]:
    """Return the maximum difference from SDPA's result / the tensor's maximum; NaN becomes infinite."""
    errors = {}
    for name, ours, whole in zip(TENSORS, result, right, strict=True):
        expected = shard(whole, layout, rank, 2)
        assert ours.shape == expected.shape, f"{name} has shape {tuple(ours.shape)}, not {tuple(expected.shape)}"
        relative = float((ours - expected).abs().max() / whole.abs().max())
        errors[name] = float("inf") if relative != relative else relative
    return errors


def _peak(run: Run) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    return peak_bytes(profiler)


def _sent(run: Run) -> int:
    """Return the bytes sent by this rank's sockets. The barriers ensure that all bytes have arrived."""
    dist.barrier()
    before = tcp_bytes_sent()
    run()
    dist.barrier()
    return tcp_bytes_sent() - before


def _ideal_seconds(case: Case, inputs: list[Tensor]) -> float:
    causal = replace(case, kind="causal", window=None, lengths=(case.seq_len,))
    run = forward_backward(inputs, kernels.local_attention(causal))
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:]) * case.mask.area / causal.mask.area


def _pair_all(
    case: Case, results: dict[str, Result], runs: dict[str, Run | None], sdpa: Run | None, limits: Limits, trio: Trio
) -> list[float]:
    """Time rounds of pairs, with every exact contender in each, and fill in `results`. Returns the baseline's seconds."""
    kept: dict[str, list[tuple[float, float]]] = {name: [] for name, r in results.items() if r.status == "exact"}
    dropped = dict.fromkeys(kept, 0)
    for turn in range(limits.most):
        wanting = [name for name, pairs in kept.items() if len(pairs) < _enough(pairs, limits)]
        _say(trio, f"{case}: round {turn + 1}, {len(wanting)} contenders")
        for name in wanting:
            seconds, foreign = trio.pair((sdpa, runs[name]), turn % 2 == 1)
            if foreign > limits.foreign:
                dropped[name] += 1
            else:
                kept[name].append(seconds)
    for name, pairs in kept.items():
        results[name] = replace(
            results[name],
            ratio=Spread.of([seconds / base for base, seconds in pairs]),
            seconds=Spread.of([seconds for _, seconds in pairs]),
            dropped=dropped[name],
        )
    return [base for pairs in kept.values() for base, _ in pairs]


def _enough(pairs: list[tuple[float, float]], limits: Limits) -> int:
    slow = bool(pairs) and statistics.median(seconds / base for base, seconds in pairs) > limits.slow
    return min(limits.few, limits.repeats) if slow else limits.repeats


def duel(name: str, rival: str, runs: dict[str, Run | None], limits: Limits, trio: Trio) -> Spread:
    """Return the time of `name` / the rival's, from direct pairs: two ratios to SDPA would add SDPA's spread twice."""
    _say(trio, f"{name} against {rival}")
    ratios: list[float] = []
    for turn in range(limits.most):
        if len(ratios) < limits.repeats:
            (theirs, ours), foreign = trio.pair((runs[rival], runs[name]), turn % 2 == 1)
            if foreign <= limits.foreign:
                ratios.append(ours / theirs)
    return Spread.of(ratios)


def _say(trio: Trio, text: str) -> None:
    if trio.rank == 0:
        print(text, file=sys.stderr, flush=True)
