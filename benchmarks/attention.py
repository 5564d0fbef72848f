"""Time every route at cp=2 (one thread per rank) against `scaled_dot_product_attention` in one process (two threads).

    python -m benchmarks.attention [--repeats 9] [--only "window float32"] [--route ring] [--json out.json]

    causal    time / SDPA's time
    window    time / the time of the window's visible pairs at the speed of causal SDPA
    layer     with projections, "upipe" with 2 of 16 heads per upipe stage: time / the plain layer's time, and peak memory
              (without inputs, weights and output) / that of route "ulysses"

Three processes share one world: two ranks of the CP group and one for SDPA. Idle processes sleep in a barrier. Each repeat runs
SDPA and every route, in rotating order. Results are checked before timing.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import click
import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.harness import FOREIGN_LIMIT, Spread, Usage, foreign_share, freed_here, peak_bytes, save
from longspan import Layout, Mask, Plan, UpipeAttention, attention, plan_attention, record, shard
from longspan.comm.launch import launch

BASELINE = 2
"""Rank of the SDPA process; ranks 0 and 1 are the CP group."""
ROUTES = ("ring", "rotate", "allgather", "exchange", "ulysses", "usp")
LAYER_ROUTES = ("ulysses", "upipe")
HEADS_PER_STAGE = 2


@dataclass(frozen=True)
class Case:
    kind: str
    dtype: str
    heads: int
    kv_heads: int
    window: int | None = None
    seq_len: int = 8192
    head_dim: int = 64

    def __str__(self) -> str:
        window = f" window {self.window}" if self.window else ""
        return f"{self.kind} {self.dtype} H{self.heads}/{self.kv_heads} S{self.seq_len} D{self.head_dim}{window}"

    @property
    def mask(self) -> Mask:
        return Mask.causal(self.seq_len, window=self.window)

    @property
    def routes(self) -> tuple[str, ...]:
        return LAYER_ROUTES if self.kind == "layer" else ROUTES

    def plan(self, route: str) -> Plan:
        layout = Layout.zigzag(self.seq_len, 2) if self.window is None else Layout.balanced(self.mask, 2)
        inner = 2 if route == "usp" else None
        return plan_attention(layout, self.mask, route, (self.heads, self.kv_heads), inner)


CASES = [
    *(Case("causal", dtype, 8, kv) for dtype in ("float32", "bfloat16") for kv in (8, 2)),
    *(Case("window", dtype, 8, 8, window=1024) for dtype in ("float32", "bfloat16")),
    Case("layer", "float32", 16, 16),
]
Run = Callable[[], tuple[torch.Tensor, ...]]


@click.command(help=__doc__)
@click.option("--repeats", default=9, show_default=True, help="Repeats to keep per case.")
@click.option("--most", default=25, show_default=True, help="Repeats to try at most.")
@click.option("--only", default="", help="Measure cases whose names contain all these words.")
@click.option("--route", "routes", multiple=True, help="Routes; repeatable. Default: all.")
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(repeats: int, most: int, only: str, routes: tuple[str, ...], output: Path | None) -> None:
    cases = [case for case in CASES if all(word in str(case) for word in only.split())]
    save(output, launch(measure, (cases, routes, repeats, most), 3))


def _show(result: dict) -> None:
    click.echo(f"{result['case']}: SDPA {result['sdpa_seconds']} s, dropped {result['dropped']} repeats")
    for route, found in result["routes"].items():
        parts = ", ".join(f"{name} {value:.3f}" for name, value in found["parts"].items())
        click.echo(f"  {route:10} {found['ratio']}   {found['seconds'].median:.3f} s; rank 0: {parts}")


def measure(cases: list[Case], routes: Sequence[str], repeats: int, most: int) -> list[dict]:
    """Measure all cases. Returns the same list on every rank."""
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    group = dist.new_group([0, 1])
    try:
        return [
            _measure(case, [r for r in case.routes if not routes or r in routes], group, repeats, most)
            for case in cases
        ]
    finally:
        dist.destroy_process_group()


def _measure(case: Case, routes: Sequence[str], group: dist.ProcessGroup, repeats: int, most: int) -> dict:
    baseline = dist.get_rank() == BASELINE
    torch.set_num_threads((os.cpu_count() or 1) if baseline else 1)
    runs: dict[str, Run] = {"sdpa": _sdpa(case) if baseline else lambda: ()}
    for route in routes:
        runs[route] = (lambda: ()) if baseline else _longspan(case, route, group)
    right = _everyone(_wide(_sdpa(case, exact=True)() if baseline else ()))[BASELINE]
    for route in routes:
        _compare(case.plan(route), _everyone(_wide(runs[route]())), right)
    parts = {route: _parts(run) for route, run in runs.items() if route != "sdpa"}
    peaks = {route: max(_everyone(_peak(run))[:2]) for route, run in runs.items() if case.kind == "layer"}
    kept: list[dict[str, float]] = []
    dropped = 0
    order = list(runs)
    while len(kept) < repeats and len(kept) + dropped < most:
        order = order[1:] + order[:1]
        before, began = Usage.now(), time.perf_counter()
        seconds = {}
        for name in order:
            dist.barrier()
            start = time.perf_counter()
            if (name == "sdpa") == baseline:
                runs[name]()
            seconds[name] = time.perf_counter() - start
            dist.barrier()
        times = _everyone(seconds)
        if foreign_share(before, time.perf_counter() - began) > FOREIGN_LIMIT:
            dropped += 1
        else:
            kept.append({n: times[BASELINE][n] if n == "sdpa" else max(times[0][n], times[1][n]) for n in order})
    share = case.mask.area / Mask.causal(case.seq_len).area
    found = {}
    for route in routes:
        ratio = Spread.of([repeat[route] / (repeat["sdpa"] * share) for repeat in kept])
        found[route] = {"ratio": ratio, "seconds": Spread.of([repeat[route] for repeat in kept]), "parts": parts[route]}
        if peaks:
            found[route]["parts"]["peak MiB"] = peaks[route] / 2**20
            found[route]["parts"]["peak / ulysses"] = peaks[route] / peaks.get("ulysses", float("nan"))
    sdpa = Spread.of([repeat["sdpa"] for repeat in kept])
    result = {"case": str(case), "sdpa_seconds": sdpa, "routes": found, "dropped": dropped}
    if dist.get_rank() == 0:
        _show(result)
    return result


def _inputs(case: Case) -> list[torch.Tensor]:
    """Return q, k, v and the gradient of out; for a layer, x, its weights and the gradient of y."""
    torch.manual_seed(0)
    hidden_size, kv = case.heads * case.head_dim, case.kv_heads * case.head_dim
    if case.kind == "layer":
        shapes = [
            (1, case.seq_len, hidden_size),
            (hidden_size, hidden_size),
            (kv, hidden_size),
            (kv, hidden_size),
            (hidden_size, hidden_size),
            (1, case.seq_len, hidden_size),
        ]
        return [torch.randn(shape) / (1 if len(shape) == 3 else hidden_size**0.5) for shape in shapes]
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    return [torch.randn(1, n, case.seq_len, case.head_dim).to(getattr(torch, case.dtype)) for n in heads]


def _with_gradients(tensors: Sequence[torch.Tensor], forward: Callable[..., torch.Tensor]) -> Run:
    *inputs, dout = tensors

    def run() -> tuple[torch.Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = forward(*leaves)
        out.backward(dout)
        return (out.detach(), *(x.grad for x in leaves))

    return run


def _sdpa(case: Case, exact: bool = False) -> Run:
    """Return causal SDPA, which is also the baseline of a window. `exact`: with the window's dense mask, to check results."""
    gqa = case.heads != case.kv_heads
    mask = torch.from_numpy(case.mask.dense()) if exact and case.window else None

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=gqa)

    return _with_gradients(_inputs(case), plain if case.kind != "layer" else _layer(case, plain))


