"""A manifest as text of at most 80 columns: document lengths, fill of the training rows, pairs of each rank."""

import numpy as np
from rich import box
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from longspan.report.packs import PackReport, pack_headline, pack_lines, pack_note
from longspan.report.palette import rank_colors
from longspan.report.words import short_count, short_tokens

_WIDTH = 80
_BAR = 12
_FILLS = (0.0, 0.5, 0.9, 0.99, 1.0)


def print_packs(console: Console, report: PackReport) -> None:
    """Print a manifest on `console`."""
    block = "#" if console.options.ascii_only else "█"
    plain = console.options.ascii_only or console.no_color or console.color_system is None
    console.print(Text(pack_headline(report), style="bold"), Text(pack_note(report)), sep="\n", width=_WIDTH)
    for table in (_lengths(report, block), _fill(report, block), _ranks(report, block, plain)):
        console.print(Text(), table, sep="\n", width=_WIDTH)


def packs_table(report: PackReport) -> Table:
    """Make a table of the summary, one line per number."""
    table = Table(show_header=False, box=None)
    for line in pack_lines(report):
        table.add_row(*line)
    return table


def _lengths(report: PackReport, block: str) -> Table:
    table = _table("tokens up to", "documents", "tokens", "pairs")
    most = max(max(part[1:]) for part in report.bins)
    for part in report.bins:
        shares = ((_bar(share / most, block), f"{share:.1%}") for share in part[1:])
        table.add_row(short_tokens(part.most), *(cell for pair in shares for cell in pair))
    return table


def _fill(report: PackReport, block: str) -> Table:
    table = _table("fill from", "rows")
    counts = np.histogram(report.fill, [*_FILLS, np.inf])[0].tolist()
    for low, count in zip(_FILLS, counts, strict=True):
        table.add_row(f"{low:.2f}", _bar(count / max(counts), block), f"{count:,}")
    return table


def _ranks(report: PackReport, block: str, plain: bool) -> Table:
    """Make a table of each rank: pairs summed over all rows, and the largest `pairs / mean of the ranks` in one row."""
    table = _table("rank", "pairs")
    table.add_column("worst row", justify="right")
    pairs, mean = report.rank_pairs.sum(axis=0), report.rank_pairs.mean(axis=1, keepdims=True)
    worst = np.divide(report.rank_pairs, mean, out=np.ones_like(report.rank_pairs), where=mean > 0).max(axis=0)
    for rank, (total, color) in enumerate(zip(pairs.tolist(), rank_colors(report.cp), strict=True)):
        style = Style() if plain else Style(color="rgb({},{},{})".format(*color))
        bar = Text(_bar(total / max(pairs.max(), 1), block), style)
        table.add_row(str(rank), bar, short_count(total), f"{worst[rank]:.3f} x mean")
    return table


def _table(first: str, *names: str) -> Table:
    """Make an empty table with a right-aligned column `first`, and two columns per name: one of bars, one of numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first, justify="right", no_wrap=True)
    for name in names:
        table.add_column(name, width=_BAR, no_wrap=True)
        table.add_column("", justify="right", no_wrap=True)
    return table


def _bar(share: float, block: str) -> str:
    """Make a bar for a share from 0 to 1. A share above 0 gets at least one character."""
    return block * max(round(share * _BAR), int(share > 0))
