"""One colour and one character for each rank, the same in the terminal and in figures.

Up to eight ranks: Okabe and Ito's palette (jfly.uni-koeln.de/color), distinct for all types of colour vision. More ranks:
a ramp of rising lightness like Crameri's batlow (doi.org/10.5281/zenodo.1243862), so that neighbouring ranks look alike.
"""

Rgb = tuple[int, int, int]

_FEW: tuple[Rgb, ...] = (
    (0, 114, 178),
    (230, 159, 0),
    (0, 158, 115),
    (204, 121, 167),
    (86, 180, 233),
    (213, 94, 0),
    (80, 80, 80),
    (240, 228, 66),
)
DISTINCT = len(_FEW)
"""Most ranks with distinct colours."""

_RAMP: tuple[Rgb, ...] = (
    (1, 25, 89),
    (16, 63, 96),
    (28, 90, 98),
    (60, 109, 86),
    (104, 123, 62),
    (157, 137, 43),
    (210, 147, 67),
    (248, 161, 123),
    (253, 183, 188),
)
_SYMBOLS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz+="


def rank_colors(ranks: int) -> list[Rgb]:
    """Return a colour for each of `ranks` ranks: red, green and blue from 0 to 255."""
    if ranks <= len(_FEW):
        return list(_FEW[:ranks])
    return [_between(rank / (ranks - 1) * (len(_RAMP) - 1)) for rank in range(ranks)]


def muted(color: Rgb) -> Rgb:
    """Mix a colour half with grey, to mute it on light and dark backgrounds alike."""
    r, g, b = ((part + 128) // 2 for part in color)
    return r, g, b


def rank_symbol(rank: int) -> str:
    """Return one character for a rank, for output without colour. Characters repeat after 64 ranks."""
    return _SYMBOLS[rank % len(_SYMBOLS)]


def _between(place: float) -> Rgb:
    index = min(int(place), len(_RAMP) - 2)
    part = place - index
    r, g, b = (round(a + (z - a) * part) for a, z in zip(_RAMP[index], _RAMP[index + 1], strict=True))
    return r, g, b
