"""What the commands that read a configuration share: its options, and progress while the corpus is tokenised."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

F = TypeVar("F", bound=Callable[..., Any])


def config_options(function: F) -> F:
    """The TOML file and its overrides."""
    function = click.option(
        "--set", "overrides", multiple=True, metavar="a.b=value", help="Override a value of the file; repeatable."
    )(function)
    return click.argument("config", type=click.Path(exists=True, dir_okay=False, path_type=Path))(function)


@contextmanager
def spinner(quiet: bool) -> Iterator[Callable[[str], None]]:
    """Tell on stderr what is being done; gone when the block ends."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as bar:
        task = bar.add_task("", total=None)
        yield lambda text: bar.update(task, description=text)


@contextmanager
def corpus_progress(quiet: bool) -> Iterator[Callable[[int], None]]:
    """Tell on stderr how many documents have been tokenised, once there is one."""
    bar = Progress(SpinnerColumn(), TextColumn("{task.description}"), console=Console(stderr=True), transient=True)
    task = bar.add_task("", total=None)
    started = False

    def tell(documents: int) -> None:
        nonlocal started
        if not (started or quiet):
            bar.start()
            started = True
        bar.update(task, description=f"tokenising: {documents:,} documents")

    try:
        yield tell
    finally:
        bar.stop()
