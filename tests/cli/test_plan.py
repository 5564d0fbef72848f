"""`longspan plan`: table, JSON, options, and what is said when they do not fit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from longspan.advise import Costs, Planner
from longspan.cli.plan import parse_tokens, plan
from longspan.errors import SpecError
from longspan.names import LAYOUTS, ROUTES
from longspan.plan import Layout, Mask, plan_attention
from longspan.report import describe, describe_topology
from longspan.topology import Topology


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
    assert lines[1] == "4 ranks, 8,192 tokens, imbalance 1.000, sent forward: 0.75 of a plain ring"
    assert lines[3].split() == ["rank", "tokens", "pairs", "blocks", "share", "rows", "in", "forward", "backward"]
    assert lines[5].split() == ["0", "2,048", "8,389,632", "520", "25.00%", "6,144", "12.0", "MiB", "60.0", "MiB"]
    assert lines[10].split() == ["total", "8,192", "33,558,528", "2.1k", "100%", "18,432", "72.0", "MiB", "216", "MiB"]
    assert max(map(len, lines)) <= 80


def test_a_million_tokens_fit_80_columns() -> None:
    lines = run("--seq-len", "1M", "--cp", "64", "--heads", "32/8", "--layout", "contiguous").stdout.splitlines()
    assert lines[-3].split()[:5] == ["total", "1,048,576", "549,756,338,176", "33.6M", "100%"]
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
        ((), "error: no sequence length is given\n\nhint: set --seq-len 8k, or --documents\n"),
        (
            ("--seq-len", "8q"),
            "error: --seq-len '8q' is not a number of tokens\n\nhint: write it as 8192, 8k or 1M (k = 1,024)\n",
        ),
        (
            ("--documents", "5,-3"),
            "error: --documents '-3' is not a number of tokens\n\nhint: write it as 8192, 8k or 1M (k = 1,024)\n",
        ),
        (
            ("--seq-len", "8k", "--documents", "5000,3000,193"),
            "error: the 3 lengths of --documents sum to 8,193 tokens, but --seq-len is 8,192\n\n"
            "hint: make the lengths sum to --seq-len, or remove --seq-len\n",
        ),
        (
            ("--seq-len", "8k", "--prefix", "10", "--mask", "full", "--window", "4"),
            "error: --prefix does not combine with --window or --mask full\n\nhint: remove --window and --mask full\n",
        ),
        (
            ("--seq-len", "8k", "--heads", "32"),
            "error: --heads '32' is not of the form query heads/KV heads\n\nhint: write it as 32/8, or 8/8 without GQA\n",
        ),
        (
            ("--seq-len", "8k", "--heads", "9/4"),
            "error: 9 query heads are not divisible by 4 KV heads\n\nhint: KV heads may be one of 1, 3, 9\n",
        ),
        (
            ("--seq-len", "8k", "--layout", "spiral"),
            f"error: layout 'spiral' is not known\n\nhint: choose one of {', '.join(LAYOUTS)}\n",
        ),
        (("--seq-len", "0"), "error: seq_len=0: a mask covers at least one token\n"),
    ],
)
def test_errors(words: tuple[str, ...], stderr: str) -> None:
    result = run("--cp", "2", *words)
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", stderr)


@pytest.mark.parametrize("route", ROUTES)
def test_every_route(route: str) -> None:
    inner = 2 if "-" in route or route == "usp" else None
    words = ("--seq-len", "96", "--cp", "4", "--heads", "8/2", "--route", route, "--comm-dtype", "fp8")
    made = plan_attention(Layout.zigzag(96, 4), Mask.causal(96), route, (8, 2), inner, comm_dtype="fp8")
    data = record(*words, *(("--inner", "2") if inner else ()))
    assert data == json.loads(describe(made, 128, 2).to_json())
    assert (data["route"], data["inner"], data["comm_dtype"], data["reason"]) == (route, inner, "fp8", "")


def test_auto_says_why_in_the_table_and_the_record(tmp_path: Path) -> None:
    words = ("--seq-len", "8k", "--cp", "8", "--heads", "32/8", "--route", "auto")
    layout, mask = Layout.zigzag(8192, 8), Mask.causal(8192)
    made = Planner(8, route="auto", heads=(32, 8)).plan(layout, mask)
    data = record(*words)
    assert (data["route"], data["reason"]) == (made.route, made.reason)
    table = run(*words).stdout
    assert made.reason in " ".join(table.split())
    assert table.index(made.reason[:20]) < table.index("rows in")

    costs = Costs(node_bandwidth=1e9, all_to_all_bandwidth=1e8, source="measured between 8 ranks")
    costs.save(tmp_path / "costs.json")
    data = record(*words, "--costs", str(tmp_path / "costs.json"), "--ranks-per-node", "4")
    made = Planner(8, route="auto", heads=(32, 8), ranks_per_node=4, costs=costs).plan(layout, mask)
    assert (data["route"], data["reason"]) == (made.route, made.reason)
    assert data["reason"].endswith("(measured between 8 ranks)")


def test_usp_that_is_a_ring_says_so() -> None:
    words = ("--seq-len", "96", "--cp", "4", "--heads", "9/3", "--route", "usp")
    assert (record(*words)["inner"], record(*words)["reason"]) == (1, "inner 1: ring, no heads are exchanged")
    assert "\ninner 1: ring, no heads are exchanged\n" in "\n".join(map(str.rstrip, run(*words).stdout.splitlines()))


def test_heads_stay_within_a_node_where_inner_is_chosen() -> None:
    words = ("--seq-len", "96", "--cp", "8", "--heads", "8/8", "--route", "usp")
    assert [record(*words)["inner"], record(*words, "--ranks-per-node", "4")["inner"]] == [8, 4]


@pytest.mark.parametrize(
    ("words", "stderr"),
    [
        (
            ("--route", "ulysses"),
            "error: route 'ulysses' exchanges heads, but heads is not given\n\nhint: set --heads Q/KV\n",
        ),
        (
            ("--route", "ulysses", "--heads", "9/3"),
            "error: ulysses degree 4 does not divide 9 query heads (3 KV heads)\n\n"
            "hint: use a ulysses degree of 1, 3 or 9; or --route ring\n",
        ),
        (
            ("--route", "ulysses", "--heads", "6/3", "--tp", "2"),
            "error: ulysses degree 4 does not divide 6 query heads (12 before tp=2) (3 KV heads)\n\n"
            "hint: use a ulysses degree of 1, 2, 3 or 6; lower tp; "
            "keep 4 ranks by --route usp --inner 2 (ulysses inside, ring outside); or --route ring\n",
        ),
        (
            ("--route", "usp", "--inner", "2", "--heads", "9/3"),
            "error: inner ulysses degree 2 does not divide 9 query heads (3 KV heads)\n\n"
            "hint: set --inner 1; or --route ring\n",
        ),
        (
            ("--route", "usp", "--inner", "3", "--heads", "8/8"),
            "error: inner=3 does not divide the 4 ranks of the group\n\nhint: use 1, 2, 4\n",
        ),
        (
            ("--inner", "2"),
            "error: inner=2 does not apply to route 'ring', which has one level\n\nhint: leave --inner out\n",
        ),
        (
            ("--costs", "costs.json"),
            "error: --costs has no effect on --route ring and --layout zigzag\n\n"
            "hint: set --route auto, or --layout balanced with --heads; or remove --costs\n",
        ),
        (
            ("--ranks-per-node", "2"),
            "error: --ranks-per-node has no effect on --route ring: the inner degree is not chosen\n\n"
            "hint: remove --ranks-per-node\n",
        ),
        (
            ("--route", "usp", "--inner", "2", "--ranks-per-node", "2", "--heads", "8/8"),
            "error: --ranks-per-node has no effect on --route usp --inner 2: the inner degree is not chosen\n\n"
            "hint: remove --ranks-per-node\n",
        ),
        (
            ("--route", "auto", "--costs", "costs.json"),
            "error: cannot read costs.json: No such file or directory\n\nhint: longspan bench calibrate writes such a file\n",
        ),
        (
            ("--window", "0"),
            "error: window=0 is below 1: a query sees at least itself\n\nhint: leave --window out for no window\n",
        ),
    ],
)
def test_what_a_route_refuses(
    words: tuple[str, ...], stderr: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("--cp", "4", "--seq-len", "8k", *words)
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", stderr)


@pytest.mark.parametrize("words", [("--comm-dtype", "int8"), ("--tp", "0"), ("--ranks-per-node", "0")])
def test_values_that_an_option_does_not_take(words: tuple[str, ...]) -> None:
    result = run("--cp", "4", "--seq-len", "8k", *words)
    assert result.exit_code == 2
    assert f"Invalid value for '{words[0]}'" in result.stderr


def test_the_python_hint_of_a_window_stays() -> None:
    with pytest.raises(SpecError, match="window=0") as caught:
        Mask.causal(8, window=0)
    assert caught.value.hint == "use window=None for no window"


def test_unknown_route_and_slots_that_are_too_few() -> None:
    route = run("--cp", "2", "--seq-len", "8k", "--route", "teleport")
    assert (route.exit_code, route.stderr.splitlines()[0]) == (2, "error: route 'teleport' is not known")
    slots = run("--cp", "2", "--seq-len", "8k", "--slots", "4095")
    assert (slots.exit_code, slots.stderr.splitlines()[-1]) == (
        2,
        "hint: set slots to at least 4096, or leave slots out",
    )


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


EXAMPLE = ("--world", "16", "--tp", "2", "--cp", "2", "--pp", "2")


def test_groups_of_a_world() -> None:
    data = record(*EXAMPLE)
    assert (data["world"], data["order"], data["warnings"]) == (16, "tp-cp-ep-dp-pp", [])
    assert data["degrees"] == {"dp": 2, "tp": 2, "pp": 2, "cp": 2, "ep": 1, "edp": 8, "dp_replicate": 1}
    assert data["nodes"] == [list(range(8)), list(range(8, 16))]
    assert data["groups"] == {
        "tp": [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]],
        "dp": [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]],
        "cp": [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]],
        "pp": [[0, 8], [1, 9], [2, 10], [3, 11], [4, 12], [5, 13], [6, 14], [7, 15]],
        "tp-dp": [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]],
        "tp-cp": [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]],
        "tp-pp": [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]],
        "dp-cp": [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]],
        "dp-pp": [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]],
        "cp-pp": [[0, 2, 8, 10], [1, 3, 9, 11], [4, 6, 12, 14], [5, 7, 13, 15]],
        "tp-dp-cp": [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]],
        "tp-dp-pp": [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]],
        "tp-cp-pp": [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]],
        "dp-cp-pp": [[0, 2, 4, 6, 8, 10, 12, 14], [1, 3, 5, 7, 9, 11, 13, 15]],
        "tp-dp-cp-pp": [list(range(16))],
    }


def test_every_option_of_a_world() -> None:
    words = ("--world", "32", "--dp", "4", "--tp", "2", "--pp", "2", "--cp", "2", "--ep", "4")
    words += ("--dp-replicate", "2", "--order", "cp-tp-ep-dp-pp", "--ranks-per-node", "4", "--domain", "2")
    topology = Topology(4, tp=2, pp=2, cp=2, ep=4, dp_replicate=2, order="cp-tp-ep-dp-pp")
    assert record(*words) == json.loads(describe_topology(topology, 4, 2).to_json())


def test_table_of_a_world() -> None:
    result = run(*EXAMPLE, "--ranks-per-node", "4")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert lines[0] == "16 ranks: dp 2 x tp 2 x pp 2 x cp 2"
    assert "4 nodes of 4 ranks" in lines
    assert "tp-pp     [0,1,8,9] [2,3,10,11] [4,5,12,13] [6,7,14,15]" in lines
    assert max(map(len, lines)) <= 80
    assert "layout" not in result.stdout


def test_a_world_and_a_sequence() -> None:
    sequence = ("--cp", "4", "--seq-len", "8k", "--heads", "4/4", "--route", "usp")
    data = record("--world", "16", "--tp", "2", *sequence, "--ranks-per-node", "4")
    # On a node of 4 lie 2 ranks of a CP group, so that 2 exchange heads.
    plan_alone = record(*sequence, "--tp", "2", "--ranks-per-node", "2")
    assert (data["plan"], plan_alone["inner"]) == (plan_alone, 2)
    assert data["groups"]["cp"] == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]
    result = run("--world", "4", "--cp", "2", "--documents", "24,40", "--ranks-per-node", "2")
    assert (result.exit_code, result.stderr) == (0, "")
    world, plan_table = result.stdout.split("\n\nzigzag layout, 2 causal documents, ring route\n")
    assert world.startswith("4 ranks: dp 2 x tp 1 x pp 1 x cp 2\n")
    assert plan_table.startswith("2 ranks, 64 tokens")


@pytest.mark.parametrize(
    ("words", "stderr"),
    [
        (
            ("--world", "16", "--cp", "3"),
            "error: cp 3 does not divide a world of 16 ranks\n\n"
            "hint: set cp to 1, 2, 4, 8 or 16; or start a multiple of 3 ranks\n",
        ),
        (
            ("--world", "16", "--ranks-per-node", "6"),
            "error: nodes of 6 ranks do not make a world of 16\n\n"
            "hint: set --ranks-per-node to 1, 2, 4, 8 or 16, or start a multiple of 6 ranks\n",
        ),
        (
            ("--world", "16", "--order", "dp-tp"),
            "error: order 'dp-tp' does not name each of tp, cp, ep, dp, pp once\n\n"
            'hint: write the axes from fastest to slowest, such as "tp-cp-ep-dp-pp"\n',
        ),
        (
            ("--world", "16", "--heads", "8/8", "--mask", "full"),
            "error: --mask, --heads have no effect without --seq-len\n\n"
            "hint: set --seq-len 8k, or --documents, to plan a sequence over cp; or leave --mask, --heads out\n",
        ),
        (
            ("--seq-len", "8k", "--cp", "2", "--pp", "2"),
            "error: --pp has no effect without --world\n\n"
            "hint: set --world to the ranks of the run; or leave --pp out\n",
        ),
    ],
)
def test_what_a_world_refuses(words: tuple[str, ...], stderr: str) -> None:
    result = run(*words)
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", stderr)


def test_a_world_starts_without_torch() -> None:
    program = (
        "import sys; from longspan.cli.main import main\n"
        "main(['plan', '--world', '1024', '--tp', '8', '--cp', '4', '--ep', '16'], standalone_mode=False)\n"
        "print(sorted({'torch', 'matplotlib'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"
    assert done.stdout.startswith("1,024 ranks: dp 32 x tp 8 x pp 1 x cp 4, ep 16 x edp 64 a stage\n")