def _layer(case: Case, attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def forward(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        q, k, v = (F.linear(x, w).unflatten(-1, (-1, case.head_dim)).transpose(1, 2) for w in weights[:3])
        return F.linear(attend(q, k, v).transpose(1, 2).flatten(2), weights[3])

    return forward


def _longspan(case: Case, route: str, group: dist.ProcessGroup) -> Run:
    plan, rank, tensors = case.plan(route), dist.get_rank(), _inputs(case)
    if case.kind != "layer":
        local = [shard(x, plan.layout, rank, 2) for x in tensors]
        return _with_gradients(local, lambda q, k, v: attention(q, k, v, plan=plan, group=group))
    x, *weights, dy = tensors
    local = [shard(x, plan.layout, rank, 1), *weights, shard(dy, plan.layout, rank, 1)]
    if route != "upipe":
        return _with_gradients(local, _layer(case, lambda q, k, v: attention(q, k, v, plan=plan, group=group)))
    module = UpipeAttention(case.heads * case.head_dim, case.heads, case.kv_heads, HEADS_PER_STAGE)
    names = [f"{name}_proj.weight" for name in "qkvo"]

    def forward(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module, dict(zip(names, weights, strict=True)), (x, plan, group))

    return _with_gradients(local, forward)


def _compare(plan: Plan, results: list[list[torch.Tensor]], right: list[torch.Tensor]) -> None:
    """Assert that results match `right`. Gradients of weights are summed over ranks; all other tensors are shards."""
    for index, want in enumerate(right):
        parts = [results[rank][index] for rank in (0, 1)]
        if want.ndim == 2:
            pairs = [(parts[0] + parts[1], want)]
        else:
            pairs = [(part, shard(want, plan.layout, rank, want.ndim - 2)) for rank, part in enumerate(parts)]
        for got, local in pairs:
            off = float((got - local).abs().max() / want.abs().max())
            assert off <= 0.03, f"{plan.route}: tensor {index} is off by {off}"


def _wide(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [x.float() for x in tensors]


def _everyone(value: object) -> list:
    values: list = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _parts(run: Run) -> dict[str, float]:
    """Return the seconds that rank 0 spends in kernels, waiting and merging."""
    with record() as calls:
        run()
    names = ("kernels", "waiting", "merging")
    return _everyone({name: sum(getattr(call, f"seconds_{name}") for call in calls) for name in names})[0]


def _peak(run: Run) -> int:
    """Return the peak bytes of a call, without the bytes of the call's results."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with freed_here(), torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        results = run()
    return peak_bytes(profiler) - sum(x.nbytes for x in results)


if __name__ == "__main__":
    main()
