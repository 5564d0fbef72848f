"""A manifest in numbers, worked out by hand: two rows of 8 tokens on two ranks."""

import io
import sys
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from longspan.report import PackReport, draw_packs, print_packs
from longspan.report.packs import pack_lines


def make(**changes: Any) -> PackReport:
    """Documents 4 + 3 and 8, which has a rest of 1 elsewhere: 10 + 6 pairs, evenly, and 36, of which rank 1 has 27."""
    values: dict[str, Any] = {
        "name": "rows.parquet", "epochs": 1, "seq_len": 8, "packing": "fit", "cp": 2, "layout": "zigzag",
        "route": "ring", "masks": {"full": 1}, "heads": None, "head_dim": 4, "itemsize": 2,
        "lengths": np.array([4, 3, 8]), "num_documents": 3, "num_cut": 0,
        "tokens": np.array([7, 8]), "padding": np.array([1, 0]), "pairs": np.array([16, 36]),
        "rank_tokens": np.array([[4, 3], [4, 4]]), "rank_pairs": np.array([[8.0, 8.0], [9.0, 27.0]]),
        "rank_blocks": np.array([[1.0, 1.0], [1.0, 2.0]]), "rank_bytes": np.array([[0, 0], [512, 512]]),
    }  # fmt: skip
    return PackReport(**(values | changes))


def test_numbers_by_hand() -> None:
    report = make()
    assert report.fill.tolist() == [0.875, 1.0]
    assert report.imbalance.tolist() == [1.0, 1.5]
    assert [tuple(part) for part in report.bins] == [
        (4, pytest.approx(2 / 3), pytest.approx(7 / 15), pytest.approx(16 / 52)),
        (8, pytest.approx(1 / 3), pytest.approx(8 / 15), pytest.approx(36 / 52)),
    ]
    told = report.summary()
    assert (told["packs"], told["tokens"], told["padding"], told["pairs"], told["bytes"]) == (2, 15, 1, 52, 1024)
    assert (told["fill_mean"], told["fill_worst"], told["imbalance_mean"], told["imbalance_worst"]) == (
        0.9375, 0.875, 1.25, 1.5,
    )  # fmt: skip


def test_bins_between_are_there() -> None:
    report = make(lengths=np.array([1, 2, 9]))
    assert [(part.most, round(part.documents, 2)) for part in report.bins] == [
        (1, 0.33),
        (2, 0.33),
        (4, 0),
        (8, 0),
        (16, 0.33),
    ]


def test_words() -> None:
    lines = dict(pack_lines(make(num_cut=1, masks={"window-4": 2, "full": 1}, heads=(4, 2))))
    assert lines["documents"] == "3, 1 of them cut: 3 pieces"
    assert lines["imbalance"] == "mean 1.250, worst 1.500 x mean pairs: zigzag layout, 2 ranks"
    assert lines["pairs"] == "52 in 3 layers (2 window-4, 1 full), forward"
    assert lines["sent"].startswith("1.0 KiB in 3 layers (2 window-4, 1 full), 4 query and 2 KV heads of 4 at 2 bytes")


def test_rows_without_a_pair_are_even() -> None:
    assert make(rank_pairs=np.zeros((2, 2))).imbalance.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(("encoding", "block"), [("utf-8", "█"), ("ascii", "#")])
def test_text_fits_80_columns(encoding: str, block: str) -> None:
    written = io.TextIOWrapper(io.BytesIO(), encoding)
    print_packs(Console(width=80, file=written), make())
    written.seek(0)
    lines = written.read().splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.replace("|", " ").split()[-3:] for line in lines[-2:]] == [
        ["1.000", "x", "mean"],
        ["1.500", "x", "mean"],
    ]
    assert block * 12 in lines[-1]


def test_drawing_leaves_pyplot_alone() -> None:
    figure = draw_packs(make())
    assert len(figure.axes) == 4
    assert [len(axes.patches) for axes in figure.axes] == [6, 0, 2, 0]
    assert "matplotlib.pyplot" not in sys.modules
