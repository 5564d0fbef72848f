"""What the commands that read a configuration share: its options, and progress while the corpus is tokenised."""

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
    """The TOML file and its overrides."""
    function = click.option(
        "--set", "overrides", multiple=True, metavar="a.b=value", help="Override a value of the file; repeatable."
    )(function)
    return click.argument("config", type=click.Path(path_type=Path))(function)


def check_folder(output: Path) -> None:
    """Refuse a file whose folder does not exist, before the work that is to be written there."""
    if not output.parent.is_dir():
        raise SpecError(
            f"{output} cannot be written: there is no folder {output.parent}", hint="make it, or name another"
        )


@contextmanager
def spinner(quiet: bool) -> Iterator[Callable[[str], None]]:
    """Tell on stderr what is being done: on a terminal gone when the block ends, in a log a line each."""
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
    """Tell on stderr, if that is a terminal, how many documents have been tokenised, once there is one."""
    console = Console(stderr=True)
    if quiet or not console.is_interactive:
        yield lambda documents: None
        return
    bar = Progress(SpinnerColumn(), TextColumn("{task.description}"), console=console, transient=True)
    task = bar.add_task("", total=None)
    started = False

    def tell(documents: int) -> None:
        nonlocal started
        if not started:
            bar.start()
            started = True
        bar.update(task, description=f"tokenising: {documents:,} documents")

    try:
        yield tell
    finally:
        bar.stop()
