"""README and guides say what is true: their commands run, their code is the example that runs, their folders exist."""

import json
import os
import re
import runpy
import shlex
import tomllib
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from click.testing import CliRunner

from longspan.cli.main import main
from longspan.comm.launch import launch
from longspan.data import Batch
from longspan.model import Decoder, ModelConfig
from longspan.train.train_config import TrainConfig
from longspan.verify.baseline import loss_sum
from tests.train.tiny import make_config, to_toml, write_corpus

AXES = ModelConfig(
    vocab_size=256, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=176, init_std=0.1
)
ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def _commands():
    for page in PAGES:
        for line in page.read_text().splitlines():
            command = line.split("   #")[0].strip()
            if line.startswith("    longspan ") and command.split()[1] in ("plan", "show", "pack"):
                yield pytest.param(command, id=f"{page.name}: {command}")


@pytest.mark.parametrize("command", list(_commands()))
def test_planning_commands_run(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs" / "concepts").mkdir(parents=True)
    if "run.toml" in command or "--manifest" in command:
        write_corpus(tmp_path)
        (tmp_path / "run.toml").write_text(to_toml(make_config(tmp_path)))
    if "--manifest" in command:
        CliRunner().invoke(main, ["pack", "run.toml", "--output", "rows.parquet"], catch_exceptions=False)
    result = CliRunner().invoke(main, shlex.split(command)[1:], catch_exceptions=False)
    assert result.exit_code == 0, result.output


def test_the_python_of_the_readme_is_that_of_the_examples():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert blocks == [(ROOT / "examples" / name).read_text() for name in ("long.py", "attend.py", "huggingface.py")]


def run_on_one_gpu(ranks, script, folder):
    """What ranks print that torchrun's library starts: more than there are GPUs, on the CPU."""
    launch(run_script, (script, folder), ranks)
    return "".join((folder / f"rank-{rank}").read_text() for rank in range(ranks))


def run_script(script, folder):
    one_gpu = patch.multiple(torch.cuda, is_available=lambda: True, device_count=lambda: 1)
    with one_gpu, (folder / f"rank-{os.environ['RANK']}").open("w") as out, redirect_stdout(out):
        runpy.run_path(str(script), run_name="__main__")


def test_the_demo_runs_where_there_is_one_gpu(tmp_path, monkeypatch):
    """The commands of `make demo`, on a smaller corpus and for fewer steps; their ranks start with this environment."""
    folders = [str(ROOT / "tests" / "one_gpu"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    demo = (ROOT / "Makefile").read_text().split("\ndemo:")[1].split("\n\n")[0]
    commands = [shlex.split(command) for command in re.findall(r"longspan (.+)", demo)]
    changes = {"run_dir": tmp_path / "run", "data.paths": f"['{write_corpus(tmp_path)}']", "data.seq_len": 64}
    words = [
        "--json",
        *(f"--set={name}={value}" for name, value in {"steps": 4, "parallel.threads": 1, **changes}.items()),
    ]
    results = [
        CliRunner().invoke(main, [command, str(ROOT / file), *words, *more], catch_exceptions=False)
        for (command, file), more in zip(commands, ([], ["--dtype=fp32", "--steps=1"]), strict=True)
    ]
    trained, verified = (json.loads(result.stdout) for result in results)
    assert (trained["steps"], trained["ranks"]) == (4, 2)
    assert [case["passed"] for case in verified["cases"]] == [True]


@pytest.mark.usefixtures("warm")
def test_the_example_runs_on_two_ranks(tmp_path):
    output = run_on_one_gpu(2, ROOT / "examples" / "attend.py", tmp_path)
    told = re.findall(r"rank (\d): \(1, 8, 2048, 64\) of \(1, 8, 4096, 64\), mean (-?\d\.\d{6})", output)
    assert sorted(rank for rank, _ in told) == ["0", "1"]
    assert len({mean for _, mean in told}) == 1


@pytest.mark.usefixtures("warm")
def test_the_example_for_gpus_runs_on_cpus_with_shorter_rows(tmp_path):
    code = (ROOT / "examples" / "long.py").read_text()
    for on_gpu, here in (
        ('torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))', "torch.set_num_threads(1)"), ('"nccl"', '"gloo"'),
        ('device="cuda"', 'device="cpu"'), ("[100_000, 31_072]", "[1000, 311]"),
    ):  # fmt: skip
        assert code.count(on_gpu) == 1
        code = code.replace(on_gpu, here)
    (tmp_path / "long.py").write_text(code)
    output = run_on_one_gpu(2, tmp_path / "long.py", tmp_path)
    told = re.findall(r"rank (\d): \(1, 32, (\d+), 128\), gradient of k \(1, 8, (\d+), 128\)", output)
    assert sorted(told) == [("0", "655", "655"), ("1", "656", "656")]


@pytest.mark.usefixtures("warm")
def test_the_example_of_a_loop_on_two_axes(tmp_path):
    output = run_on_one_gpu(4, ROOT / "examples" / "axes.py", tmp_path)
    model = Decoder(AXES, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = Batch.from_documents([list(b"context parallelism, exact, "), list(b"and one command proves it")])
    for step in range(2):
        loss = loss_sum(model, batch) / batch.num_targets
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        (told,) = re.findall(rf"step {step + 1}: (\d\.\d+) nats", output)
        assert float(told) == pytest.approx(float(loss.detach()), abs=2e-5)


def test_the_file_tour_names_the_folders():
    tour = (ROOT / "README.md").read_text().split("## The files")[1].split("##")[0]
    named = set(re.findall(r"^      (\w+)/", tour, re.M))
    assert named == {path.name for path in (ROOT / "src" / "longspan").iterdir() if (path / "__init__.py").exists()}


def test_the_toml_of_the_guide_is_a_configuration():
    block, *parts = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "guides" / "train.md").read_text(), re.S)
    assert TrainConfig.model_validate(tomllib.loads(block)).parallel.cp == 8
    for part in map(tomllib.loads, parts):  # of another model than that of the whole, or changes beside a folder
        rest = {name: value for name, value in tomllib.loads(block).items() if name != "model"}
        folder = {} if "model_type" in part.get("model", {}) else {"init_from": "a/folder"}
        assert TrainConfig.model_validate(folder | rest | part).parallel.cp == 8
