"""Check and time longspan on a new GPU, in four stages of under three minutes each.

    python -m benchmarks.device [--stage 1 ...] [--device cuda|cpu] [--kernel flex ...] [--output runs/device]

1  each kernel on each kind of tile, in each dtype, against fp64
2  a training step, and attention by length, on one rank against plain SDPA: time, memory, TFLOP/s
3  two or more ranks, every route: results, bytes, time in kernels and in waiting
4  compiled code, CUDA graphs, the profiler's trace of a step

Prints one line per check to stdout, progress to stderr. `device.json` and `device.html` in the output folder keep earlier rows
that are not checked again. The error of a result may be twice that of plain PyTorch in the same dtype; no figure is given for
a result above this limit. The exit status is 1 if a check fails, a check was not reached in time, or no check holds.
"""

import sys
import time
from collections import Counter
from pathlib import Path

import click
import torch

from benchmarks.device.page import write_page
from benchmarks.device.record import Record, environment
from benchmarks.device.rows import Options
from benchmarks.device.stage import STAGES, rows_of
from longspan.kernels.choice import KERNELS


@click.command(help=__doc__)
@click.option(
    "--stage", "stages", type=click.Choice([str(n) for n in STAGES]), multiple=True, help="Run only these stages."
)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option(
    "--kernel",
    "kernels",
    type=click.Choice(list(KERNELS)),
    multiple=True,
    help="In stages 1 and 2, run only these kernels.",
)
@click.option("--quick", is_flag=True, help="Small sizes, to test that all stages run; times are meaningless.")
@click.option(
    "--output", type=click.Path(path_type=Path, file_okay=False), default=Path("runs/device"), show_default=True
)
def main(stages: tuple[str, ...], device: str, kernels: tuple[str, ...], quick: bool, output: Path) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise click.ClickException("there is no GPU here\n\nhint: --device cpu runs the same checks on the CPU")
    output.mkdir(parents=True, exist_ok=True)
    record = Record.of(output / "device.json", environment(device, quick))
    options = Options(device, quick, kernels, str(output.resolve()))
    found = []
    for stage in [int(number) for number in stages] or list(STAGES):
        _progress(f"stage {stage}: {STAGES[stage][0]}")
        began, rows = time.monotonic(), []
        for row in rows_of(stage, options):
            rows.append(row)
            click.echo(row)
        _progress(f"stage {stage}: {time.monotonic() - began:.0f} s")
        record = record.with_stage(stage, rows, time.monotonic() - began)
        record.write(output / "device.json")
        write_page(record, output / "device.html")
        found += rows
    counts = Counter(row.status for row in found)
    late = f", {counts['late']} not reached: run their stage again with --kernel" if counts["late"] else ""
    click.echo(
        f"{counts['holds']} checks hold, {counts['fails']} fail, {counts['absent']} absent{late}: {output}/device.html"
    )
    sys.exit(bool(counts["fails"] or counts["late"]) or not counts["holds"])


def _progress(text: str) -> None:
    click.echo(text, err=True)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.device")
