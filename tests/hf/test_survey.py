"""The survey of causal models on some types, and what it says of a model that is wrong; all types at night."""

import json
from unittest.mock import patch

import pytest
from benchmarks.survey import EXACT, ISLANDS, TABLE, Entry, main, page, survey, table
from click.testing import CliRunner

from benchmarks import survey as module


@pytest.mark.parametrize("kind", ["llama", "gpt_oss", "minicpm3"])
def test_equal_in_fp64(kind: str) -> None:
    """Grouped heads; sinks and windows shorter than a document; latent attention."""
    entry = survey(kind)
    assert (entry.verdict, entry.islands) == ("equal", "")
    assert entry.loss_error is not None
    assert entry.loss_error <= EXACT[0]
    assert entry.gradient_error is not None
    assert entry.gradient_error <= EXACT[1]


def test_equal_but_for_parts_in_fp32() -> None:
    entry = survey("gemma2")
    assert entry.verdict == "equal"
    assert entry.islands
    assert entry.loss_error is not None
    assert entry.loss_error <= ISLANDS[0]


def test_refused_by_the_check() -> None:
    entry = survey("bloom")
    assert entry.verdict == "refused"
    assert "without calling the attention function" in entry.detail


def test_a_model_that_the_check_misses_is_different() -> None:
    """Llama 4's temperature counts tokens of the shard; without the check, the comparison finds it."""
    with patch.object(module, "check", lambda *_: None):
        entry = survey("llama4_text")
    assert entry.verdict == "different"


def test_the_table_by_hand() -> None:
    entries = [
        Entry("llama", "LlamaForCausalLM", "equal", "", 2e-16, 3e-15),
        Entry("gemma2", "Gemma2ForCausalLM", "equal", "", 2e-8, 3e-7, "float"),
        Entry("bloom", "BloomForCausalLM", "refused", "a | b"),
    ]
    assert table(entries)[2:] == [
        "| llama | LlamaForCausalLM | equal | 2e-16, 3e-15 |",
        "| gemma2 | Gemma2ForCausalLM | equal | 2e-08, 3e-07, fp32 islands |",
        "| bloom | BloomForCausalLM | refused | a / b |",
    ]
    assert "2 equal, 1 refused, 0 not built, 0 different" in page(entries)


def test_the_page_in_the_docs_holds_the_acceptance() -> None:
    verdicts = [line.split("|")[3].strip() for line in TABLE.read_text().splitlines() if line.startswith("| ")][1:]
    assert verdicts.count("equal") >= 100
    assert verdicts.count("not built") <= 40
    assert set(verdicts) == {"equal", "refused", "not built"}


@pytest.mark.nightly
def test_every_causal_type() -> None:
    result = CliRunner().invoke(main, ["--json", "--limit", "60"])
    verdicts = [entry["verdict"] for entry in json.loads(result.stdout)["types"]]
    assert result.exit_code == 0
    assert verdicts.count("equal") >= 100
    assert verdicts.count("not built") <= 40
    assert "different" not in verdicts
