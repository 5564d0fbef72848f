"""Style, canvas and file output of all figures, without pyplot and its global state.

A colour always identifies a rank. Amounts are drawn in shades of grey-blue.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan.errors import SpecError
from longspan.report.palette import rank_colors

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 12.5, 7.5
INK, FAINT, PAPER = "#1f2933", "#9aa5b1", "#f4f6f8"
SHADES = ("#e8eef4", "#bccddc", "#86a3bc", "#527899", "#2c5474")
_FORMATS = (".svg", ".png")
STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.linewidth": 0.8,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 3,
    "ytick.major.size": 3,
    # Keep text as text, and make files reproducible.
    "svg.fonttype": "none",
    "svg.hashsalt": "longspan",
}


def check_format(path: Path) -> None:
    """Raise `SpecError` unless the file name ends with .svg or .png."""
    if path.suffix not in _FORMATS:
        raise SpecError(f"a figure cannot be written as {path.name!r}", hint="end the name with .svg or .png")


def new_figure() -> "Figure":
    """Make an empty figure. Draw under `matplotlib.rc_context(STYLE)`. Raises `SpecError` without matplotlib."""
    try:
        from matplotlib import figure
    except ImportError:
        raise SpecError(
            "drawing a figure needs matplotlib, which is not installed", hint="pip install 'longspan[plot]'"
        ) from None
    return figure.Figure(figsize=(WIDTH, HEIGHT), facecolor="white")


def write_figure(figure: "Figure", path: Path) -> None:
    """Save a figure as `path`. Raises `SpecError` if the file cannot be written."""
    from matplotlib import rc_context

    metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
    try:
        with rc_context(STYLE):
            figure.savefig(path, dpi=144, metadata=metadata)
    except OSError as error:
        raise SpecError(
            f"{path} cannot be written: {error.strerror}",
            hint="name a file in an existing, writable folder",
        ) from error


def figure_colors(ranks: int) -> list[tuple[float, ...]]:
    """Return a matplotlib colour for each rank: (red, green, blue) from 0 to 1."""
    return [tuple(part / 255 for part in rgb) for rgb in rank_colors(ranks)]


def even_ticks(count: int, most: int) -> list[int]:
    """List up to `most` numbers below `count`, spaced by a power of two."""
    every = 1
    while count > most * every:
        every *= 2
    return list(range(0, count, every))
