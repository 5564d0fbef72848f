"""A figure of a manifest, as SVG or PNG.

document lengths: shares of documents, tokens, pairs   |   fill of each row
pairs of each rank, summed over all rows               |   imbalance of each row
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from longspan.report.canvas import (
    FAINT,
    INK,
    SHADES,
    STYLE,
    check_format,
    even_ticks,
    figure_colors,
    new_figure,
    write_figure,
)
from longspan.report.packs import PackReport, pack_headline, pack_note
from longspan.report.words import short_bytes, short_count, short_tokens

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = np.ndarray

_DASHED = (0, (3, 3))
_LABEL: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
_LABELLED = 8
"""Most ranks for which bars are labelled with their share."""


def save_packs(report: PackReport, path: str | Path) -> None:
    """Draw a manifest into `path`, `.svg` or `.png`. Raises `SpecError` like `save_figure`."""
    path = Path(path)
    check_format(path)
    write_figure(draw_packs(report), path)


def draw_packs(report: PackReport) -> "Figure":
    """Draw a manifest as a matplotlib figure. Raises `SpecError` without matplotlib."""
    figure = new_figure()
    from matplotlib import rc_context

    with rc_context(STYLE):
        figure.text(0.06, 0.955, pack_headline(report), fontsize=14, fontweight="bold", va="center")
        figure.text(0.06, 0.915, f"{report.name}: {pack_note(report)}", fontsize=10.5, va="center")
        grid = figure.add_gridspec(2, 2, left=0.06, right=0.97, top=0.84, bottom=0.09, hspace=0.42, wspace=0.16)
        _draw_lengths(figure.add_subplot(grid[0, 0]), report)
        _draw_fill(figure.add_subplot(grid[0, 1]), report)
        _draw_ranks(figure.add_subplot(grid[1, 0]), report)
        _draw_imbalance(figure.add_subplot(grid[1, 1]), report)
        return figure


def _draw_lengths(axes: "Axes", report: PackReport) -> None:
    bins = report.bins
    places = np.arange(len(bins))
    for index, (name, shade) in enumerate(
        zip(("documents", "tokens", "pairs"), (SHADES[1], SHADES[2], SHADES[4]), strict=True)
    ):
        shares = [part[index + 1] for part in bins]
        axes.bar(places + (index - 1) * 0.27, shares, width=0.27, color=shade, label=f"share of {name}")
    axes.set_xticks(places, [short_tokens(part.most) for part in bins])
    axes.set_xlabel("tokens of a document, or of a piece of a cut one: up to")
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.legend(frameon=False, loc="upper left", fontsize=8)
    cut = f", {report.num_cut:,} of them cut" if report.num_cut else ""
    axes.set_title(f"lengths of {report.num_documents:,} documents{cut}")
    _open(axes)


def _draw_fill(axes: "Axes", report: PackReport) -> None:
    fill = report.fill
    _draw_rows(axes, fill)
    axes.set_ylim(min(0.9, max(0.0, float(fill.min()) - 0.05)), 1.005)
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.set_title(f"fill of rows: mean {fill.mean():.4f}, worst {fill.min():.4f}")


def _draw_imbalance(axes: "Axes", report: PackReport) -> None:
    imbalance = report.imbalance
    _draw_rows(axes, imbalance)
    top = max(1.05, float(imbalance.max()))
    axes.set_ylim(1 - 0.03 * (top - 1), 1 + 1.08 * (top - 1))
    axes.set_title(f"most pairs of a rank x mean: mean {imbalance.mean():.3f}, worst {imbalance.max():.3f}")


def _draw_rows(axes: "Axes", values: Array) -> None:
    """Plot a value per row, and the mean."""
    axes.plot(np.arange(len(values)), values, ".", color=SHADES[3], markersize=5 if len(values) <= 500 else 2)
    axes.axhline(float(values.mean()), color=INK, linewidth=0.8, linestyle=_DASHED)
    axes.set_xlim(-0.02 * len(values) - 0.5, 1.02 * len(values) - 0.5)
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("row")
    _open(axes)


def _draw_ranks(axes: "Axes", report: PackReport) -> None:
    """Draw each rank's pairs, summed over all rows, and the mean. The title gives the bytes that a rank sends."""
    ranks, pairs = report.cp, report.rank_pairs.sum(axis=0)
    axes.bar(np.arange(ranks), pairs, width=0.8 if ranks <= 32 else 1.0, color=figure_colors(ranks))
    axes.axhline(float(pairs.mean()), color=INK, linewidth=0.8, linestyle=_DASHED)
    axes.set_xticks(even_ticks(ranks, 16))
    axes.set_ylim(0, max(1.0, float(pairs.max())) * 1.15)
    axes.yaxis.set_major_formatter(lambda amount, _: short_count(amount))
    if ranks <= _LABELLED:
        for rank, amount in enumerate(pairs.tolist()):
            share = f"{amount / pairs.sum():.1%}" if pairs.sum() else "0%"
            axes.annotate(
                share, (rank, amount), (0, 5), textcoords="offset points", ha="center", fontsize=8, bbox=_LABEL
            )
    axes.set_xlabel("rank")
    sent = report.rank_bytes.sum(axis=0)
    traffic = f"{short_bytes(sent.mean())} sent by a rank, at most {short_bytes(sent.max())}"
    axes.set_title(f"pairs of each rank, of all rows; {traffic}")
    _open(axes)


def _open(axes: "Axes") -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="y", color=FAINT, linewidth=0.4, alpha=0.5)
    axes.set_axisbelow(True)
