"""The `longspan` command. Subcommands are imported when called, so that `longspan plan` starts without torch.

Results go to stdout, progress to stderr. A failed check exits with a non-zero code.
"""

from importlib import import_module

import click

_COMMANDS = {
    "train": "Train a decoder with each sequence sharded over a CP group.",
    "pack": "Pack documents into rows and write the rows as a manifest.",
    "verify": "Check that training at CP=N equals plain attention at CP=1.",
    "bench": "Measure the costs of compute and communication here.",
    "plan": "Count the tokens, pairs and bytes of each rank.",
    "show": "Draw a plan or a manifest of packed rows.",
    "doctor": "List the backends and attention kernels that run here.",
}


class _Lazy(click.Group):
    """A group that lists its commands without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        command: click.Command = getattr(import_module(f"longspan.cli.{name}"), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="longspan")
def main() -> None:
    """Train transformers on sequences too long for one device, with exact context parallelism."""


if __name__ == "__main__":
    main()
