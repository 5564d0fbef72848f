"""`longspan show`: the drawing on stdout or in a file; and `friendly`, which words every command's errors."""

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from pydantic import BaseModel, Field

from longspan.cli.exits import friendly
from longspan.cli.show import show
from longspan.data.pack_corpus import report_of
from longspan.errors import CommError
from longspan.report.words import short_count
from longspan.train.pack_run import pack_run as write_packs
from longspan.train.train_config import PackConfig
from tests.train.tiny import make_config, write_corpus


def test_draws_on_stdout() -> None:
    result = CliRunner().invoke(show, ["--seq-len", "8k", "--cp", "4"])
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0] == "zigzag layout, causal mask, ring route"
    assert lines[3] == "   keys   " + "".join(rank * 8 for rank in "01233210")
    assert lines[36] == "        0 " + "0" * 64
    assert max(map(len, lines)) <= 80


def test_draws_groups_where_heads_are_exchanged() -> None:
    words = ["--seq-len", "8k", "--cp", "4", "--heads", "8/8", "--route", "usp", "--inner", "2", "--comm-dtype", "bf16"]
    result = CliRunner().invoke(show, words)
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0] == "zigzag layout, causal mask, usp route (inner 2), bf16 in flight"
    assert lines[3] == "   keys   " + "".join(rank * 8 for rank in "01233210")
    assert lines[36] == "        0 " + "0" * 64
    assert lines[20] == "        3 " + "2" * 32


@pytest.mark.parametrize("name", ["plan.svg", "plan.png"])
def test_writes_a_figure(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    result = CliRunner().invoke(show, ["--documents", "500,300,224", "--cp", "2", "--output", str(path)])
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", f"wrote {path}\n")
    if name.endswith(".svg"):
        assert "zigzag layout, 3 causal documents, ring route" in "".join(ElementTree.parse(path).getroot().itertext())
    else:
        assert path.read_bytes().startswith(b"\x89PNG")


def test_another_suffix_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(show, ["--seq-len", "8k", "--cp", "2", "--output", str(tmp_path / "plan.pdf")])
    assert result.exit_code == 2
    assert result.stderr == "error: a figure cannot be written as 'plan.pdf'\n\nhint: end the name with .svg or .png\n"


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = CliRunner().invoke(show, ["--seq-len", "8k", "--cp", "2", "--output", str(tmp_path / "plan.svg")])
    assert result.exit_code == 2
    assert result.stderr == (
        "error: drawing a figure needs matplotlib, which is not installed\n\nhint: pip install 'longspan[plot]'\n"
    )


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    write_corpus(tmp_path)
    config = PackConfig.model_validate(
        make_config(tmp_path, data__seq_len=200, data__packing="fit", parallel__cp=4).model_dump(exclude_unset=True)
    )
    write_packs(config, tmp_path / "rows.parquet")
    return tmp_path / "rows.parquet"


def test_draws_a_manifest_on_stdout(manifest: Path) -> None:
    result = CliRunner().invoke(show, ["--manifest", str(manifest)])
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].endswith("rows, up to 200 tokens each, packing fit")
    assert lines[1].startswith("zigzag layout, ring route, 4 ranks; in 2 layers, 2 query and 1 KV heads of 8")
    report = report_of(manifest)
    (row,) = [line.split() for line in lines if line.split()[:1] == ["64"]]
    longer = (report.lengths > 32) & (report.lengths <= 64)
    assert row[2] == f"{longer.mean():.1%}"
    assert row[4] == f"{report.lengths[longer].sum() / report.lengths.sum():.1%}"
    ranks = [line.split() for line in lines[-4:]]
    assert [row[0] for row in ranks] == ["0", "1", "2", "3"]
    assert [row[2] for row in ranks] == [short_count(pairs) for pairs in report.rank_pairs.sum(axis=0).tolist()]


@pytest.mark.parametrize("name", ["rows.svg", "rows.png"])
def test_writes_a_figure_of_a_manifest(manifest: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    result = CliRunner().invoke(show, ["--manifest", str(manifest), "--output", str(path)])
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", f"wrote {path}\n")
    if name.endswith(".svg"):
        text = "".join(ElementTree.parse(path).getroot().itertext())
        report = report_of(manifest)
        assert "rows.parquet: zigzag layout, ring route, 4 ranks" in text
        assert f"fill of rows: mean {report.fill.mean():.4f}, worst {report.fill.min():.4f}" in text
        assert f"mean {report.imbalance.mean():.3f}, worst {report.imbalance.max():.3f}" in text
    else:
        assert path.read_bytes().startswith(b"\x89PNG")


def test_a_manifest_takes_no_options_of_a_plan(manifest: Path) -> None:
    result = CliRunner().invoke(show, ["--manifest", str(manifest), "--cp", "4", "--layout", "zigzag"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        "error: --cp, --layout does not combine with --manifest: the manifest holds these settings\n\n"
        "hint: remove --manifest or the other options\n"
    )


def test_a_plan_needs_a_degree() -> None:
    result = CliRunner().invoke(show, ["--seq-len", "8k"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "error: no context-parallel degree is given\n\nhint: set --cp 8\n"


class Settings(BaseModel):
    steps: int = Field(gt=0)
    name: str


@click.command()
@click.argument("what")
@friendly
def failing(what: str) -> None:
    match what:
        case "comm":
            raise CommError("rank 3 is gone")
        case "settings":
            Settings(steps=-1, name=5)  # type: ignore[arg-type]
        case "bug":
            raise KeyError("ours")


def test_friendly_words_our_errors() -> None:
    result = CliRunner().invoke(failing, ["comm"])
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", "error: rank 3 is gone\n")


def test_friendly_lists_each_value_that_is_not_valid() -> None:
    result = CliRunner().invoke(failing, ["settings"])
    assert result.exit_code == 2
    assert result.stderr == (
        "error: Settings: 2 invalid values\n"
        "  steps: Input should be greater than 0 (got -1)\n"
        "  name: Input should be a valid string (got 5)\n"
        "\n"
        "hint: correct the configuration file, or use --set section.key=value\n"
    )


def test_friendly_lets_bugs_through() -> None:
    assert isinstance(CliRunner().invoke(failing, ["bug"]).exception, KeyError)
