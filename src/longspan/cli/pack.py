"""`longspan pack`: write the packed rows of a run to a Parquet manifest, with the work of every rank. No torch."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from longspan.cli.exits import friendly
from longspan.cli.options import check_folder, config_options, corpus_progress
from longspan.errors import SpecError
from longspan.report import packs_table
from longspan.train.pack_run import pack_run
from longspan.train.train_config import PackConfig, read_values


@click.command()
@config_options
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    metavar="FILE",
    help="Manifest to write.",
)
@click.option("--epochs", type=click.IntRange(min=1), default=1, show_default=True, help="Number of epochs to pack.")
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
@click.option("--quiet", is_flag=True, help="No progress bar.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@friendly
def pack(
    config: Path, overrides: tuple[str, ...], output: Path, epochs: int, force: bool, quiet: bool, as_json: bool
) -> None:
    """Pack the rows that a run of CONFIG, a TOML file of longspan train, would read, and count the work of each rank.

    Reads section [data] for the rows, and [parallel] and the optional [model] for the counts:

    \b
        longspan pack run.toml --output rows.parquet
        longspan show --manifest rows.parquet --output rows.png
        longspan train run.toml --set data.manifest=rows.parquet
    """
    if output.exists() and not force:
        raise SpecError(f"{output} exists", hint="choose another path, or use --force to overwrite the file")
    check_folder(output)
    run = PackConfig.model_validate(read_values(config, overrides))
    with corpus_progress(quiet) as tokenised, _pack_progress(quiet) as packed:
        report = pack_run(run, output, epochs=epochs, tokenised=tokenised, packed=packed)
    if as_json:
        click.echo(json.dumps({**report.summary(), "manifest": str(output)}, allow_nan=False))
        return
    table = packs_table(report)
    table.add_row("written to", str(output))
    Console(highlight=False).print(table)


@contextmanager
def _pack_progress(quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that shows the number of packed rows on stderr, if it is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("packing: rows"), MofNCompleteColumn(), BarColumn(30), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True, disable=quiet or not console.is_interactive)
    task = bar.add_task("", total=None)

    def show(rows: int, about: int) -> None:
        bar.start()
        bar.update(task, completed=rows, total=about)

    try:
        yield show
    finally:
        bar.stop()
