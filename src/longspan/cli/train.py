"""`longspan train`: train as configured by a TOML file, on ranks that it starts or in the world of torchrun."""

from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from longspan.cli.exits import friendly
from longspan.cli.options import config_options, corpus_progress
from longspan.comm.launch import telling_others
from longspan.errors import SpecError
from longspan.train.memory.start_table import is_first, start_table
from longspan.train.monitor import json_line, speed_words
from longspan.train.run import Summary, check_ranks, prepare, reckon
from longspan.train.run import train as run_training
from longspan.train.train_config import load_config


@click.command()
@config_options
@click.option("--quiet", is_flag=True, help="Print no start table and no progress bar.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@click.option(
    "--dry-run", is_flag=True, help="Print axes, work and expected memory per rank, without starting the run."
)
@friendly
def train(config: Path, overrides: tuple[str, ...], quiet: bool, as_json: bool, dry_run: bool) -> None:
    """Train a decoder as configured by CONFIG, a TOML file.

    Starts dp x tp x pp x cp ranks on this machine, or joins the world of torchrun:

    \b
        longspan train run.toml --set parallel.cp=4
        torchrun --nnodes 2 --nproc-per-node 8 ... -m longspan.cli.main train run.toml
    """
    loaded = load_config(config, overrides)
    with telling_others():
        if not dry_run:
            check_ranks(loaded)
        with corpus_progress(quiet) as progress:
            store = prepare(loaded, progress)
    if dry_run:
        try:
            check_ranks(loaded)
        except SpecError as error:
            click.echo(f"warning: this machine cannot start the run: {error}", err=True)
        start = reckon(loaded, store)
        if as_json:
            click.echo(json_line(start.record()))
        else:
            Console(highlight=False).print(start_table(start))
        return
    if is_first() and not (quiet or as_json):
        Console(stderr=True, highlight=False).print(start_table(reckon(loaded, store)))
    summary = run_training(loaded, quiet=quiet, prepared=True)
    if summary is None:
        return
    if as_json:
        click.echo(json_line(asdict(summary)))
    else:
        Console(highlight=False).print(_table(summary))


def _table(summary: Summary) -> Table:
    table = Table(show_header=False, box=None)
    table.add_row("steps", f"{summary.steps}, {summary.tokens:,} tokens on {_ranks(summary)}")
    table.add_row("speed", speed_words(summary))
    if summary.mfu is not None:
        full = f"{summary.tflops_full:,.0f} with full S x S attention"
        table.add_row("work", f"{summary.tflops:,.0f} TFLOP/s a device; {full}")
    if summary.ranks > 1:
        pairs, seconds = summary.pairs_imbalance, summary.time_imbalance
        table.add_row("busiest rank", f"{pairs:.2f} x mean pairs, {seconds:.2f} x mean time in attention")
    table.add_row("last training loss", f"{summary.loss:.4f} nats per token")
    if summary.heldout_loss is not None:
        gain = summary.unigram_entropy - summary.heldout_loss
        table.add_row("held-out loss", f"{summary.heldout_loss:.4f} nats per token")
        table.add_row(
            "unigram entropy", f"{summary.unigram_entropy:.4f} nats per token of the corpus: {gain:+.4f} gained"
        )
    table.add_row("written to", summary.run_dir)
    return table


def _ranks(summary: Summary) -> str:
    axes = f": {summary.axes}" if summary.axes else ""
    return f"{summary.ranks} rank{'s' * (summary.ranks != 1)}{axes}"
