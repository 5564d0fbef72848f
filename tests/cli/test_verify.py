"""`longspan verify`: exit codes, the table, JSON, and a broken rule seen from outside."""

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from click.testing import CliRunner, Result

from longspan.cli.verify import verify
from longspan.names import LAYOUTS
from longspan.verify.judge import Verdict
from longspan.verify.replay import replay_and_leave
from tests.ranks import run_ranks
from tests.train.tiny import make_config, to_toml, write_corpus
from tests.verify.faults import FAULTS
from tests.verify.test_rules import replay_on_ranks
from tests.verify.test_run import launch_here

pytestmark = pytest.mark.usefixtures("warm")

BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli-verify")
    write_corpus(folder)
    (folder / "run.toml").write_text(to_toml(make_config(folder, parallel__cp=2, parallel__layout="striped", steps=3)))
    return folder


def run(*words: object) -> Result:
    return CliRunner().invoke(verify, [str(word) for word in words])


def verdict(passed: bool = True, **changes: Any) -> Verdict:
    values: dict[str, Any] = {
        "cp": 2, "layout": "zigzag", "route": "ring", "dtype": "bf16", "comm_dtype": None,
        "loss": 5.5, "grad_norm": 1.5, "loss_error": 1e-4,
        "loss_tolerance": 2e-3, "norm_error": 3e-4, "norm_tolerance": 4e-3, "worst_gradient": "norm.weight",
        "gradient_error": 5e-3, "gradient_tolerance": 6e-3, "drift": [1e-5, 2e-5], "inputs_equal": True, "passed": passed,
    }  # fmt: skip
    return Verdict(**(values | changes))


@pytest.mark.parametrize(
    ("dtype", "cuda", "verified"),
    [
        ("fp32", False, ("fp64", "fp32")),
        ("bf16", False, ("fp64", "fp32", "bf16")),
        ("fp64", False, ("fp64", "fp32")),
        ("fp32", True, ("fp32",)),
        ("bf16", True, ("fp32", "bf16")),
        ("fp16", True, ("fp32", "fp16")),
        ("fp64", True, ("fp32", "fp64")),
    ],
)
def test_by_default_the_types_that_the_run_uses(
    folder: Path, dtype: str, cuda: bool, verified: tuple[str, ...]
) -> None:
    with (
        patch("torch.cuda.is_available", lambda: cuda),
        patch("torch.cuda.device_count", lambda: 2),
        patch("longspan.verify.run.launch"),
        patch("longspan.verify.run.judge", side_effect=lambda case, *_: verdict(dtype=case.dtype)),
    ):
        for options, right in (((), verified), (("--dtype", "fp64"), ("fp64",))):
            seen = run(folder / "run.toml", "--set", f"dtype={dtype}", *options, "--quiet", "--json")
            assert seen.exit_code == 0, seen.output
            assert tuple(case["dtype"] for case in json.loads(seen.stdout)["cases"]) == right


def test_on_real_cases(folder: Path) -> None:
    """What the file says is verified, in fp64 and fp32; progress on stderr, a line each where it is no terminal."""
    with patch("longspan.verify.run.launch", launch_here):
        result = run(folder / "run.toml", "--steps", 1)
    assert result.exit_code == 0, result.stderr
    assert result.stderr.splitlines() == [
        "cp=1 fp64", "cp=2 striped ring fp64", "cp=1 fp32", "cp=2 striped ring fp32",
    ]  # fmt: skip
    lines = result.stdout.splitlines()
    assert lines[0].rstrip() == "against cp=1, plain SDPA per document: relative error (tolerance)"
    assert lines[-1] == "2 of 2 cases equal cp=1"
    assert [line.split()[:3] for line in lines if "striped" in line] == [["│", "2", "│"]] * 2


