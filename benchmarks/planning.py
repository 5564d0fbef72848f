"""Time planning on one core: masks, layout and one rank's plan. Zigzag: medians; balanced: the minimum.

python -m benchmarks.planning
"""

import statistics
import time

import click
import numpy as np

from benchmarks.layouts import EQUAL, HALF_ROW, log_normal, packs
from longspan.plan import Layout, Mask, plan_attention

S = 1 << 20


@click.command(help=__doc__)
@click.option("--repeats", default=15, show_default=True)
def main(repeats: int) -> None:
    generator = np.random.default_rng(0)
    half = [*_documents(generator, 5000, S // 4), S // 2, *_documents(generator, 4999, S // 4)]
    cases = [
        ("1,000 documents, 64 ranks", 64, _documents(generator, 1000, S)),
        ("10,000 documents, 1,024 ranks", 1024, _documents(generator, 10000, S)),
        ("the same, one document half the row", 1024, half),
        ("one document, 1,024 ranks", 1024, [S]),
    ]
    for name, ranks, lengths in cases:
        rows = [
            statistics.median(_time(ranks, lengths, rank) for _ in range(repeats))
            for rank in (0, ranks // 2, ranks - 1)
        ]
        click.echo(f"S={S:,} zigzag, {name}: " + ", ".join(f"{1e3 * seconds:.1f} ms" for seconds in rows))
    many = [[log_normal(generator) for _ in range(2000)] for _ in range(4)]
    kinds = {
        "2,000 log-normal documents": many,
        "log-normal packs": packs(log_normal, 20),
        "half-row": [HALF_ROW],
        "equal": [EQUAL],
    }
    for name, rows in kinds.items():
        worst = max(planning_seconds(lengths, 64, repeats) for lengths in rows)
        tokens = f"S={max(map(sum, rows)):,}"
        click.echo(f"{tokens} balanced, exchange, {name}, 64 ranks: {1e3 * worst:.1f} ms, the slowest of {len(rows)}")


def planning_seconds(lengths: list[int], ranks: int, repeats: int) -> float:
    """Return the minimum CPU seconds of `repeats` plannings: mask, balanced layout and the first rank's `exchange` plan."""
    return min(_process_time(lengths, ranks) for _ in range(repeats))


def _process_time(lengths: list[int], ranks: int) -> float:
    began = time.process_time()
    mask = Mask.documents(lengths)
    plan_attention(Layout.balanced(mask, ranks), mask, "exchange").rank_plan(0)
    return time.process_time() - began


def _time(ranks: int, lengths: list[int], rank: int) -> float:
    began = time.perf_counter()
    plan_attention(Layout.zigzag(S, ranks), Mask.documents(lengths)).rank_plan(rank)
    return time.perf_counter() - began


def _documents(generator: np.random.Generator, count: int, tokens: int) -> list[int]:
    cuts = np.sort(generator.choice(tokens - 1, count - 1, replace=False)) + 1
    return np.diff([0, *cuts, tokens]).tolist()


if __name__ == "__main__":
    main()
