"""`longspan show`: a drawing of a plan, in the terminal or as a figure.

Starts without torch, and without matplotlib until a figure is asked for.
"""

from pathlib import Path
from typing import Any

import click
from rich.console import Console

from longspan.cli.errors import friendly
from longspan.cli.plan import plan_of, plan_options
from longspan.report import print_plan, save_figure


@click.command()
@plan_options
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write a figure: .svg or .png."
)
@friendly
def show(output: Path | None, **options: Any) -> None:
    """Draw a plan: the attention matrix coloured by rank, each rank's pairs and bytes stage by stage."""
    made, report = plan_of(**options)
    if output is None:
        print_plan(Console(), made, report)
    else:
        save_figure(made, report, output)
        click.echo(f"wrote {output}", err=True)
