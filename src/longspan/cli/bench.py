"""`longspan bench`: `calibrate` measures the costs of compute and communication on this cluster."""

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from longspan.advise import Costs
from longspan.bench.calibrate import calibrate as run_calibration
from longspan.cli.exits import friendly
from longspan.cli.options import check_folder, spinner
from longspan.train.model import TORCH_DTYPES


@click.group()
def bench() -> None:
    """Measure longspan on this machine or cluster."""


@bench.command()
@click.option(
    "--ranks",
    type=click.IntRange(min=2),
    default=2,
    show_default=True,
    help="Ranks to start on this machine. Ignored under torchrun.",
)
@click.option(
    "--head-dim", type=click.IntRange(min=1), default=64, show_default=True, help="Head dimension of the tiles."
)
@click.option(
    "--dtype", type=click.Choice(list(TORCH_DTYPES)), default="fp32", show_default=True, help="Dtype of the tiles."
)
@click.option(
    "--mebibytes", type=click.IntRange(min=1), default=16, show_default=True, help="Size of a large message, in MiB."
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Device of the ranks. On CUDA every rank needs its own device.",
)
@click.option(
    "--output", type=click.Path(path_type=Path), default=Path("costs.json"), show_default=True, help="File to write."
)
@click.option("--json", "as_json", is_flag=True, help="Print the costs as JSON.")
@friendly
def calibrate(ranks: int, head_dim: int, dtype: str, mebibytes: int, device: str, output: Path, as_json: bool) -> None:
    """Measure messages and all-to-all between ranks, and attention tiles on a rank, for route "auto".

    \b
        longspan bench calibrate --ranks 4 --output costs.json
        longspan train run.toml --set parallel.route=auto --set parallel.costs=costs.json
        longspan plan --seq-len 8k --cp 4 --heads 8/2 --route auto --costs costs.json
    """
    check_folder(output)
    with spinner(as_json) as show:
        show("measuring")
        costs = run_calibration(ranks, head_dim, TORCH_DTYPES[dtype], mebibytes, device)
    if costs is None:
        return
    costs.save(output)
    if as_json:
        click.echo(costs.model_dump_json())
        return
    console = Console(highlight=False)
    console.print(_table(costs))
    console.print(f"written to {output}")


def _table(costs: Costs) -> Table:
    table = Table(title=costs.source, title_justify="left", box=None, show_header=False)
    for name in ("message", "all_to_all"):
        latency, bandwidth = getattr(costs, f"{name}_latency"), getattr(costs, f"{name}_bandwidth")
        table.add_row(name.replace("_", "-"), f"{bandwidth / 1e9:.3g} GB/s", f"{latency * 1e6:.0f} us")
    table.add_row("between nodes", f"{costs.node_bandwidth / 1e9:.3g} GB/s", "")
    for rows, speed in costs.tile_speed:
        table.add_row(f"tile of {rows:,} rows", f"{speed / 1e9:.3g} GFLOP/s", "")
    table.add_row("a tile's call", "", f"{costs.tile_overhead * 1e6:.0f} us")
    return table
