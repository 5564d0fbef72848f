"""Measure the overhead of a tile: many short documents through the executor, and through the operator alone, in one process.

    python -m benchmarks.tiles [--documents 1000] [--tokens 64]

On a CPU, one kernel call takes all documents of equal length; documents of different lengths take one call each. On CUDA, one
varlen call takes all documents. Figures are CPU seconds of one thread per document, the minimum of the repeats.
"""

import random
import time
from collections.abc import Callable
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.harness import save
from longspan import Layout, Mask, attention, plan_attention

HEADS, DIM = 4, 32


@click.command(help=__doc__)
@click.option("--documents", default=1000, show_default=True)
@click.option(
    "--tokens", default=64, show_default=True, help="Mean length of a document; lengths differ by up to an eighth."
)
@click.option("--repeats", default=7, show_default=True)
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(documents: int, tokens: int, repeats: int, output: Path | None) -> None:
    torch.set_num_threads(1)
    draw = random.Random(0)
    uneven = [tokens + draw.randint(-tokens // 8, tokens // 8) for _ in range(documents)]
    rows = {
        "operator alone, one call each": _alone(uneven, repeats),
        "documents of different lengths": _executor(uneven, repeats),
        "documents of one length": _executor([tokens] * documents, repeats),
    }
    table = Table("microseconds a document", "forward", "backward", box=None)
    for name, seconds in rows.items():
        table.add_row(name, *(f"{1e6 * each / documents:.1f}" for each in seconds))
    Console().print(table)
    save(output, {"documents": documents, "tokens": tokens, "seconds": rows})


def _executor(lengths: list[int], repeats: int) -> tuple[float, float]:
    plan = plan_attention(Layout.contiguous(sum(lengths), 1), Mask.documents(lengths))
    q, k, v, dout = (torch.randn(1, HEADS, sum(lengths), DIM) for _ in range(4))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = attention(*inputs, plan=plan)
    forward = _least(lambda: attention(*inputs, plan=plan), repeats)
    return forward, _least(lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True), repeats)


def _alone(lengths: list[int], repeats: int) -> tuple[float, float]:
    q, k, v, dout = (torch.randn(1, HEADS, sum(lengths), DIM).split(lengths, dim=2) for _ in range(4))
    aten = torch.ops.aten
    parts = list(zip(q, k, v, strict=True))
    results = [aten._scaled_dot_product_flash_attention_for_cpu(*part, 0.0, True) for part in parts]

    def backward() -> None:
        for part, grad, (out, lse) in zip(parts, dout, results, strict=True):
            aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, *part, out, lse, 0.0, True)

    def forward() -> None:
        for part in parts:
            aten._scaled_dot_product_flash_attention_for_cpu(*part, 0.0, True)

    return _least(forward, repeats), _least(backward, repeats)


def _least(work: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        seconds.append(time.process_time() - began)
    return min(seconds)


if __name__ == "__main__":
    main()
