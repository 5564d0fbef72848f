"""Time longspan and its peers against SDPA on the same inputs, in a separate environment.

    python -m benchmarks.peers [--repeats 7] [--markdown docs/reference/peers.md] [--plot docs/reference/peers.png]

The environment `.venv-peers` is created from requirements/peers.txt if it is missing or that file has changed. Two ranks of one
thread each run against one SDPA process of two threads. Outputs and gradients of each contender are checked against SDPA first;
a wrong contender is reported but not timed.
"""

import tempfile
from pathlib import Path

from benchmarks.peers.environment import enter_environment


def run() -> None:
    import click

    from benchmarks.harness import FOREIGN_LIMIT, save
    from benchmarks.peers.cases import make_cases
    from benchmarks.peers.measure import Limits, measure
    from benchmarks.peers.show import as_markdown, as_table, draw, write_markdown
    from longspan.comm.launch import launch

    file = click.Path(path_type=Path, dir_okay=False)

    @click.command(help=__doc__)
    @click.option("--seq-len", default=8192, show_default=True)
    @click.option("--window", default=1024, show_default=True)
    @click.option("--repeats", default=7, show_default=True, help="Pairs to keep per contender.")
    @click.option("--most", default=20, show_default=True, help="Pairs to try at most.")
    @click.option(
        "--foreign",
        default=FOREIGN_LIMIT,
        show_default=True,
        help="Drop pairs in which other programs used a larger share of the cores.",
    )
    @click.option("--dtype", default="float32", show_default=True, type=click.Choice(["float32", "bfloat16"]))
    @click.option("--only", default="", help="Measure inputs whose name contains this word.")
    @click.option(
        "--peer",
        default="",
        help="Measure longspan's routes, and peers whose name contains one of these words, separated by commas.",
    )
    @click.option("--json", "record", type=file)
    @click.option(
        "--markdown", type=file, help="Write the tables to this file; if the file has marks, between the marks."
    )
    @click.option("--plot", type=file)
    def main(
        seq_len: int, window: int, repeats: int, most: int, foreign: float, dtype: str, only: str, peer: str,
        record: Path | None, markdown: Path | None, plot: Path | None,
    ) -> None:  # fmt: skip
        cases = [case for case in make_cases(seq_len, window, dtype) if only in case.name]
        if not cases:
            names = ", ".join(repr(case.name) for case in make_cases(seq_len, window, dtype))
            raise click.UsageError(f"no input's name contains {only!r}; inputs are {names}")
        reports = []
        for case in cases:  # one launch per input, so that measured inputs are kept if a later one fails
            with tempfile.TemporaryDirectory() as folder:
                reports += launch(measure, ([case], Limits(repeats, most, foreign=foreign), peer, Path(folder)), 3)
            as_table(reports[-1:])
            save(record, reports)
        if markdown:
            write_markdown(as_markdown(reports), markdown)
        if plot:
            draw(reports, plot)

    main(prog_name="python -m benchmarks.peers")


if __name__ == "__main__":
    enter_environment("benchmarks.peers")
    run()
