"""A figure of a plan, as SVG or PNG: the attention matrix, and each rank's pairs and bytes stage by stage."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np

from longspan.plan import Layout, Mask, Plan
from longspan.plan.mask import Band
from longspan.report.canvas import (
    FAINT,
    HEIGHT,
    INK,
    PAPER,
    SHADES,
    STYLE,
    WIDTH,
    check_format,
    even_ticks,
    figure_colors,
    new_figure,
    write_figure,
)
from longspan.report.cells import HIDDEN, cell_map, even_cells, first_ranks, owner_map
from longspan.report.palette import DISTINCT
from longspan.report.plan_report import PlanReport, Quantity
from longspan.report.words import (
    byte_unit,
    bytes_note,
    headline,
    short_bytes,
    short_count,
    short_tokens,
    summary,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = np.ndarray

_LEFT, _MIDDLE, _RIGHT, _BOTTOM = 0.085, 0.59, 0.965, 0.105
_MOST_CELLS = 256
_PALE = 0.4
_PANELS: tuple[tuple[Quantity, str], ...] = (
    ("area", "pairs computed"),
    ("bytes_forward", "bytes sent, forward"),
    ("bytes_backward", "bytes sent, backward"),
)
_GAPPED = 16
_LABELLED = 8
"""Most ranks for which cells and bars are labelled with their numbers."""


def save_figure(plan: Plan, report: PlanReport, path: str | Path) -> None:
    """Draw `plan` into `path`, `.svg` or `.png`; `report` is `describe(plan, ...)` of the same plan.

    Raises `SpecError` for another suffix, for a file that cannot be written, or if matplotlib is not installed.
    """
    path = Path(path)
    check_format(path)
    write_figure(draw_figure(plan, report), path)


def draw_figure(plan: Plan, report: PlanReport) -> "Figure":
    """Draw `plan` as a matplotlib figure, without pyplot. Raises `SpecError` without matplotlib."""
    figure = new_figure()
    from matplotlib import rc_context

    with rc_context(STYLE):
        title = headline(report)
        figure.text(0.045, 0.955, title, fontsize=min(14, 720 / len(title)), fontweight="bold", va="center")
        figure.text(0.045, 0.915, summary(report), fontsize=10.5, va="center")
        figure.text(0.045, 0.886, report.reason, fontsize=7.5, va="center")
        _draw_legend(figure, plan)
        _draw_matrix(figure, plan)
        _draw_stages(figure, report, plan.rank_plan(0).relays)
        return figure


def _draw_legend(figure: "Figure", plan: Plan) -> None:
    """Draw the ranks' colours and, if heads are exchanged, the groups' colours below."""
    axes, ranks = figure.add_axes((_MIDDLE, 0.935, _RIGHT - _MIDDLE, 0.032)), plan.ranks
    names = ["rank"] if plan.degrees.heads == 1 else ["rank", "group"]
    rows = np.stack((np.arange(ranks), first_ranks(plan)))[: len(names)]
    _show_ranks(axes, rows, ranks, (-0.5, ranks - 0.5, len(names) - 0.5, -0.5))
    axes.set_xticks(even_ticks(ranks, 16), [str(rank) for rank in even_ticks(ranks, 16)])
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)


def _draw_matrix(figure: "Figure", plan: Plan) -> None:
    """Draw the attention matrix, keys across and queries down, with a strip of the owning ranks along each side."""
    striped = plan.layout.step > 1
    # With stripes the ranks alternate cell by cell; finer cells would blur.
    cells = even_cells(plan.seq_len, min(_MOST_CELLS, max(64, 4 * plan.ranks)) if striped else _MOST_CELLS)
    size, thick, gap, aspect = 0.44, 0.013, 0.006, WIDTH / HEIGHT
    extent = (0.0, plan.seq_len, plan.seq_len, 0.0)
    matrix = figure.add_axes((_LEFT, _BOTTOM, size, size * aspect), facecolor=PAPER)
    ranks = cell_map(plan, cells, cells)
    holders, first = owner_map(plan.layout, cells), first_ranks(plan)
    exact = cells == plan.seq_len
    # With more ranks than distinct colours, a pale colour would look like another rank.
    pale = plan.ranks <= DISTINCT and (exact or not striped)
    _show_ranks(matrix, ranks, plan.ranks, extent, np.where(first[holders] == ranks, 1.0, _PALE) if pale else None)
    queries = figure.add_axes((_LEFT - gap - thick, _BOTTOM, thick, size * aspect))
    _show_ranks(queries, holders[:, None], plan.ranks, extent)
    keys = figure.add_axes((_LEFT, _BOTTOM + (size + gap) * aspect, size, thick * aspect))
    _show_ranks(keys, holders[None, :], plan.ranks, extent)

    ticks = [plan.seq_len * part // 4 for part in range(5)] if plan.seq_len >= 4 else [0, plan.seq_len]
    labels = [short_tokens(tick) for tick in ticks]
    matrix.set_xticks(ticks, labels)
    queries.set_yticks(ticks, labels)
    matrix.set_xlabel("key (token)")
    queries.set_ylabel("query (token)")
    _note(figure, _LEFT, 108, *_captions(plan, cells, pale))
    if striped and not exact and (ranks[: cells * 9 // 20, cells * 11 // 20 :] == HIDDEN).all():
        _draw_first_tokens(matrix, plan)


def _captions(plan: Plan, cells: int, pale: bool) -> list[str]:
    """Explain cells, pale colours and the colours of groups."""
    unit, side = "rank" if plan.degrees.heads == 1 else "group", f"{plan.seq_len / cells:,.4g}"
    captions = []
    if cells < plan.seq_len:
        captions.append(f"A cell of {side} x {side} tokens shows the {unit} with most pairs; ties alternate.")
    if pale and plan.degrees.rows > 1:
        captions.append(f"Pale: keys of another {unit}.")
    if unit == "group":
        captions.append(
            "A group has its first rank's colour: its ranks share the heads. Strips: owners before the exchange."
        )
    return captions


def _note(figure: "Figure", left: float, width: int, *sentences: str) -> None:
    """Write small print below a drawing, in lines of `width` characters."""
    figure.text(left, 0.028, fill(" ".join(sentences), width), fontsize=8, va="center", linespacing=1.2)


def _draw_first_tokens(matrix: "Axes", plan: Plan) -> None:
    """Draw the first tokens of the matrix pair by pair, as an inset in the empty upper half."""
    first = min(plan.seq_len, max(16, 2 * plan.ranks))
    axes = matrix.inset_axes((0.6, 0.57, 0.37, 0.37), facecolor="white")
    corner = Mask.bands(first, _corner_bands(plan.mask.array, first))
    small = replace(plan, layout=Layout.striped(first, plan.ranks), mask=corner)
    _show_ranks(axes, cell_map(small, first, first), plan.ranks, (0.0, first, first, 0.0))
    axes.set_title(f"its first {first} tokens, pair by pair", fontsize=8)


def _corner_bands(bands: Array, first: int) -> list[Band]:
    """Cut trimmed bands `(n, 6)` to the `first` queries and keys."""
    inside = bands[(bands[:, 0] < first) & (bands[:, 2] < first)]
    return [(q0, min(q1, first), k0, min(k1, first), lo, hi) for q0, q1, k0, k1, lo, hi in inside.tolist()]


def _show_ranks(
    axes: "Axes", ranks: Array, num_ranks: int, extent: tuple[float, float, float, float], alpha: Array | None = None
) -> None:
    from matplotlib.colors import ListedColormap

    axes.imshow(
        np.ma.masked_equal(ranks, HIDDEN),
        cmap=ListedColormap(figure_colors(num_ranks)),
        vmin=-0.5,
        vmax=num_ranks - 0.5,
        alpha=alpha,
        extent=extent,
        aspect="auto",
        interpolation="nearest",
    )
    axes.set_xticks([])
    axes.set_yticks([])


def _draw_stages(figure: "Figure", report: PlanReport, hops: bool) -> None:
    """Draw three rank-by-stage maps: pairs, bytes forward and bytes backward, each next to the ranks' totals.

    The two maps of bytes share one scale. The exchange of heads, if any, is the last column.
    """
    grid = figure.add_gridspec(
        3, 2, left=_MIDDLE, right=_RIGHT, top=0.84, bottom=_BOTTOM, hspace=0.36, wspace=0.04, width_ratios=(2.6, 1)
    )
    heads = report.head_degree > 1
    tables = {
        name: np.column_stack((report.by_stage(name), *([report.in_exchange(name)] if heads else ())))
        for name, _ in _PANELS
    }
    most_bytes = int(max(tables["bytes_forward"].max(), tables["bytes_backward"].max()))
    size, unit = byte_unit(most_bytes)
    labelled = max(tables["area"].shape) <= _LABELLED
    for row, (name, title) in enumerate(_PANELS):
        heat, bars = figure.add_subplot(grid[row, 0]), figure.add_subplot(grid[row, 1])
        if name == "area":
            most, words, note = float(tables[name].max()), short_count, ""
            title = f"pairs x 1/{report.head_degree} of the heads" if heads else title
            _draw_heat(heat, tables[name], most, short_count)
        else:
            most, words, note = most_bytes, short_bytes, f" ({unit})"
            _draw_heat(heat, tables[name], most, lambda amount: f"{amount / size:.3g}")
        _label_stages(heat, report.num_stages, heads)
        _draw_totals(bars, tables[name].sum(axis=1), words)
        heat.set_title(title + (note if labelled else f" (darkest: {words(most)})"))
        bars.set_title("total, and mean")
    heat.set_xlabel("stage: hops the keys have made (0 = own shard)" if hops else "stage (0 = own shard)")
    _note(figure, _MIDDLE, 84, bytes_note(report))


def _label_stages(axes: "Axes", stages: int, heads: bool) -> None:
    ticks = even_ticks(stages, 16)
    if not heads:
        axes.set_xticks(ticks)
        return
    ticks = [tick for tick in ticks if tick == 0 or stages - tick >= stages / 4]
    axes.set_xticks([*ticks, stages], [*map(str, ticks), "heads"])
    if stages >= _LABELLED:
        axes.get_xticklabels()[-1].set_horizontalalignment("right")
    axes.axvline(stages - 0.5, color=FAINT, linewidth=0.8)


def _draw_heat(axes: "Axes", table: Array, most: float, words: Callable[[float], str]) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    ranks, columns = table.shape
    axes.set_facecolor("white")
    shades = LinearSegmentedColormap.from_list("shades", SHADES)
    axes.imshow(
        np.ma.masked_equal(table, 0), cmap=shades, vmin=0, vmax=most or 1, aspect="auto", interpolation="nearest"
    )
    axes.set_ylabel("rank")
    axes.set_yticks(even_ticks(ranks, 8))
    if max(ranks, columns) <= _GAPPED:
        axes.set_xticks(np.arange(columns - 1) + 0.5, minor=True)
        axes.set_yticks(np.arange(ranks - 1) + 0.5, minor=True)
        axes.grid(which="minor", color="white", linewidth=1.5)
        axes.tick_params(which="minor", length=0)
    if ranks <= _LABELLED and columns <= _LABELLED:
        for (rank, column), amount in np.ndenumerate(table):
            if amount:
                ink = "white" if amount > 0.5 * most else INK
                axes.text(column, rank, words(amount), ha="center", va="center", color=ink, fontsize=7.5)


def _draw_totals(axes: "Axes", totals: Array, words: Callable[[float], str]) -> None:
    ranks = len(totals)
    axes.barh(np.arange(ranks), totals, height=0.8 if ranks <= 32 else 1.0, color=figure_colors(ranks))
    axes.axvline(float(totals.mean()), color=INK, linewidth=0.8, linestyle=(0, (3, 3)))
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.set_xlim(0, max(1, totals.max()) * (1.7 if ranks <= _LABELLED else 1.15))
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.set_xticks([])
    axes.set_yticks([])
    if ranks > _LABELLED:
        axes.set_xticks([0, totals.max()], ["0", words(totals.max())])
    else:
        for rank, total in enumerate(totals.tolist()):
            axes.text(axes.get_xlim()[1], rank, words(total), ha="right", va="center", fontsize=7.5)
