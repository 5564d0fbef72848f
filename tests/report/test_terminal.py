"""The text drawing: what it says without colour, that it fits, and that colour says the same."""

import io

import pytest
from rich.console import Console
from rich.text import Text

from longspan.advise import Planner
from longspan.names import ROUTES
from longspan.plan import Layout, Mask, Plan
from longspan.report import describe, plan_table, print_plan
from longspan.report.palette import rank_colors, rank_symbol
from tests.plan.strategies import NAMES as LAYOUTS
from tests.report.plans import make


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
        "2 ranks, 8 tokens, imbalance 1.000, sent forward: 0.75 of a plain ring",
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


@pytest.mark.parametrize(
    ("ranks", "color"),
    [
        *((ranks, False) for ranks in (1, 2, 5, 8, 17, 64)),
        *((ranks, True) for ranks in (5, 64)),
        *(pytest.param(ranks, True, marks=pytest.mark.nightly) for ranks in (1, 2, 8, 17)),
    ],
)
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


@pytest.mark.parametrize("color", [False, True], ids=["letters", "colour"])
@pytest.mark.parametrize("route", ROUTES)
def test_every_route_fits_80_columns(route: str, color: bool) -> None:
    for mask, layout in ((Mask.causal(23), "zigzag"), (Mask.documents([60_000, 71_072]), "striped")):
        plan = make(layout, mask, 8, heads=(16, 4), route=route, comm_dtype="fp8")
        text = Text.from_ansi(drawn(plan, color)).plain
        assert max(map(len, text.splitlines())) <= 80
        grouped = plan.degrees.heads > 1
        assert ("A group is drawn as its first rank: its ranks share the heads." in text) == grouped
        assert ("after the gap the exchange of heads;" in " ".join(text.split())) == grouped
        assert "keys and values as fp8." in " ".join(text.split())


def test_groups_pair_by_pair() -> None:
    text = drawn(make("zigzag", Mask.causal(8), 4, heads=(4, 4), route="usp"))
    # Tokens lie on 0 1 2 3 3 2 1 0; ranks 0, 1 and ranks 2, 3 are groups.
    assert text.splitlines()[:14] == [
        "zigzag layout, causal mask, usp route (inner 2)",
        "4 ranks, 8 tokens, imbalance 1.000, sent forward: 0.58 of a plain ring",
        "",
        "   keys     0 1 2 3 3 2 1 0",
        "queries",
        "      0 0   0",
        "        1   0 0",
        "      2 2   2 2 2",
        "        3   2 2 2 2",
        "      4 3   2 2 2 2 2",
        "        2   2 2 2 2 2 2",
        "      6 1   0 0 0 0 0 0 0",
        "        0   0 0 0 0 0 0 0 0",
        "                           8",
    ]
    # Rows of 128 bytes a head. Each rank gives 2 tokens of 2 heads of q, k, v and out to its neighbour, 2 KiB; group 0 sends 2
    # rows of 2 KV heads, 1 KiB, group 1 all its 4. After the gap, the exchange of heads. 18 pairs on half of the heads.
    assert [line.split() for line in text.splitlines()[16:21]] == [
        ["rank", "pairs", "sent", "forward", "sent", "backward"],
        ["0", "0", "████████", "9", "░░░░····", "▒▒", "3.0KiB", "░░░░████", "▒▒", "7.0KiB"],
        ["1", "1", "████████", "9", "░░░░····", "▒▒", "3.0KiB", "░░░░████", "▒▒", "7.0KiB"],
        ["2", "2", "████████", "9", "▒▒▒▒····", "▒▒", "4.0KiB", "▒▒▒▒▒▒▒▒", "▒▒", "6.0KiB"],
        ["3", "3", "████████", "9", "▒▒▒▒····", "▒▒", "4.0KiB", "▒▒▒▒▒▒▒▒", "▒▒", "6.0KiB"],
    ]
    assert "The 2 ranks of a group compute the same pairs, each for 1/2 of the heads." in " ".join(text.split())


def test_a_route_that_was_chosen_says_why() -> None:
    plan = Planner(4, route="auto", heads=(8, 8)).plan(Layout.zigzag(8192, 4), Mask.causal(8192))
    assert plan.reason in " ".join(drawn(plan).split())
    file = io.StringIO()
    Console(file=file, width=80).print(plan_table(describe(plan, 64, 2)))
    assert plan.reason in " ".join(file.getvalue().split())


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
    assert ["0", "12", "150", "2", "50.00%", "12", "768", "B", "3.8", "KiB"] in rows
    assert ["1", "12", "150", "2", "50.00%", "6", "1.5", "KiB", "3.0", "KiB"] in rows
    assert ["total", "24", "300", "4", "100%", "18", "2.2", "KiB", "6.8", "KiB"] in rows
    assert "Bytes sent per batch row, for 2 KV heads of 16 at 2 bytes an element." in file.getvalue()


def test_table_of_a_route_that_exchanges_heads() -> None:
    # Ranks hold 8, 8 and 7 tokens. A row is 32 bytes a query head, 64 of keys and values, 128 of their gradients. Rank 0 sends
    # 2 heads of q and the KV head to each of two ranks, out of 2 heads back: 8 * 2 * (64 + 64) + 15 * 64. In backward d out,
    # then dq and the partial dk, dv: 8 * 2 * 64 + 15 * (64 + 128).
    report = describe(make("striped", Mask.causal(23), 3, heads=(6, 1), route="ulysses"), 16, 2)
    file = io.StringIO()
    Console(file=file, width=80).print(plan_table(report))
    rows = [line.split() for line in file.getvalue().splitlines()]
    assert ["0", "8", "92", "0.3", "33.33%", "15", "2.9", "KiB", "3.8", "KiB"] in rows
    assert ["total", "23", "276", "1", "100%", "46", "8.6", "KiB", "11.5", "KiB"] in rows
    assert "Bytes sent per batch row, for 6 query and 1 KV heads of 16 at 2 bytes an element." in " ".join(
        file.getvalue().split()
    )
    assert "Of these, the exchange of heads: 8.6 KiB forward, 11.5 KiB backward." in file.getvalue()
