"""`longspan pack`: the summary against the rows, what cannot be packed, and files that are there."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from longspan.cli.pack import pack
from tests.train.tiny import make_config, to_toml, write_corpus


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_corpus(tmp_path)
    config = make_config(tmp_path, data__packing="fit", data__seq_len=64, parallel__cp=3)
    (tmp_path / "run.toml").write_text(to_toml(config))
    return tmp_path


def run(folder: Path, *words: str) -> Result:
    return CliRunner().invoke(pack, [str(folder / "run.toml"), "--output", str(folder / "rows.parquet"), *words])


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return pq.read_table(folder / "rows.parquet").to_pylist()


def test_the_summary_is_that_of_the_rows(folder: Path) -> None:
    result = run(folder, "--json", "--epochs", "2")
    assert (result.exit_code, result.stderr) == (0, "")
    told, rows = json.loads(result.stdout), rows_of(folder)
    assert {row["epoch"] for row in rows} == {0, 1}
    pieces = [(row["epoch"], d) for row in rows for d in row["documents"]]
    cut = {(epoch, d["document"]) for epoch, d in pieces if d["start"]}
    imbalance = [max(row["rank_pairs"]) * 3 / sum(row["rank_pairs"]) for row in rows]
    assert told == {
        "packs": len(rows),
        "epochs": 2,
        "documents": 2 * 39,  # one of 40 is held out
        "documents_cut": len(cut),
        "pieces": len(pieces),
        "tokens": sum(row["tokens"] for row in rows),
        "padding": sum(row["padding"] for row in rows),
        "fill_mean": pytest.approx(sum(row["tokens"] for row in rows) / len(rows) / 64),
        "fill_worst": min(row["tokens"] for row in rows) / 64,
        "pairs": sum(row["pairs"] for row in rows),
        "cp": 3,
        "layout": "zigzag",
        "route": "ring",
        "imbalance_mean": pytest.approx(sum(imbalance) / len(rows)),
        "imbalance_worst": pytest.approx(max(imbalance)),
        "bytes": sum(sum(row["rank_bytes"]) for row in rows),
        "manifest": str(folder / "rows.parquet"),
    }
    assert told["documents_cut"] > 0


def test_without_a_model_counts_are_of_one_layer(folder: Path) -> None:
    text = (folder / "run.toml").read_text()
    start, stop = text.index("[model]"), text.index("[parallel]")
    assert run(folder, "--quiet").exit_code == 0
    with_model = rows_of(folder)
    (folder / "run.toml").write_text(text[:start] + text[stop:])
    assert run(folder, "--quiet", "--force").exit_code == 0
    for row, other in zip(rows_of(folder), with_model, strict=True):
        assert row["pairs"] == sum(n * (n + 1) // 2 for n in row["lengths"]) == sum(row["rank_pairs"])
        assert other["pairs"] == 2 * row["pairs"]
        assert other["rank_blocks"] == [2 * blocks for blocks in row["rank_blocks"]]
        assert sum(row["rank_tokens"]) == row["tokens"] == sum(row["lengths"])
        assert row["documents"] == other["documents"]


def test_the_table(folder: Path) -> None:
    result = run(folder)
    assert (result.exit_code, result.stderr) == (0, "")
    rows = rows_of(folder)
    told = " ".join(result.stdout.split())
    assert f"rows {len(rows)} " in told
    assert "documents 39, " in told
    assert "x mean pairs: zigzag layout, 3 ranks" in told
    assert "in 2 layers, 2 query and 1 KV heads of 8 at 8 bytes an element, forward and backward: ring route" in told
    assert "written to " in told


def test_a_file_that_is_there_stays(folder: Path) -> None:
    (folder / "rows.parquet").write_text("mine")
    result = run(folder)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        f"error: {folder}/rows.parquet exists\n\nhint: choose another path, or use --force to overwrite the file\n"
    )
    assert (folder / "rows.parquet").read_text() == "mine"
    assert run(folder, "--force").exit_code == 0
    assert rows_of(folder)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            ("--output", "{folder}/none/rows.parquet"),
            "{folder}/none/rows.parquet cannot be written: folder",
        ),
        (
            ("--set", "data.manifest=old.parquet"),
            "data.manifest=old.parquet: the rows of this configuration are already packed",
        ),
        (
            ("--set", "parallel.route=ulysses", "--set", "parallel.cp=3"),
            "ulysses degree 3 does not divide 2 query heads",
        ),
        (("--set", "parallel.cpp=3"), "PackConfig: 1 invalid value\n  parallel.cpp: unknown key"),
        (("--set", "init_from=weights"), "PackConfig: 1 invalid value\n  both model and init_from are given"),
    ],
)
def test_what_cannot_be_packed_is_refused_before_the_corpus_is_read(
    folder: Path, words: tuple[str, ...], error: str
) -> None:
    with patch("longspan.train.pack_run.open_store") as opened:
        result = run(folder, *(word.replace("{folder}", str(folder)) for word in words))
    opened.assert_not_called()
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {error.replace('{folder}', str(folder))}")
    assert not (folder / "rows.parquet").exists()
