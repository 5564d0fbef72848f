"""The group of commands: what it lists, and that listing and planning start without torch."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from longspan.cli.main import main
from tests.train.tiny import make_config, to_toml, write_corpus

COMMANDS = ["train", "pack", "verify", "bench", "plan", "show", "doctor"]


def fresh(*words: str) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, which ends by telling on stderr which heavy modules it imported."""
    program = (
        "import sys\n"
        "from longspan.cli.main import main\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "finally:\n"
        "    heavy = {'torch', 'transformers', 'matplotlib', 'tensorboard', 'pyarrow'} & set(sys.modules)\n"
        "    print('imported', sorted(heavy), file=sys.stderr)\n"
    )
    return subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("words", [["--help"], ["-h"]])
def test_help_lists_the_commands(words: list[str]) -> None:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0
    listed = result.stdout.split("Commands:\n")[1]
    assert [line.split()[0] for line in listed.splitlines() if line.startswith("  ") and line[2] != " "] == COMMANDS


@pytest.mark.parametrize(
    "words",
    [["--help"], ["--version"], ["plan", "--help"], ["show", "--help"], ["plan", "--seq-len", "8k", "--cp", "2"]],
)
def test_starts_without_torch(words: list[str]) -> None:
    done = fresh(*words)
    assert (done.returncode, done.stderr) == (0, "imported []\n")
    assert done.stdout


def test_packs_without_torch(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    (tmp_path / "run.toml").write_text(to_toml(make_config(tmp_path, parallel__cp=2)))
    done = fresh("pack", str(tmp_path / "run.toml"), "--output", str(tmp_path / "rows.parquet"))
    assert (done.returncode, done.stderr) == (0, "imported ['pyarrow']\n")
    done = fresh("show", "--manifest", str(tmp_path / "rows.parquet"))
    assert (done.returncode, done.stderr) == (0, "imported ['pyarrow']\n")


def test_as_a_module() -> None:
    words = [sys.executable, "-m", "longspan.cli.main", "plan", "--seq-len", "8k", "--cp", "2", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert '"seq_len": 8192' in done.stdout or '"seq_len":8192' in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_takes_help(command: str) -> None:
    result = CliRunner().invoke(main, [command, "--help"])
    assert result.exit_code == 0
    assert result.stdout.startswith(f"Usage: main {command} [OPTIONS]")
    if command == "bench":
        result = CliRunner().invoke(main, [command, "calibrate", "--help"])
    if command in ("train", "pack", "verify"):
        assert "--set a.b=value" in result.stdout
    if command != "show":
        assert "--json" in result.stdout


def test_an_unknown_command_is_refused() -> None:
    result = CliRunner().invoke(main, ["trane"])
    assert result.exit_code == 2
    assert "No such command 'trane'" in result.stderr
