"""Time whole training steps of the demo: tokens per second at cp=2 (one thread per rank) against cp=1 (two threads).

    python -m benchmarks.step [--pairs 5] [--steps 8]

Each figure is a separate run of `longspan train` without its first step. Runs of cp=1 and cp=2 alternate.
"""

import tempfile
from pathlib import Path

import click

from benchmarks.harness import Spread, save
from longspan.train.run import train
from longspan.train.train_config import load_config

DEMO = Path(__file__).parent.parent / "examples" / "demo.toml"


@click.command(help=__doc__)
@click.option("--pairs", default=5, show_default=True)
@click.option("--steps", default=8, show_default=True)
@click.option("--config", default=DEMO, type=click.Path(path_type=Path))
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(pairs: int, steps: int, config: Path, output: Path | None) -> None:
    speeds: dict[int, list[float]] = {1: [], 2: []}
    for pair in range(pairs):
        for cp in (1, 2) if pair % 2 == 0 else (2, 1):
            speeds[cp].append(_speed(config, cp, steps))
    ratio = Spread.of([two / one for one, two in zip(speeds[1], speeds[2], strict=True)])
    click.echo(f"cp=1 {Spread.of(speeds[1])} tokens/s, cp=2 {Spread.of(speeds[2])} tokens/s, cp=2 / cp=1 {ratio}")
    save(output, {"tokens_per_second": speeds, "ratio": ratio})


def _speed(config: Path, cp: int, steps: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        overrides = [f"parallel.cp={cp}", f"parallel.threads={2 // cp}", f"steps={steps}", "eval_every=none"]
        summary = train(load_config(config, [*overrides, f"run_dir={folder}"]), quiet=True)
    assert summary is not None
    return summary.tokens_per_second


if __name__ == "__main__":
    main()
