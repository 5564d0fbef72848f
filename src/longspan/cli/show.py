"""`longspan show`: draw a plan or a manifest of packed rows, in the terminal or as a figure.

Starts without torch. matplotlib is imported only for a figure.
"""

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console

from longspan.cli.exits import friendly
from longspan.cli.plan import plan_of, plan_options
from longspan.errors import SpecError
from longspan.report import print_packs, print_plan, save_figure, save_packs


@click.command()
@plan_options
@click.option(
    "--manifest",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Draw a manifest written by longspan pack instead of a plan.",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Figure to write: .svg or .png. Default: draw in the terminal.",
)
@friendly
def show(manifest: Path | None, output: Path | None, **options: Any) -> None:
    """Draw a plan: the attention matrix coloured by rank, and pairs and bytes of each rank in each stage of the plan.

    With --manifest, draw packed rows: document lengths, fill of rows, and max / mean visible pairs over ranks.
    """
    if manifest is not None:
        _show_manifest(manifest, output)
        return
    made, report = plan_of(**options)
    if output is None:
        print_plan(Console(), made, report)
    else:
        save_figure(made, report, output)
        click.echo(f"wrote {output}", err=True)


def _show_manifest(manifest: Path, output: Path | None) -> None:
    context = click.get_current_context()
    given = [name for name in context.params if context.get_parameter_source(name) == ParameterSource.COMMANDLINE]
    if others := [name for name in given if name not in ("manifest", "output")]:
        options = ", ".join(option.opts[0] for option in context.command.params if option.name in others)
        raise SpecError(
            f"{options} does not combine with --manifest: the manifest holds these settings",
            hint="remove --manifest or the other options",
        )
    from longspan.data.pack_corpus import report_of  # imports code for corpora, which a plan does not need

    report = report_of(manifest)
    if output is None:
        print_packs(Console(), report)
    else:
        save_packs(report, output)
        click.echo(f"wrote {output}", err=True)