def test_json(folder: Path) -> None:
    words = (folder / "run.toml", "--cp", 2, "--cp", 4, "--layout", "zigzag", "--dtype", "fp64", "--json", "--quiet")
    with patch("longspan.verify.run.launch", launch_here):
        result = run(*words)
    assert (result.exit_code, result.stderr) == (0, "")
    told = json.loads(result.stdout)
    assert told["passed"] is True
    assert [sorted(case) for case in told["cases"]] == [sorted(field.name for field in fields(Verdict))] * 2
    types = {
        "cp": int, "layout": str, "route": str, "dtype": str, "comm_dtype": type(None),
        "worst_gradient": str, "drift": list, "inputs_equal": bool, "passed": bool,
    }  # fmt: skip
    for case, cp in zip(told["cases"], (2, 4), strict=True):
        assert {name: type(value) for name, value in case.items()} == dict.fromkeys(case, float) | types
        assert (case["cp"], case["layout"], case["dtype"], len(case["drift"])) == (cp, "zigzag", "fp64", 2)


def test_table_and_exit_code_of_a_failure(folder: Path) -> None:
    made = [
        verdict(),
        verdict(False, dtype="fp64"),
        verdict(False, cp=4, inputs_equal=False),
        verdict(comm_dtype="fp8"),
    ]
    with patch("longspan.cli.verify.run_verification", return_value=made):
        result = run(folder / "run.toml", "--quiet")
    assert (result.exit_code, result.stderr) == (1, "")
    for text in ("5.500000", "1.0e-04 (2e-03)", "3.0e-04 (4e-03)", "norm.weight", "5.0e-03 (6e-03)", "1e-05 2e-05"):
        assert text in result.stdout
    assert result.stdout.count("DIFFERS") == 2
    assert result.stdout.count("in bounds") == result.stdout.count("bf16 (fp8)") == 1
    assert result.stdout.count("DIFFERS: other inputs") == 1
    assert result.stdout.splitlines()[-1] == (
        "1 of 3 cases equal cp=1, 1 of 1 cases with a communication dtype are within the rounding bounds of cp=1"
    )


def test_what_rounds_on_the_wire_is_not_called_equal(folder: Path) -> None:
    made = [verdict(comm_dtype="fp8"), verdict(comm_dtype="bf16")]
    with patch("longspan.cli.verify.run_verification", return_value=made):
        result = run(folder / "run.toml", "--quiet")
    assert (result.exit_code, result.stderr) == (0, "")
    assert (
        result.stdout.splitlines()[-1]
        == "2 of 2 cases with a communication dtype are within the rounding bounds of cp=1"
    )
    assert "equal" not in result.stdout


