"""Figures: valid files that carry their title, the same each time, and a clear word where none can be made."""

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from longspan.advise import Planner
from longspan.errors import SpecError
from longspan.names import ROUTES
from longspan.plan import Layout, Mask
from longspan.report import describe, draw_figure, save_figure
from longspan.report.figure import _corner_bands
from tests.plan.strategies import NAMES as LAYOUTS
from tests.report.plans import LEVELS, make


@pytest.mark.parametrize(
    ("layout", "mask", "ranks"),
    [
        ("zigzag", Mask.causal(8192), 4),
        ("striped", Mask.causal(8192), 64),
        ("contiguous", Mask.documents([5000, 3000, 192], window=100), 9),
        ("striped", Mask.full(3), 5),
        ("zigzag", Mask.bands(7, []), 1),
    ],
)
def test_svg_is_xml_with_its_title(tmp_path: Path, layout: str, mask: Mask, ranks: int) -> None:
    plan = make(layout, mask, ranks)
    save_figure(plan, describe(plan, 64, 2), tmp_path / "plan.svg")
    assert ElementTree.parse(tmp_path / "plan.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"
    text = words_of(tmp_path / "plan.svg")
    assert f"{layout} layout, " in text
    assert f"{ranks} rank" in text
    assert "key (token)" in text
    assert "query (token)" in text


def words_of(path: Path) -> str:
    root = ElementTree.parse(path).getroot()
    return " ".join("".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text"))


@pytest.mark.parametrize("route", ROUTES)
def test_captions_of_every_route(tmp_path: Path, route: str) -> None:
    plan = make("zigzag", Mask.causal(8192), 4, heads=(8, 4), route=route, comm_dtype="bf16")
    save_figure(plan, describe(plan, 64, 2), tmp_path / "plan.svg")
    text, heads = words_of(tmp_path / "plan.svg"), LEVELS[route] != "none"
    unit = "group" if heads else "rank"
    assert f"zigzag layout, causal mask, {route} route" in text
    assert f"A cell of 32 x 32 tokens shows the {unit} with most pairs; ties alternate." in text
    assert (f"Pale: keys of another {unit}." in text) == (LEVELS[route] != "all")
    assert (
        "A group has its first rank's colour: its ranks share the heads. Strips: owners before the exchange." in text
    ) == heads
    assert (" heads " in f"{text} ".split("pairs")[1]) == heads
    assert ("pairs x 1/" in text) == heads
    assert ("pairs computed" in text) != heads
    hops = not route.startswith(("exchange", "allgather"))
    assert ("stage: hops the keys have made (0 = own shard)" in text) == hops
    assert "keys and values as bf16." in text


def test_the_reason_stands_in_the_figure(tmp_path: Path) -> None:
    plan = Planner(4, route="auto", heads=(8, 8)).plan(Layout.zigzag(8192, 4), Mask.causal(8192))
    save_figure(plan, describe(plan, 64, 2), tmp_path / "plan.svg")
    assert plan.reason in words_of(tmp_path / "plan.svg")


def test_png_and_the_same_file_each_time(tmp_path: Path) -> None:
    plan = make("zigzag", Mask.causal(512), 4)
    for name in ("a.png", "b.png", "a.svg", "b.svg"):
        save_figure(plan, describe(plan, 64, 2), tmp_path / name)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_drawing_leaves_pyplot_alone(layout: str) -> None:
    plan = make(layout, Mask.causal(64), 2)
    figure = draw_figure(plan, describe(plan, 64, 2))
    assert len(figure.axes) == 10
    assert "matplotlib.pyplot" not in sys.modules


def test_corner_is_the_corner_of_the_mask() -> None:
    mask = Mask.documents([6, 3, 11], window=4)
    corner = Mask.bands(8, _corner_bands(mask.array, 8))
    assert (corner.dense() == mask.dense()[:8, :8]).all()


def test_other_suffixes_are_refused(tmp_path: Path) -> None:
    plan = make("zigzag", Mask.causal(8), 2)
    with pytest.raises(SpecError, match=r"'plan\.pdf'") as caught:
        save_figure(plan, describe(plan, 64, 2), tmp_path / "plan.pdf")
    assert caught.value.hint == "end the name with .svg or .png"


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    plan = make("zigzag", Mask.causal(8), 2)
    with pytest.raises(SpecError, match="cannot be written: No such file or directory"):
        save_figure(plan, describe(plan, 64, 2), tmp_path / "no" / "plan.svg")


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    plan = make("zigzag", Mask.causal(8), 2)
    with pytest.raises(SpecError, match="drawing a figure needs matplotlib, which is not installed") as caught:
        save_figure(plan, describe(plan, 64, 2), tmp_path / "plan.svg")
    assert caught.value.hint == "pip install 'longspan[plot]'"
    assert not list(tmp_path.iterdir())
