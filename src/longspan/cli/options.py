"""Options and progress displays shared by commands."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from longspan.errors import SpecError

F = TypeVar("F", bound=Callable[..., Any])


def config_options(function: F) -> F:
    """Add the CONFIG argument (a TOML file) and the --set option to a command."""
    function = click.option(
        "--set", "overrides", multiple=True, metavar="a.b=value", help="Override a value of CONFIG; repeatable."
    )(function)
    return click.argument("config", type=click.Path(path_type=Path))(function)


def check_folder(output: Path) -> None:
    """Raise `SpecError` if the folder of an output file does not exist. Called before the work starts."""
    if not output.parent.is_dir():
        raise SpecError(
            f"{output} cannot be written: folder {output.parent} does not exist",
            hint="create this folder, or choose another path",
        )


@contextmanager
def spinner(quiet: bool) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the current task on stderr: a spinner on a terminal, else one line per task."""
    console = Console(stderr=True, highlight=False)
    if quiet or not console.is_interactive:
        yield (lambda text: None) if quiet else console.print
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda text: bar.update(task, description=text)


@contextmanager
def corpus_progress(quiet: bool) -> Iterator[Callable[[int], None]]:
    """Yield a function that shows the number of tokenised documents on stderr, if it is a terminal."""
    console = Console(stderr=True)
    if quiet or not console.is_interactive:
        yield lambda documents: None
        return
    bar = Progress(SpinnerColumn(), TextColumn("{task.description}"), console=console, transient=True)
    task = bar.add_task("", total=None)
    started = False

    def show(documents: int) -> None:
        nonlocal started
        if not started:
            bar.start()
            started = True
        bar.update(task, description=f"tokenising: {documents:,} documents")

    try:
        yield show
    finally:
        bar.stop()
