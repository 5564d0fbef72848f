"""`benchmarks.packed`, longspan alone on a short row: its rows, a right result and a ratio of every contender, the record."""

import json
from dataclasses import fields

import pytest
import torch
from benchmarks.packed import PackedReport, _by_document, main, make_rows
from benchmarks.peers.cases import Case, make_inputs
from benchmarks.peers.measure import sdpa_run
from click import UsageError
from click.testing import CliRunner

SEQ_LEN = 512


def test_rows_are_full_and_do_not_change():
    rows = make_rows(SEQ_LEN)
    assert list(rows) == ["few", "middle", "many"]
    assert [sum(lengths) for lengths in rows.values()] == [SEQ_LEN] * 3
    assert min(map(min, rows.values())) > 0
    assert 2 <= len(rows["few"]) <= len(rows["middle"]) < len(rows["many"])
    assert make_rows(SEQ_LEN) == rows
    with pytest.raises(UsageError, match="does not fill a row of 100000000 tokens"):
        make_rows(100_000_000)


def test_documents_one_by_one_are_the_row():
    case = Case("packed", 4, 2, 60, (30, 7, 23))
    inputs = make_inputs(case)
    parts = _by_document(case, inputs)()
    for index, right in enumerate(sdpa_run(case, inputs)()):
        torch.testing.assert_close(torch.cat(parts[index::4], dim=2), right)


def test_every_contender_is_right_and_has_a_ratio(tmp_path):
    record = tmp_path / "packed.json"
    # Other programs may use the cores: nothing here depends on the figures.
    options = f"--seq-len {SEQ_LEN} --repeats 1 --foreign 1 --only many --no-peers --json {record}"
    shown = CliRunner().invoke(main, options.split(), catch_exceptions=False)
    [packed] = json.loads(record.read_text())
    assert set(packed) == {field.name for field in fields(PackedReport)}
    lengths = make_rows(SEQ_LEN)["many"]
    assert packed["report"]["case"]["lengths"] == list(lengths)
    assert (packed["row"], packed["documents"], packed["longest"]) == ("many", len(lengths), max(lengths))
    assert packed["pairs"] == sum(length * (length + 1) // 2 for length in lengths)
    assert packed["share"] == packed["pairs"] / (SEQ_LEN * (SEQ_LEN + 1) // 2)
    layouts = {"balanced": ("exchange", "ring", "ulysses"), "zigzag": ("exchange", "ring")}
    names = [f"longspan {layout} {route}" for layout, routes in layouts.items() for route in routes]
    results = packed["report"]["results"]
    assert [result["name"] for result in results] == list(packed["plans"]) == names
    for result in results:
        assert (result["status"], result["ratio"]["repeats"], result["dropped"]) == ("exact", 1, 0)
        assert result["ratio"]["median"] > 0
        assert result["name"] in shown.output
    assert (
        packed["plans"]["longspan balanced exchange"]["imbalance"]
        < packed["plans"]["longspan zigzag ring"]["imbalance"]
    )
    assert packed["plans"]["longspan balanced ulysses"]["imbalance"] == 1
    assert packed["fastest"]["balanced"] in names[:3]
    assert packed["fastest"]["zigzag"] in names[3:]
    assert packed["fastest"]["peer"] == ""
    assert list(packed["against"]) == ["zigzag"]
    assert packed["against"]["zigzag"]["repeats"] == 1
