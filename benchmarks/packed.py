"""Time packed rows of real lengths at cp=2 (one thread per rank) against SDPA per document in one process (two threads).

    python -m benchmarks.packed [--seq-len 32768] [--repeats 5] [--only many] [--no-peers] [--json out.json]

Document lengths are sizes in bytes of the standard library's files, packed by `longspan.data.fit_rows`, which cuts documents
longer than a row. Three full rows of two or more documents are measured: with the fewest, the median and the most documents.
Among rows with an equal number of documents, the row with the median of visible pairs is taken. Free room of a row, at most
1%, becomes one more document.

Contenders are longspan's routes on the balanced layout and on zigzag, and the peers of `benchmarks.peers` in its environment.
Outputs and gradients of each are checked against the single process first; a wrong contender is reported but not timed. Each
contender is then timed in pairs with the baseline, in turn. The fastest balanced route is also timed in pairs with the fastest
peer and with the fastest zigzag route.
"""

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.harness import FOREIGN_LIMIT, Spread, save
from benchmarks.peers import adapters, kernels
from benchmarks.peers.cases import Case
from benchmarks.peers.environment import enter_environment
from benchmarks.peers.measure import Limits, Report, Run, Tensor, compare, duel, fastest, forward_backward
from benchmarks.peers.roster import OURS, Peer, named
from benchmarks.peers.show import verdict
from benchmarks.peers.trio import RANKS, Trio
from longspan import Mask, Plan, plan_attention
from longspan.comm.launch import launch
from longspan.data import fit_rows, read_documents

ROUTES = {"balanced": ("exchange", "ring", "ulysses"), "zigzag": ("exchange", "ring")}
PEERS = "DeepSpeed, para-attn, PyTorch ring template, yunchang"
"""The other peers do not support documents, or need an S x S mask, 1 GiB at 32,768 tokens."""
COLUMNS = ("", "layout", "time / SDPA by document", "dropped", "pairs max/mean", "KV rows in", "MiB sent", "error")


@dataclass(frozen=True)
class PlanCounts:
    """Counts of a plan. `imbalance` is the max / mean of the ranks' visible pairs. `rows_received` is the maximum of KV
    rows that a rank receives in forward (route "ulysses": rows of the rank's share of the heads)."""

    imbalance: float
    rows_received: int


@dataclass(frozen=True)
class PackedReport:
    """The results of one row. `pairs` are visible pairs, `share` is pairs / a causal row's pairs; `report` has times / SDPA's.

    `fastest` names the fastest contender of "balanced", "zigzag" and "peer" (empty if none was timed). `against` is the time of
    the fastest "balanced" / that of the fastest "zigzag", and / that of the fastest "peer".
    """

    row: str
    documents: int
    longest: int
    pairs: int
    share: float
    report: Report
    plans: dict[str, PlanCounts]
    fastest: dict[str, str]
    against: dict[str, Spread]


@click.command(help=__doc__)
@click.option("--seq-len", default=32768, show_default=True)
@click.option("--heads", nargs=2, default=(8, 8), show_default=True, help="Query heads and KV heads.")
@click.option("--dtype", default="float32", show_default=True, type=click.Choice(["float32", "bfloat16"]))
@click.option("--repeats", default=5, show_default=True, help="Pairs to keep per contender.")
@click.option("--most", default=20, show_default=True, help="Pairs to try at most.")
@click.option(
    "--foreign",
    default=FOREIGN_LIMIT,
    show_default=True,
    help="Drop pairs in which other programs used a larger share of the cores.",
)
@click.option("--only", default="", help='Measure rows whose name ("few", "middle", "many") contains this word.')
@click.option("--peers/--no-peers", default=True, show_default=True)
@click.option(
    "--peer",
    default=PEERS,
    show_default=True,
    help="Measure peers whose name contains one of these, separated by commas.",
)
@click.option("--json", "output", type=click.Path(path_type=Path, dir_okay=False))
def main(
    seq_len: int, heads: tuple[int, int], dtype: str, repeats: int, most: int, foreign: float, only: str, peers: bool,
    peer: str, output: Path | None,
) -> None:  # fmt: skip
    if peers:
        enter_environment("benchmarks.packed")
    limits = Limits(repeats, most, foreign=foreign)
    reports = []
    for row, lengths in make_rows(seq_len).items():
        if only in row:
            case = Case("packed", *heads, seq_len, lengths, dtype=dtype)
            with (
                tempfile.TemporaryDirectory() as folder
            ):  # new processes per row, so that measured rows are kept if a later one fails
                reports.append(launch(measure, (row, case, peer if peers else None, limits, Path(folder)), RANKS + 1))
            _show(reports[-1])
            save(output, reports)


