"""The text drawing: what it says without colour, that it fits, and that colour says the same."""

import io

import pytest
from rich.console import Console
from rich.text import Text

from longspan.plan import Mask, Plan
from longspan.report import describe, plan_table, print_plan
from longspan.report.palette import rank_colors, rank_symbol
from tests.report.plans import LAYOUTS, make


def drawn(plan: Plan, color: bool = False, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    console = Console(file=file, width=80, color_system="truecolor" if color else None, force_terminal=color)
    print_plan(console, plan, describe(plan, 64, 2))
    file.flush()
    return raw.getvalue().decode(encoding)


def test_small_plan_pair_by_pair() -> None:
    text = drawn(make("zigzag", Mask.causal(8), 2))
    assert text.splitlines()[:15] == [
        "zigzag layout, causal mask, ring route",
        "2 ranks, 8 tokens, imbalance 1.000, KV rows sent: 0.75 of a plain ring",
        "",
        "   keys     0 0 1 1 1 1 0 0",
        "queries",
        "      0 0   0",
        "        0   0 0",
        "      2 1   1 1 1",
        "        1   1 1 1 1",
        "      4 1   1 1 1 1 1",
        "        1   1 1 1 1 1 1",
        "      6 0   0 0 0 0 0 0 0",
        "        0   0 0 0 0 0 0 0 0",
        "                           8",
        "",
    ]
    # A row of keys and values is 256 bytes, of their gradients 512. Rank 0 sends its early chunk, 2 rows, and 4 partials
    # home; rank 1 sends both chunks, 4 rows, and 2 partials home. The largest of these, 4 partials, is four quarters.
    assert [line.split() for line in text.splitlines()[15:18]] == [
        ["rank", "pairs", "sent", "forward", "sent", "backward"],
        ["0", "0", "████████", "18", "░░░░····", "512B", "░░░░████", "2.5KiB"],
        ["1", "1", "████████", "18", "▒▒▒▒····", "1.0KiB", "▒▒▒▒▒▒▒▒", "2.0KiB"],
    ]


@pytest.mark.parametrize("color", [False, True], ids=["letters", "colour"])
@pytest.mark.parametrize("ranks", [1, 2, 5, 8, 17, 64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fits_80_columns(layout: str, ranks: int, color: bool) -> None:
    for mask in (Mask.causal(3), Mask.causal(45, window=9), Mask.documents([60_000, 71_072])):
        text = Text.from_ansi(drawn(make(layout, mask, ranks), color)).plain
        assert max(map(len, text.splitlines())) <= 80
        assert all(f"{rank} " in text for rank in range(ranks))


def test_colour_paints_every_rank() -> None:
    text = drawn(make("contiguous", Mask.full(4096), 8), color=True)
    assert all(f"38;2;{r};{g};{b}m" in text for r, g, b in rank_colors(8))
    assert "Muted: keys of another rank." in text


def test_plain_ascii_where_nothing_else_can_be_written() -> None:
    text = drawn(make("zigzag", Mask.causal(8192), 4), encoding="ascii")
    assert "####" in text
    assert "nothing, :+*# by quarters of the largest" in text


def test_64_ranks_have_letters_and_colours_of_their_own() -> None:
    assert len({rank_symbol(rank) for rank in range(64)}) == 64
    for ranks in (2, 8, 9, 64):
        assert len(set(rank_colors(ranks))) == ranks


def test_table_shows_every_rank_and_the_totals() -> None:
    report = describe(make("zigzag", Mask.causal(24), 2, heads=(8, 2)), 16, 2)
    file = io.StringIO()
    Console(file=file, width=80).print(plan_table(report))
    rows = [line.split() for line in file.getvalue().splitlines()]
    assert ["0", "12", "150", "50.00%", "12", "768", "B", "3.8", "KiB"] in rows
    assert ["1", "12", "150", "50.00%", "6", "1.5", "KiB", "3.0", "KiB"] in rows
    assert ["total", "24", "300", "100%", "18", "2.2", "KiB", "6.8", "KiB"] in rows
    assert "Bytes sent per batch row, for 2 KV heads of 16 at 2 bytes an element." in file.getvalue()
