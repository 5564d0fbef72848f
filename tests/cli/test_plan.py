"""`longspan plan`: table, JSON, options, and what is said when they do not fit."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner, Result

from longspan.cli.plan import parse_tokens, plan
from longspan.plan import Layout, Mask, plan_attention
from longspan.report import describe


def run(*words: str) -> Result:
    return CliRunner().invoke(plan, words)


def record(*words: str) -> dict[str, object]:
    result = run(*words, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_table() -> None:
    result = run("--seq-len", "8k", "--cp", "4", "--heads", "32/8")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0] == "zigzag layout, causal mask, ring route"
    assert lines[1] == "4 ranks, 8,192 tokens, imbalance 1.000, KV rows sent: 0.75 of a plain ring"
    assert lines[3].split() == ["rank", "tokens", "pairs", "share", "KV", "rows", "in", "forward", "backward"]
    assert lines[5].split() == ["0", "2,048", "8,389,632", "25.00%", "6,144", "12.0", "MiB", "60.0", "MiB"]
    assert lines[10].split() == ["total", "8,192", "33,558,528", "100%", "18,432", "72.0", "MiB", "216", "MiB"]
    assert max(map(len, lines)) <= 80


def test_json_is_the_record_of_the_same_plan() -> None:
    words = ("--seq-len", "96", "--cp", "3", "--layout", "striped", "--window", "10", "--slots", "40", "--heads", "6/2")
    made = plan_attention(Layout.striped(96, 3, slots=40), Mask.causal(96, window=10), heads=(6, 2))
    expected = describe(made, head_dim=64, itemsize=4).to_json()
    assert record(*words, "--head-dim", "64", "--dtype", "fp32") == json.loads(expected)


@pytest.mark.parametrize(
    ("words", "mask"),
    [
        (("--seq-len", "8192", "--mask", "full"), Mask.full(8192)),
        (("--documents", "5000,3000,192"), Mask.documents([5000, 3000, 192])),
        (("--documents", "5000, 3000,192", "--seq-len", "8k"), Mask.documents([5000, 3000, 192])),
        (("--documents", "4k,4k", "--mask", "full"), Mask.documents([4096, 4096], causal=False)),
        (("--documents", "4k,4k", "--window", "1k"), Mask.documents([4096, 4096], window=1024)),
        (("--seq-len", "8k", "--prefix", "1k"), Mask.prefix(8192, 1024)),
    ],
)
def test_masks(words: tuple[str, ...], mask: Mask) -> None:
    data = record(*words, "--cp", "2")
    expected = describe(plan_attention(Layout.zigzag(8192, 2), mask), 128, 2)
    assert (data["seq_len"], data["mask"], data["area"]) == (8192, expected.mask, expected.area)
    assert data["rows_sent"] == expected.rows_sent


@pytest.mark.parametrize(
    ("text", "tokens"), [("8192", 8192), ("8k", 8192), ("128K", 131_072), ("1M", 1_048_576), ("2m", 2_097_152)]
)
def test_suffixes(text: str, tokens: int) -> None:
    assert parse_tokens(text, "seq-len") == tokens


@pytest.mark.parametrize(
    ("words", "stderr"),
    [
        ((), "error: the length of the sequence is not given\n\nhint: set --seq-len 8k, or --documents\n"),
        (
            ("--seq-len", "8q"),
            "error: --seq-len '8q' is not a count of tokens\n\nhint: write it as 8192, 8k or 1M (k = 1,024)\n",
        ),
        (
            ("--documents", "5,-3"),
            "error: --documents '-3' is not a count of tokens\n\nhint: write it as 8192, 8k or 1M (k = 1,024)\n",
        ),
        (
            ("--seq-len", "8k", "--documents", "5000,3000,193"),
            "error: 3 documents sum to 8,193 tokens, not to the 8,192 of --seq-len\n\n"
            "hint: make them sum to --seq-len, or leave --seq-len out\n",
        ),
        (
            ("--seq-len", "8k", "--prefix", "10", "--mask", "full", "--window", "4"),
            "error: --prefix does not combine with --window or --mask full\n\nhint: leave out --window and --mask full\n",
        ),
        (
            ("--seq-len", "8k", "--heads", "32"),
            "error: --heads '32' is not query heads / KV heads\n\nhint: write it as 32/8, or 8/8 without GQA\n",
        ),
        (
            ("--seq-len", "8k", "--heads", "9/4"),
            "error: 9 query heads are not divisible by 4 KV heads\n\nhint: KV heads may be one of 1, 3, 9\n",
        ),
        (
            ("--seq-len", "8k", "--layout", "spiral"),
            "error: layout 'spiral' is not known\n\nhint: choose one of contiguous, zigzag, striped\n",
        ),
        (("--seq-len", "0"), "error: seq_len=0: a mask covers at least one token\n"),
    ],
)
def test_errors(words: tuple[str, ...], stderr: str) -> None:
    result = run("--cp", "2", *words)
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", stderr)


def test_unknown_route_and_slots_that_are_too_few() -> None:
    route = run("--cp", "2", "--seq-len", "8k", "--route", "teleport")
    assert (route.exit_code, route.stderr.splitlines()[0]) == (2, "error: route 'teleport' is not available")
    slots = run("--cp", "2", "--seq-len", "8k", "--slots", "4095")
    assert (slots.exit_code, slots.stderr.splitlines()[-1]) == (2, "hint: set slots to at least 4096, or leave it out")


@pytest.mark.parametrize("command", ["plan", "show"])
def test_starts_without_torch(command: str) -> None:
    program = (
        f"import sys; from longspan.cli.{command} import {command}\n"
        f"{command}(['--seq-len', '64', '--cp', '2'], standalone_mode=False)\n"
        "print(sorted({'torch', 'matplotlib'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"
    assert "zigzag layout, causal mask, ring route" in done.stdout