def test_json_of_a_failure_is_json(folder: Path) -> None:
    """An error that is infinite, such as that of a missing gradient, is null."""
    made = [verdict(False, gradient_error=float("inf"), drift=[float("inf"), 0.5])]
    with patch("longspan.cli.verify.run_verification", return_value=made):
        result = run(folder / "run.toml", "--json", "--quiet")
    assert result.exit_code == 1
    told = json.loads(result.stdout, parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
    assert told["passed"] is False
    assert (told["cases"][0]["gradient_error"], told["cases"][0]["drift"]) == (None, [None, 0.5])


@pytest.mark.parametrize("fault", ["dropped_document_boundaries", "average_of_the_wrapper_not_undone"])
def test_exit_code_of_a_broken_rule(folder: Path, fault: str) -> None:
    def launch_broken(function: Any, arguments: Any, ranks: int) -> Any:
        if function is not replay_and_leave:
            return launch_here(function, arguments, ranks)
        return run_ranks(ranks, replay_on_ranks, *arguments, fault)[0]

    assert fault in FAULTS
    with patch("longspan.verify.run.launch", launch_broken):
        result = run(folder / "run.toml", "--dtype", "fp64", "--quiet")
    assert result.exit_code == 1
    assert "DIFFERS" in result.stdout
    assert result.stdout.splitlines()[-1] == "0 of 1 cases equal cp=1"


@pytest.mark.parametrize(
    ("words", "stderr"),
    [
        (
            ("--layout", "spiral"),
            "error: VerifyConfig: 1 invalid value\n"
            "  layouts.0: layout 'spiral' is not known\n\n"
            f"hint: choose one of {', '.join(LAYOUTS)}\n",
        ),
        (
            ("--set", "parallel.wrapper=ddp", "--dtype", "fp64", "--dtype", "bf16"),
            "error: TrainConfig: 1 invalid value\n"
            '  dtype="bf16" with parallel.wrapper="ddp": DDP keeps one copy of the weights, in fp32\n\n'
            'hint: use parallel.wrapper="fsdp" for bf16 and fp16\n',
        ),
        (
            ("--set", "model.vocab_size=7"),
            "error: the tokenizer has 256 tokens, but model.vocab_size is 7\n\n"
            "hint: set model.vocab_size to at least 256\n",
        ),
    ],
)
def test_what_cannot_be_verified(folder: Path, words: tuple[str, ...], stderr: str) -> None:
    with patch("longspan.verify.run.launch") as launch:
        result = run(folder / "run.toml", "--quiet", *words)
    launch.assert_not_called()
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", stderr)


CUT = ("--set", "model.num_layers=5", "--set", 'model.windows=["full", "full", 9, "full", "full"]',
       "--layers", 2, "--tokens", 32, "--dtype", "fp64", "--quiet")  # fmt: skip


@pytest.mark.parametrize("fault", ["nothing", "dropped_document_boundaries", "average_of_the_wrapper_not_undone"])
def test_a_cut_run_is_verified_and_says_what_was_cut(folder: Path, fault: str) -> None:
    ran = []

    def launch(function: Any, arguments: Any, ranks: int) -> Any:
        ran.append(arguments[0])
        if function is not replay_and_leave:
            return launch_here(function, arguments, ranks)
        return run_ranks(ranks, replay_on_ranks, *arguments, fault)[0]

    with patch("longspan.verify.run.launch", launch):
        result = run(folder / "run.toml", *CUT)
    assert result.exit_code == (0 if fault == "nothing" else 1), result.stderr
    assert [(config.model.windows, config.data.seq_len) for config in ran] == [((None, 9), 32)] * 2
    assert result.stdout.splitlines()[-1] == (
        f"{int(fault == 'nothing')} of 1 cases equal cp=1; cut to 2 of 5 layers and 32 of 48 tokens a row"
    )


def test_json_says_what_was_cut(folder: Path) -> None:
    with patch("longspan.cli.verify.run_verification", return_value=[verdict()]) as verification:
        result = run(folder / "run.toml", *CUT, "--json")
        whole = run(folder / "run.toml", "--json")
    assert (verification.call_args_list[0].args[1].layers, verification.call_args_list[0].args[1].tokens) == (2, 32)
    assert json.loads(result.stdout)["cut"] == {
        "layers": {"verified": 2, "of": 5}, "seq_len": {"verified": 32, "of": 48},
    }  # fmt: skip
    assert json.loads(whole.stdout)["cut"] == {}


SITE = """
import importlib.abc, importlib.machinery, os, sys


class Break(importlib.abc.MetaPathFinder):
    '''Breaks a rule as soon as the training step is imported, in the launcher and in every rank.'''

    def find_spec(self, name, path, target=None):
        if name != "longspan.train.step":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module

        def execute(module):
            run(module)
            module.mean_loss_scale = lambda targets, ranks: 2 / targets

        spec.loader.exec_module = execute
        return spec


if os.environ.get("BREAK_A_RULE"):
    sys.meta_path.insert(0, Break())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "broken", [True, pytest.param(False, marks=pytest.mark.nightly)]
)  # whole: the demo's, test_readme.py
def test_the_command_in_processes_of_its_own(folder: Path, tmp_path: Path, broken: bool) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITE)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "BREAK_A_RULE": "1" if broken else ""}
    words = [BIN / "longspan", "verify", folder / "run.toml", "--dtype", "fp64", "--steps", "1", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=200, check=False)
    assert done.returncode == int(broken), done.stderr
    told = json.loads(done.stdout)
    assert told["passed"] is not broken
    (case,) = told["cases"]
    assert (case["gradient_error"] > 0.4) == broken
    assert case["inputs_equal"]
