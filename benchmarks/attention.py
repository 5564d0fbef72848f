"""Attention at cp=2, one thread a rank, beside `scaled_dot_product_attention` in one process with two threads.

    python -m benchmarks.attention [--repeats 9] [--only bfloat16] [--json out.json]

Three processes in one world: two ranks of the CP group and one for SDPA; who is not measured sleeps in a barrier. Repeats
alternate which of the two goes first. The outputs and gradients are compared before anything is timed.
"""

import os
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import click
import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.harness import FOREIGN_LIMIT, Spread, Usage, foreign_share, save
from longspan import Layout, Mask, attention, plan_attention, record, shard
from longspan.comm.launch import launch

BASELINE = 2
"""The rank that runs SDPA; ranks 0 and 1 are the CP group."""


@dataclass(frozen=True)
class Case:
    dtype: str
    heads: int
    kv_heads: int
    seq_len: int = 8192
    head_dim: int = 64

    def __str__(self) -> str:
        return f"B1 H{self.heads}/{self.kv_heads} S{self.seq_len} D{self.head_dim} causal {self.dtype}"


CASES = [Case(dtype, 8, kv) for dtype in ("float32", "bfloat16") for kv in (8, 2)]


@click.command(help=__doc__)
@click.option("--repeats", default=9, show_default=True, help="Repeats to keep per case.")
@click.option("--most", default=25, show_default=True, help="Repeats to try at most.")
@click.option("--only", default="", help="Cases whose name holds this.")
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(repeats: int, most: int, only: str, output: Path | None) -> None:
    results = launch(measure, ([case for case in CASES if only in str(case)], repeats, most), 3)
    for result in results:
        click.echo(f"{result['case']}: longspan / SDPA {result['ratio']}, dropped {result['dropped']} repeats")
        click.echo(f"  SDPA {result['sdpa_seconds']} s, longspan {result['longspan_seconds']} s; {result['parts']}")
    save(output, results)


def measure(cases: list[Case], repeats: int, most: int) -> list[dict]:
    """All cases; the same list on every rank."""
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    group = dist.new_group([0, 1])
    try:
        return [_measure(case, group, repeats, most) for case in cases]
    finally:
        dist.destroy_process_group()


def _measure(case: Case, group: dist.ProcessGroup, repeats: int, most: int) -> dict:
    run = _sdpa(case) if dist.get_rank() == BASELINE else _longspan(case, group)
    _compare(run())
    kept, dropped = [], 0
    while len(kept) < repeats and len(kept) + dropped < most:
        dist.barrier()
        before, began = Usage.now(), time.perf_counter()
        seconds, parts = [], ""
        first_is_baseline = (len(kept) + dropped) % 2 == 0
        for baseline_turn in (first_is_baseline, not first_is_baseline):
            dist.barrier()
            if baseline_turn == (dist.get_rank() == BASELINE):
                if not baseline_turn:
                    dist.barrier(group)
                start = time.perf_counter()
                _, parts = run()
                seconds.append(time.perf_counter() - start)
            dist.barrier()
        times = [torch.zeros(1, dtype=torch.float64) for _ in range(3)]
        dist.all_gather(times, torch.tensor(seconds, dtype=torch.float64))
        if foreign_share(before, time.perf_counter() - began) > FOREIGN_LIMIT:
            dropped += 1
        else:
            kept.append((float(times[BASELINE]), max(float(times[0]), float(times[1])), parts))
    return {
        "case": str(case),
        "ratio": Spread.of([ours / sdpa for sdpa, ours, _ in kept]),
        "sdpa_seconds": Spread.of([sdpa for sdpa, _, _ in kept]),
        "longspan_seconds": Spread.of([ours for _, ours, _ in kept]),
        "dropped": dropped,
        "parts": kept[-1][2] if kept else "",
    }


def _inputs(case: Case) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [
        (1, heads, case.seq_len, case.head_dim) for heads in (case.heads, case.kv_heads, case.kv_heads, case.heads)
    ]
    return [torch.randn(shape).to(getattr(torch, case.dtype)) for shape in shapes]


def _sdpa(case: Case):
    torch.set_num_threads(os.cpu_count() or 1)
    q, k, v, dout = _inputs(case)

    def run():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=case.heads != case.kv_heads)
        out.backward(dout)
        return (out.detach(), *(x.grad for x in leaves)), ""

    return run


def _longspan(case: Case, group: dist.ProcessGroup):
    torch.set_num_threads(1)
    layout = Layout.zigzag(case.seq_len, 2)
    plan = plan_attention(layout, Mask.causal(case.seq_len), heads=(case.heads, case.kv_heads))
    q, k, v, dout = (shard(x, layout, dist.get_rank(), 2) for x in _inputs(case))

    def run():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with record() as calls:
            out = attention(*leaves, plan=plan, group=group)
            out.backward(dout)
        parts = ", ".join(
            f"{name} {sum(getattr(call, f'seconds_{name}') for call in calls):.3f}"
            for name in ("kernels", "waiting", "merging")
        )
        return (out.detach(), *(x.grad for x in leaves)), f"rank {dist.get_rank()}: {parts} s"

    return run


def _compare(result: tuple) -> None:
    """No figure without a right answer: the ranks' outputs and gradients against SDPA's own."""
    ours: list = [None] * 3
    tensors = [x.float() for x in result[0]]
    dist.all_gather_object(ours, tensors)
    seq_len = ours[BASELINE][0].shape[2]
    layout = Layout.zigzag(seq_len, 2)
    for index, right in enumerate(ours[BASELINE]):
        for rank in (0, 1):
            difference = (ours[rank][index] - shard(right, layout, rank, 2)).abs().max()
            assert difference <= 0.02 * right.abs().max(), f"tensor {index} of rank {rank} is off by {difference}"


if __name__ == "__main__":
    main()
