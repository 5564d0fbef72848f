"""The table of a plan for a terminal of 80 columns: one line per rank, then totals.

Programs should read `PlanReport.to_json` instead.
"""

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from longspan.report.plan_report import PlanReport
from longspan.report.words import bytes_note, exchange_note, headline, in_full, short_bytes, short_count, summary


def plan_table(report: PlanReport) -> Group:
    """Make a rich renderable: headline, reason for the route, table with totals, and notes on which bytes are counted."""
    table = Table(box=box.SIMPLE_HEAD, show_footer=True, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("rank", footer="total")
    for name, total in (
        ("tokens", f"{report.seq_len:,}"),
        ("pairs", f"{report.area:,}"),
        ("blocks", short_count(report.blocks)),
        ("share", "100%" if report.area else "0%"),
        ("rows in", f"{sum(rank.rows_received for rank in report.per_rank):,}"),
        ("forward", short_bytes(report.bytes_forward)),
        ("backward", short_bytes(report.bytes_backward)),
    ):
        table.add_column(name, footer=total, justify="right", no_wrap=True)
    for rank in report.per_rank:
        table.add_row(
            str(rank.rank),
            f"{rank.tokens:,}",
            in_full(rank.area),
            short_count(rank.blocks),
            f"{rank.share:.2%}",
            f"{rank.rows_received:,}",
            short_bytes(rank.bytes_forward),
            short_bytes(rank.bytes_backward),
        )
    lines = [Text(headline(report), style="bold"), Text(summary(report))]
    reason = [Text(report.reason)] if report.reason else []
    return Group(*lines, *reason, Text(), table, Text(), Text(_notes(report)))


def _notes(report: PlanReport) -> str:
    if report.head_degree == 1:
        return bytes_note(report)
    forward, backward = short_bytes(report.bytes_heads_forward), short_bytes(report.bytes_heads_backward)
    moved = f"Of these, the exchange of heads: {forward} forward, {backward} backward."
    return "\n".join((bytes_note(report), moved, exchange_note(report)))
