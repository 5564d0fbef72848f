"""`longspan`: the group of commands. Each loads when it is called, so that planning starts without torch.

Results go to stdout, progress to stderr; what did not hold exits non-zero.
"""

from importlib import import_module

import click

_COMMANDS = {
    "train": "Train a decoder on long rows, each shared by the ranks of a CP group.",
    "pack": "Write the rows a run reads as a manifest, with counts of each rank.",
    "verify": "Prove that training at CP=N equals plain attention at CP=1.",
    "bench": "Measure what work and traffic cost here.",
    "plan": "Count what a plan costs each rank.",
    "show": "Draw a plan, or a manifest of packed rows.",
    "doctor": "Say what of longspan can run here.",
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
    """Train transformers on sequences too long for one device, by exact context parallelism."""


if __name__ == "__main__":
    main()
