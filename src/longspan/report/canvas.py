"""What figures share: their look, a canvas apart from pyplot and its global state, and the file they end in.

Colour stands for the rank and for nothing else; amounts are shades of grey-blue.
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
    # Text stays text, and the same plan gives the same file.
    "svg.fonttype": "none",
    "svg.hashsalt": "longspan",
}


def check_format(path: Path) -> None:
    """Raises `SpecError` for a name that no figure can have."""
    if path.suffix not in _FORMATS:
        raise SpecError(f"a figure cannot be written as {path.name!r}", hint="end the name with .svg or .png")


def new_figure() -> "Figure":
    """An empty figure; draw in it under `matplotlib.rc_context(STYLE)`. Raises `SpecError` without matplotlib."""
    try:
        from matplotlib import figure
    except ImportError:
        raise SpecError(
            "drawing a figure needs matplotlib, which is not installed", hint="pip install 'longspan[plot]'"
        ) from None
    return figure.Figure(figsize=(WIDTH, HEIGHT), facecolor="white")


def write_figure(figure: "Figure", path: Path) -> None:
    """Raises `SpecError` for a file that cannot be written."""
    from matplotlib import rc_context

    metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
    try:
        with rc_context(STYLE):
            figure.savefig(path, dpi=144, metadata=metadata)
    except OSError as error:
        raise SpecError(
            f"{path} cannot be written: {error.strerror}",
            hint="name a file in a folder that exists and may be written to",
        ) from error


def figure_colors(ranks: int) -> list[tuple[float, ...]]:
    """The ranks' colours, as matplotlib takes them."""
    return [tuple(part / 255 for part in rgb) for rgb in rank_colors(ranks)]


def even_ticks(count: int, most: int) -> list[int]:
    """Up to `most` of the numbers below `count`, a power of two apart."""
    every = 1
    while count > most * every:
        every *= 2
    return list(range(0, count, every))
