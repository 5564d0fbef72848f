"""The table of a plan: one line per rank, then totals.

For a terminal of 80 columns; programs read `PlanReport.to_json`.
"""

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from longspan.report.record import PlanReport
from longspan.report.words import bytes_note, headline, short_bytes, summary


def plan_table(report: PlanReport) -> Group:
    """A rich renderable: headline, table with totals, what the bytes count."""
    table = Table(box=box.SIMPLE_HEAD, show_footer=True, pad_edge=False)
    table.add_column("rank", footer="total")
    for name, total in (
        ("tokens", f"{report.seq_len:,}"),
        ("pairs", f"{report.area:,}"),
        ("share", "100%" if report.area else "0%"),
        ("KV rows in", f"{report.rows_sent:,}"),
        ("forward", short_bytes(report.bytes_forward)),
        ("backward", short_bytes(report.bytes_backward)),
    ):
        table.add_column(name, footer=total, justify="right", no_wrap=True)
    for rank in report.per_rank:
        table.add_row(
            str(rank.rank),
            f"{rank.tokens:,}",
            f"{rank.area:,}",
            f"{rank.share:.2%}",
            f"{rank.rows_received:,}",
            short_bytes(rank.bytes_forward),
            short_bytes(rank.bytes_backward),
        )
    return Group(Text(headline(report), style="bold"), Text(summary(report)), table, Text(bytes_note(report)))