def make_rows(seq_len: int) -> dict[str, tuple[int, ...]]:
    """Return the document lengths of the three rows, by the row's name."""
    documents = [len(document.text.encode()) for document in read_documents("python:stdlib")]
    rows = [[piece.stop - piece.start for piece in row] for row in fit_rows(np.array(documents), seq_len)]
    rows = [row for row in rows if len(row) > 1 and sum(row) >= 0.99 * seq_len]
    if not rows:
        raise click.UsageError(f"the standard library does not fill a row of {seq_len} tokens with two documents")
    rows.sort(key=lambda row: (len(row), Mask.documents(row).area))
    counts = [len(row) for row in rows]
    chosen = {}
    for name, count in {"few": counts[0], "middle": counts[len(counts) // 2], "many": counts[-1]}.items():
        alike = [row for row in rows if len(row) == count]
        row = alike[len(alike) // 2]
        chosen[name] = tuple(length for length in (*row, seq_len - sum(row)) if length)
    return chosen


def measure(row: str, case: Case, peer: str | None, limits: Limits, folder: Path) -> PackedReport:
    """Measure one row, called on each of the three processes. `peer` None: only longspan."""
    roster = _ours() + ([] if peer is None else named(peer))
    trio = Trio(folder)
    try:
        report, runs = compare(case, roster, limits, trio, _by_document)
        best = {layout: fastest([r for r in report.results if r.is_ours and r.layout == layout]) for layout in ROUTES}
        best["peer"] = report.rival
        against = {
            other: duel(best["balanced"], best[other], runs, limits, trio)
            for other in ("zigzag", "peer")
            if best["balanced"] and best[other]
        }
    finally:
        trio.close()
    area = case.mask.area
    share = area / Mask.causal(case.seq_len).area
    return PackedReport(row, len(case.lengths), max(case.lengths), area, share, report, _counts(case), best, against)


def _ours() -> list[Peer]:
    return [
        Peer(_name(layout, route), OURS, "longspan.attention", adapters.longspan_route(route, layout), layout=layout)
        for layout, routes in ROUTES.items()
        for route in routes
    ]


def _name(layout: str, route: str) -> str:
    return f"{OURS} {layout} {route}"


def _counts(case: Case) -> dict[str, PlanCounts]:
    counts = {}
    for layout, routes in ROUTES.items():
        made = adapters.make_layout(layout, case, RANKS)
        for route in routes:
            plan = plan_attention(made, case.mask, route, (case.heads, case.kv_heads))
            counts[_name(layout, route)] = PlanCounts(_imbalance(plan), max(map(plan.rows_received, range(RANKS))))
    return counts


def _imbalance(plan: Plan) -> float:
    """Return max / mean area of the ranks. `plan.area` of routes that exchange heads is scaled by the share of heads."""
    areas = [plan.area(rank) for rank in range(RANKS)]
    return max(areas) * RANKS / sum(areas)


def _by_document(case: Case, inputs: list[Tensor]) -> Run:
    """Return forward and backward by SDPA of each document, split beforehand."""
    runs = []
    for part in zip(*(x.split(case.lengths, dim=2) for x in inputs), strict=True):
        length = part[0].shape[2]
        alone = replace(case, kind="causal", seq_len=length, lengths=(length,))
        runs.append(forward_backward([x.contiguous() for x in part], kernels.plain_attention(alone)))
    return lambda: tuple(x for run in runs for x in run())


def _show(packed: PackedReport) -> None:
    """Print to stdout, 180 columns wide if it is not a terminal."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=180)
    console.print(_table(packed))
    for result in packed.report.results:
        if not result.ratio or not result.ratio.repeats:
            console.print(f"  {result.name}: {verdict(result)}", highlight=False)
    for other, ratio in packed.against.items():
        names = f"{packed.fastest['balanced']} / {packed.fastest[other]}"
        console.print(f"  fastest balanced over fastest {other}, {names}: {ratio}", highlight=False)
    console.print()


def _table(packed: PackedReport) -> Table:
    report = packed.report
    title = (
        f"{packed.row}, {report.case}: {packed.documents} documents, the longest of {packed.longest:,} tokens, "
        f"{packed.pairs:,} pairs ({packed.share:.0%} of causal)\n"
        f"SDPA by document, two threads: {report.sdpa_seconds.median:.3f} s"
    )
    table = Table(*COLUMNS, title=title, title_justify="left")
    for result in report.results:
        if result.ratio and result.ratio.repeats and result.sent is not None:
            plan = packed.plans.get(result.name)
            counts = (f"{plan.imbalance:.3f}", f"{plan.rows_received:,}") if plan else ("", "")
            sent = f"{result.sent / 2**20:.1f}"
            cells = (result.name, result.layout, str(result.ratio), str(result.dropped), *counts, sent)
            table.add_row(*cells, f"{result.error:.0e}", style="bold" if result.is_ours else None)
    return table


if __name__ == "__main__":
    main()
