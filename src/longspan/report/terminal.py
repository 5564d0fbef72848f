"""A plan as text of at most 80 columns: the attention matrix, then what each rank computes and sends stage by stage.

In colour, each rank has a colour, and half-block characters make cells square. Without colour, each rank is a character.
"""

from math import ceil

import numpy as np
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from longspan.plan import Plan
from longspan.report.cells import HIDDEN, cell_edges, cell_map, even_cells, first_ranks, owner_map
from longspan.report.palette import DISTINCT, muted, rank_colors, rank_symbol
from longspan.report.plan_report import PlanReport, Quantity
from longspan.report.words import (
    bytes_note,
    exchange_note,
    headline,
    short_bytes,
    short_count,
    short_tokens,
    summary,
)

Array = np.ndarray

_WIDTH = 80
_LABEL = 8
_MOST_CELLS = 64
_SMALL = 32
"""Most tokens for which every cell is one pair, two characters wide."""
_STRIP = 16
_HEADS = 2
"""Characters of a strip for the exchange of heads, after a gap of one character."""
_QUANTITIES: tuple[Quantity, ...] = ("area", "bytes_forward", "bytes_backward")
_SHADES, _ASCII_SHADES = "·░▒▓█", ".:+*#"


def print_plan(console: Console, plan: Plan, report: PlanReport) -> None:
    """Print `plan` on `console`; `report` is `describe(plan, ...)` of the same plan."""
    ascii_only = console.options.ascii_only
    plain = ascii_only or console.no_color or console.color_system is None
    colors = rank_colors(plan.ranks)
    styles = None if plain else [Style(color=Color.from_rgb(*rgb)) for rgb in (*colors, *map(muted, colors))]
    shades = _ASCII_SHADES if ascii_only else _SHADES
    console.print(Text(headline(report), style="bold"))
    reason = [Text(report.reason)] if report.reason else []
    console.print(Text(summary(report)), *reason, Text(), sep="\n", width=_WIDTH)
    for line in _matrix(plan, styles):
        console.print(line, no_wrap=True, overflow="crop", crop=False)
    console.print(Text(), _stages(report, styles, shades), sep="\n", width=_WIDTH)
    console.print(Text(_legend(report, shades)), width=_WIDTH)


def _matrix(plan: Plan, styles: list[Style] | None) -> list[Text]:
    """Draw the attention matrix, keys across and queries down, with a strip of the owning ranks along each side.

    If heads are exchanged, a cell has the colour of the first rank of its group. `styles` lists the ranks' colours, then
    the ranks' muted colours; None draws characters.
    """
    small = plan.seq_len <= _SMALL
    columns = plan.seq_len if small else even_cells(plan.seq_len, _MOST_CELLS)
    halves = styles is not None and not small
    rows = columns if small or halves else columns // 2
    per_line = 2 if halves else 1
    holders, ranks = owner_map(plan.layout, columns), cell_map(plan, rows, columns)
    mutes = styles is not None and plan.ranks <= DISTINCT and (columns == plan.seq_len or plan.layout.step == 1)
    if mutes:
        ranks = np.where((ranks == HIDDEN) | (ranks == first_ranks(plan)[holders]), ranks, ranks + plan.ranks)
    cells = np.full((rows + 2 * per_line + rows % per_line, columns + 2), HIDDEN)
    cells[:per_line, 2:] = holders
    cells[2 * per_line : 2 * per_line + rows, 0] = owner_map(plan.layout, rows)
    cells[2 * per_line : 2 * per_line + rows, 2:] = ranks

    starts = cell_edges(plan.seq_len, rows)[:-1:per_line].tolist()
    every = max(1, len(starts) // 4)
    labels = ["keys", "queries", *("" if n % every else short_tokens(start) for n, start in enumerate(starts))]
    width = 2 if small else 1
    lines = []
    for n, label in enumerate(labels):
        line = Text(f"{label:>{_LABEL - 1}} ")
        for above, below in zip(cells[n * per_line].tolist(), cells[(n + 1) * per_line - 1].tolist(), strict=True):
            line.append_text(_cell(above, below, width, styles))
        line.rstrip()
        lines.append(line)
    lines.append(Text(_key_axis(plan.seq_len, columns * width).rjust(_LABEL + (columns + 2) * width)))
    notes, unit = [], "rank" if plan.degrees.heads == 1 else "group"
    if rows < plan.seq_len:
        size = f"{plan.seq_len / rows:,.4g} x {plan.seq_len / columns:,.4g}"
        notes.append(f"A cell of {size} tokens shows the {unit} with most pairs.")
    if mutes:
        notes.append(f"Muted: keys of another {unit}.")
    if unit == "group":
        notes.append("A group is drawn as its first rank: its ranks share the heads.")
    lines += [Text(f"{'':{_LABEL}}{note}") for note in notes]
    return lines


def _cell(above: int, below: int, width: int, styles: list[Style] | None) -> Text:
    """Draw two stacked cells in one character, or one cell (`above` = `below`) in `width` characters."""
    if styles is None:
        return Text((" " if above == HIDDEN else rank_symbol(above)).ljust(width))
    if above == below:
        return Text(" " * width) if above == HIDDEN else Text("█" * width, styles[above])
    if above == HIDDEN:
        return Text("▄", styles[below])
    background = Style() if below == HIDDEN else Style(bgcolor=styles[below].color)
    return Text("▀", styles[above] + background)


def _key_axis(seq_len: int, width: int) -> str:
    end = short_tokens(seq_len)
    middle = short_tokens(seq_len // 2).center(width)
    return end.rjust(width) if width < 24 else f"0{middle[1 : width - len(end)]}{end}"


def _stages(report: PlanReport, styles: list[Style] | None, shades: str) -> Table:
    """Make a table with a line per rank: for pairs, bytes forward and bytes backward, a shade per stage and the total."""
    area, forward, backward = (_fold(report.by_stage(name), _columns(report)) for name in _QUANTITIES)
    heads = [report.in_exchange(name) for name in _QUANTITIES]
    # Forward and backward share one scale, so that shades are comparable.
    most_bytes = int(max(amounts.max() for amounts in (forward, backward, *heads)))
    wide = _columns_of_a_stage(report)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("rank", "pairs", "", "sent forward", "", "sent backward", ""):
        table.add_column(name, justify="left" if name else "right", no_wrap=True)
    for rank in report.per_rank:
        style = styles[rank.rank] if styles else Style()
        chip = Text(f"{rank.rank:>2} ").append("█" if styles else rank_symbol(rank.rank), style)
        strips = []
        for table_of, moved, most in zip(
            (area, forward, backward), heads, (area.max(), most_bytes, most_bytes), strict=True
        ):
            strip = "".join(_shade(amount, most, shades) * wide for amount in table_of[rank.rank].tolist())
            if report.head_degree > 1 and table_of is not area:
                strip += " " + _shade(int(moved[rank.rank]), most, shades) * _HEADS
            strips.append(Text(strip, style))
        totals = (
            short_count(rank.area),
            short_bytes(rank.bytes_forward, space=""),
            short_bytes(rank.bytes_backward, space=""),
        )
        table.add_row(chip, *(part for pair in zip(strips, totals, strict=True) for part in pair))
    return table


def _legend(report: PlanReport, shades: str) -> str:
    folded, wide = -(-report.num_stages // _columns(report)), _columns_of_a_stage(report)
    columns = f"{wide} characters are a stage" if wide > 1 else f"A character is {folded} stage{'s' * (folded > 1)}"
    heads = "" if report.head_degree == 1 else ", after the gap the exchange of heads"
    scale = f"{shades[0]} nothing, {shades[1:]} by quarters of the largest."
    return " ".join(filter(None, (f"{columns}{heads};", scale, bytes_note(report), exchange_note(report))))


def _columns(report: PlanReport) -> int:
    """Number of characters of a strip for stages."""
    return _STRIP if report.head_degree == 1 else _STRIP - 1 - _HEADS


def _columns_of_a_stage(report: PlanReport) -> int:
    return max(1, min(4, _columns(report) // report.num_stages))


def _fold(table: Array, columns: int) -> Array:
    """Sum neighbouring stages so that they fit into `columns`."""
    size = -(-table.shape[1] // columns)
    return np.add.reduceat(table, np.arange(0, table.shape[1], size), axis=1)


def _shade(amount: float, most: float, shades: str) -> str:
    return shades[0] if not amount else shades[min(ceil(amount * (len(shades) - 1) / most), len(shades) - 1)]
