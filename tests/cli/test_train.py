"""`longspan train`: what it prints where, what it says when it cannot begin, and real ranks of its own and of torchrun."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from click.testing import CliRunner, Result

from longspan.cli.train import train
from longspan.train.run import Summary
from tests.train.tiny import make_config, to_toml, write_corpus

pytestmark = pytest.mark.usefixtures("warm")

BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    write_corpus(folder)
    config = make_config(folder, dtype="fp32", steps=3, parallel__cp=2, parallel__threads=1)
    (folder / "run.toml").write_text(to_toml(config))
    return folder


def run(*words: object) -> Result:
    return CliRunner().invoke(train, [str(word) for word in words])


# What is wrong before there is any rank.


def change(file: str, text: str) -> Callable[[Path, Path], list[object]]:
    def change_file(folder: Path, scratch: Path) -> list[object]:
        (scratch / "corpus").mkdir()
        (scratch / "corpus" / file).write_bytes(text.encode("latin-1"))
        return [folder / "run.toml", "--set", f"data.paths=['{scratch}/corpus']"]

    return change_file


def missing(folder: Path, scratch: Path) -> list[object]:
    return [scratch / "none.toml"]


def not_toml(folder: Path, scratch: Path) -> list[object]:
    (scratch / "bad.toml").write_text("[data\n")
    return [scratch / "bad.toml"]


def no_key(folder: Path, scratch: Path) -> list[object]:
    (scratch / "empty.toml").write_text("[data]\npaths = ['x']\n")
    return [scratch / "empty.toml"]


def empty_folder(folder: Path, scratch: Path) -> list[object]:
    (scratch / "nothing").mkdir()
    return [folder / "run.toml", "--set", f"data.paths=['{scratch}/nothing']"]


def setting(*overrides: str) -> Callable[[Path, Path], list[object]]:
    return lambda folder, scratch: [folder / "run.toml", *(word for o in overrides for word in ("--set", o))]


NOT_VALID = "error: TrainConfig: 1 invalid value\n  "
CORRECT = "correct the configuration file, or use --set section.key=value"


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (missing, "error: cannot read {scratch}/none.toml: No such file or directory", "give the path of a TOML file"),
        (
            not_toml,
            "error: {scratch}/bad.toml is not TOML: Expected ']' at the end of a table declaration (at line 1, column 6)",
            "correct the file; its keys are those of TrainConfig",
        ),
        (no_key, NOT_VALID + "data.seq_len: is missing", CORRECT),
        (setting("parallel.cpp=2"), NOT_VALID + "parallel.cpp: unknown key", CORRECT),
        (
            setting("parallel.cp=0"),
            NOT_VALID + "parallel.cp: Input should be greater than or equal to 1 (got 0)",
            CORRECT,
        ),
        (
            setting("parallel.cp=0", "dtype=fp8"),
            "error: TrainConfig: 2 invalid values\n"
            "  parallel.cp: Input should be greater than or equal to 1 (got 0)\n"
            "  dtype: dtype 'fp8' is not known",
            "choose one of fp64, fp32, bf16, fp16",
        ),
        (
            setting("steps"),
            "error: --set 'steps' is not of the form section.key=value",
            "write it as --set parallel.cp=2",
        ),
        (
            setting("init_from=weights"),
            NOT_VALID + "both model and init_from are given",
            "give [model] to start from random weights, or init_from to start from a folder",
        ),
        (
            setting("model.num_heads=4", "model.num_kv_heads=3"),
            NOT_VALID + "model: 3 KV heads do not divide 4 query heads",
            "set num_kv_heads to one of [1, 2, 4]",
        ),
        (
            setting("model.vocab_size=100"),
            "error: the tokenizer has 256 tokens, but model.vocab_size is 100",
            "set model.vocab_size to at least 256",
        ),
        (
            empty_folder,
            "error: folder {scratch}/nothing has no file",
            "name another folder, or set suffixes",
        ),
        (
            change("blank.txt", " \n"),
            "error: no document with text in 1 file(s), 0 item(s) skipped: {scratch}/corpus/blank.txt",
            "name other paths, or another text_field",
        ),
        (
            change("latin.txt", "a\nb\nna\xefve"),
            "error: {scratch}/corpus/latin.txt is not UTF-8: byte 0xef at offset 6, line 3",
            'convert it, narrow suffixes, or set on_error="skip"',
        ),
        (
            change("chat.jsonl", '{"text": "yes"}\n{"body": "no"}\n'),
            "error: {scratch}/corpus/chat.jsonl:2 has no field 'text'; its fields are 'body'",
            "set text_field",
        ),
        (
            change("one.txt", "a single document"),
            "error: 1 document cannot be split into training and held-out documents",
            "set heldout_fraction=0, or give more documents",
        ),
        (
            setting("export=true", "model.qk_norm=true"),
            "error: export=true: a Hugging Face Llama folder cannot represent qk_norm=True, windows=()",
            "set export=false and use checkpoint_every, or remove these options of the model",
        ),
        (
            setting("parallel.tp=2"),
            "error: tp=2 does not divide 1 KV heads",
            "tp divides heads, intermediate_size and vocab_size: set it to 1",
        ),
    ],
)
def test_what_cannot_begin(
    folder: Path, tmp_path: Path, words: Callable[[Path, Path], list[object]], error: str, hint: str
) -> None:
    with patch("longspan.train.run.launch") as launch:
        result = run(*words(folder, tmp_path), "--set", f"run_dir={tmp_path}/run")
    launch.assert_not_called()
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"{error.replace('{scratch}', str(tmp_path))}\n\nhint: {hint}\n"
    assert not (tmp_path / "run").exists()


def test_a_degree_that_does_not_fit_the_world_of_torchrun(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    result = run(folder / "run.toml", "--set", f"run_dir={tmp_path}/run")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        "error: cp 2 does not divide a world of 3 ranks\n\nhint: set cp to 1 or 3; or start a multiple of 2 ranks\n"
    )


ONE_GPU = (
    "2 ranks on this machine, which has 1 CUDA device: each rank needs its own",
    'set parallel.device="cpu", or start at most 1 rank here',
)
NO_GPU = ('device "cuda" is set, but this machine has no CUDA device', 'set parallel.device="cpu"')


@pytest.mark.parametrize("rank", [None, 0, 1])
@pytest.mark.parametrize(
    ("device", "devices", "told"), [("auto", 1, ONE_GPU), ("cuda", 1, ONE_GPU), ("cuda", 0, NO_GPU)]
)
def test_more_ranks_than_devices_are_refused_before_the_corpus_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, rank: int | None, device: str, devices: int, told: tuple[str, str]
) -> None:
    """`rank`: of torchrun's world of two nodes, of two ranks each; None without it."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: devices > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: devices)
    if rank is not None:
        for name, value in {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}.items():
            monkeypatch.setenv(name, str(value))
    with patch("longspan.cli.train.prepare") as prepared:
        result = run(folder / "run.toml", "--set", f"parallel.device={device}")
        assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"error: {told[0]}\n\nhint: {told[1]}\n")
    prepared.assert_not_called()


# What is printed.


def summary(**changes: Any) -> Summary:
    values: dict[str, Any] = {
        "steps": 3, "tokens": 1440, "ranks": 2, "loss": 2.5, "heldout_loss": 2.0, "unigram_entropy": 3.25,
        "seconds": 1.0, "tokens_per_second": 1234.5, "tokens_per_second_per_device": 617.25, "tflops": 407.5,
        "tflops_full": 611.25, "mfu": None, "pairs_imbalance": 1.0625, "time_imbalance": 1.5, "run_dir": "runs/x",
    }  # fmt: skip
    return Summary(**(values | changes))


def test_table(folder: Path) -> None:
    with patch("longspan.cli.train.run_training", return_value=summary()) as called:
        result = run(folder / "run.toml", "--set", "steps=9", "--quiet")
    assert (result.exit_code, result.stderr) == (0, "")
    assert called.call_args.args[0].steps == 9
    assert called.call_args.kwargs["quiet"] is True
    for text in ("1,440 tokens on 2 ranks", "1,234 tokens/s", "2.5000", "2.0000", "3.2500", "+1.2500 gained", "runs/x"):
        assert text in result.stdout
    assert "1.06 x mean pairs, 1.50 x mean time in attention" in result.stdout


def test_mfu_is_shown_where_the_peak_of_the_device_is_known(folder: Path) -> None:
    with patch("longspan.cli.train.run_training", side_effect=[summary(mfu=0.412), summary()]):
        known, unknown = (run(folder / "run.toml", "--quiet").stdout for _ in range(2))
    speed, work = (line.split(maxsplit=1) for line in map(str.rstrip, known.splitlines()[1:3]))
    assert speed == ["speed", "1,234 tokens/s (617 a device)  MFU 41.2%"]
    assert work == ["work", "408 TFLOP/s a device; 611 with full S x S attention"]
    assert "1,234 tokens/s (617 a device)" in unknown
    assert "MFU" not in unknown
    assert "FLOP" not in unknown


def test_one_rank_is_not_compared_with_itself(folder: Path) -> None:
    with patch("longspan.cli.train.run_training", return_value=summary(ranks=1)):
        result = run(folder / "run.toml", "--quiet")
    assert "busiest" not in result.stdout
    assert "1,440 tokens on 1 rank " in result.stdout


def test_json_of_one_step_is_json(folder: Path) -> None:
    """Speed is measured from the second step on; what was not measured is null."""
    made = summary(tokens_per_second=float("nan"), heldout_loss=None)
    with patch("longspan.cli.train.run_training", return_value=made):
        result = run(folder / "run.toml", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    told = json.loads(result.stdout, parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
    assert (told["steps"], told["loss"], told["heldout_loss"], told["tokens_per_second"]) == (3, 2.5, None, None)


def test_ranks_other_than_0_print_nothing(folder: Path) -> None:
    with patch("longspan.cli.train.run_training", return_value=None):
        result = run(folder / "run.toml", "--json")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")


def test_axes_of_the_summary(folder: Path) -> None:
    with patch("longspan.cli.train.run_training", return_value=summary(ranks=16, axes="tp 2, cp 2, dp 2, pp 2")):
        result = run(folder / "run.toml", "--quiet")
    assert "1,440 tokens on 16 ranks: tp 2, cp 2, dp 2, pp 2" in result.stdout


# The numbers at the start.


@pytest.fixture
def wide_as_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


FOUR_AXES = ("parallel.tp=2", "parallel.dp=2", "parallel.pp=2", "gradient_accumulation_steps=2", "model.num_kv_heads=2")


@pytest.mark.usefixtures("wide_as_a_terminal")
def test_numbers_of_one_rank_are_three_lines(folder: Path) -> None:
    """48 tokens a row of 12.9k parameters in fp32: 4 bytes for weights, 4 for gradients, 8 for moments."""
    result = run(folder / "run.toml", "--dry-run", "--set", "parallel.cp=1")
    assert (result.exit_code, result.stderr) == (0, "")
    step, rank, memory = result.stdout.splitlines()
    assert step.startswith("1 rank; a step: 1 row, up to 48 tokens; an epoch: ")
    assert rank == "a rank: 1 micro-batch of up to 48 tokens; 12.9k parameters"
    assert memory.startswith("expected, KiB: weights, gradients, moments 201; activations ")


@pytest.mark.usefixtures("wide_as_a_terminal")
def test_numbers_of_a_cp_group(folder: Path) -> None:
    result = run(folder / "run.toml", "--dry-run")
    lines = result.stdout.splitlines()
    assert lines[0] == "2 ranks: cp 2; 1 node; order tp-cp-ep-dp-pp"
    assert lines[1] == "  cp    2  inside a node: [0,1]"
    assert lines[3] == "a rank: 1 micro-batch of up to 24 tokens; 6.4k of 12.9k parameters"
    assert lines[5].split() == ["weights", "gradients", "moments", "gathered", "activations", "loss", "total"]
    weights, gradients, moments, *_ = map(float, lines[7].split())
    assert (weights, gradients, moments) == (25.2, 25.2, 50.3)
    assert len(lines) == 8


@pytest.mark.usefixtures("wide_as_a_terminal")
def test_numbers_of_all_axes_fit_a_terminal(folder: Path) -> None:
    result = run(*setting(*FOUR_AXES)(folder, folder), "--dry-run")
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in result.stdout
    assert lines[0] == "16 ranks: tp 2, cp 2, dp 2, pp 2; 1 node; order tp-cp-ep-dp-pp"
    assert lines[1:5] == [
        "  tp    2  inside a node: [0,1] [2,3] [4,5] [6,7] [8,9] [10,11] [12,13] [14,15]",
        "  cp    2  inside a node: [0,2] [1,3] [4,6] [5,7] [8,10] [9,11] [12,14] [13,15]",
        "  dp    2  inside a node: [0,4] [1,5] [2,6] [3,7] [8,12] [9,13] [10,14] [11,15]",
        "  pp    2  inside a node: [0,8] [1,9] [2,10] [3,11] [4,12] [5,13] [6,14] [7,15]",
    ]
    assert lines[5].startswith("a step: 4 rows, up to 192 tokens; an epoch: ")
    assert lines[6].startswith("a rank: 2 micro-batches of up to 24 tokens; ")
    assert [line.split()[:2] for line in lines[-2:]] == [["0", "0"], ["1", "1"]]


@pytest.mark.usefixtures("wide_as_a_terminal")
def test_nodes_are_those_of_torchrun_and_a_busy_axis_over_nodes_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    result = run(*setting(*FOUR_AXES)(folder, folder), "--dry-run")
    assert "2 nodes" in result.stdout
    assert "  pp    2  over up to 2 nodes: [0,8] [1,9]" in result.stdout
    assert "warning" not in result.stdout
    changes = (*FOUR_AXES, "parallel.ranks_per_node=4", "parallel.order=tp-dp-ep-cp-pp")
    result = run(*setting(*changes)(folder, folder), "--dry-run")
    assert "4 nodes" in result.stdout
    assert "warning: cp crosses nodes of 4 ranks, as ranks 0,4 do; dp, which sends" in result.stdout
    assert 'set order to "tp-cp-ep-dp-pp"' in " ".join(result.stdout.split())


def test_numbers_as_json(folder: Path) -> None:
    result = run(*setting(*FOUR_AXES)(folder, folder), "--dry-run", "--json")
    told = json.loads(result.stdout)
    assert told["groups"]["pp"][0] == [0, 8]
    assert (told["global_batch"], told["micro_batches"], told["slots"]) == (4, 2, 24)
    assert told["topology"]["tp"] == 2
    assert [stage["layers"] for stage in told["stages"]] == [[0], [1]]
    for stage in told["stages"]:
        parts = ("parameters", "gradients", "moments", "gathered", "unreduced", "activations", "head")
        assert stage["total"] == sum(stage[part] for part in parts)


def test_a_dry_run_starts_nothing_and_refuses_what_a_run_would(folder: Path, tmp_path: Path) -> None:
    with patch("longspan.cli.train.run_training") as called:
        result = run(folder / "run.toml", "--dry-run", "--set", f"run_dir={tmp_path}/run")
        refused = run(folder / "run.toml", "--dry-run", "--set", "parallel.tp=2")
    called.assert_not_called()
    assert result.exit_code == 0
    assert not (tmp_path / "run").exists()
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "tp=2 does not divide 1 KV heads" in refused.stderr


def test_numbers_are_told_on_stderr_by_the_first_rank_unless_quiet(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with patch("longspan.cli.train.run_training", return_value=None):
        told = run(folder / "run.toml")
        assert (told.exit_code, told.stdout) == (0, "")
        assert told.stderr.startswith("2 ranks: cp 2; 1 node;")
        for words in (["--quiet"], ["--json"]):
            assert run(folder / "run.toml", *words).stderr == ""
        monkeypatch.setenv("WORLD_SIZE", "2")
        for rank, tells in (("0", True), ("1", False)):
            monkeypatch.setenv("RANK", rank)
            assert bool(run(folder / "run.toml").stderr) == tells


# Real ranks.


@contextmanager
def own_process(*words: object) -> Iterator["subprocess.Popen[str]"]:
    """A command in a process of its own, ended with its children when the block is left."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    process = subprocess.Popen(
        [str(word) for word in words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            # Ranks of torchrun are in groups of their own, and would keep the pipes open.
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            for group in (process.pid, *map(int, children)):
                with suppress(ProcessLookupError):
                    os.killpg(os.getpgid(group), signal.SIGKILL)
            process.communicate(timeout=60)


def watch_tokenising(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that gets a line whenever a process begins to fill `folder/cache`, which then takes it three seconds."""
    (folder / "sitecustomize.py").write_text(
        "import sys, time\n"
        "def hook(event, args):\n"
        f"    if event == 'tempfile.mkdtemp' and args[0].startswith('{folder}/cache'):\n"
        f"        open('{folder}/tokenisations', 'a').write('one\\n')\n"
        "        time.sleep(3)\n"
        "sys.addaudithook(hook)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    return folder / "tokenisations"


def test_torchrun_and_own_ranks_reach_the_same_loss(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["train", folder / "run.toml", "--json", "--set", "eval_every=2", "--set", "preflight=true"]
    own = run(*words[1:], "--set", f"run_dir={tmp_path}/own")
    assert own.exit_code == 0, own.output
    told = json.loads(own.stdout)
    assert (told["steps"], told["ranks"], told["run_dir"]) == (3, 2, f"{tmp_path}/own")
    assert told["axes"] == "cp 2"
    torchrun = [BIN / "torchrun", "--standalone", "--nproc-per-node", 2, "-m", "longspan.cli.main"]
    tokenisations = watch_tokenising(tmp_path, monkeypatch)
    changes = ["--set", f"run_dir={tmp_path}/torchrun", "--set", f"data.cache_dir={tmp_path}/cache"]
    with own_process(*torchrun, *words, *changes) as under:
        out, err = under.communicate(timeout=300)
    assert tokenisations.read_text() == "one\n"
    assert under.returncode == 0, err
    assert "step 2: held-out loss" in err
    assert "preflight: a step at the longest row fits; it took " in err
    again = json.loads(out)
    assert (again["loss"], again["heldout_loss"]) == (told["loss"], told["heldout_loss"])
    assert again["tokens"] == told["tokens"] == 3 * 48


@pytest.mark.slow
def test_torchrun_with_another_world_is_refused_before_a_run_begins(folder: Path, tmp_path: Path) -> None:
    torchrun = [BIN / "torchrun", "--standalone", "--nproc-per-node", 2, "-m", "longspan.cli.main"]
    changes = ["--set", "parallel.cp=3", "--set", f"run_dir={tmp_path}/run"]
    with own_process(*torchrun, "train", folder / "run.toml", *changes) as under:
        out, err = under.communicate(timeout=300)
    assert under.returncode != 0
    assert out == ""
    # torchrun ends the other ranks a tenth of a second after the first failure.
    assert err.count("error: cp 3 does not divide a world of 2 ranks") in (1, 2)
    assert not (tmp_path / "run").exists()


def ranks_of(launcher: int) -> list[int]:
    """Process ids of the ranks that a launcher made, in rank order."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return sorted(int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes())


def test_a_rank_that_is_killed_ends_the_run_and_is_named(folder: Path, tmp_path: Path) -> None:
    metrics = tmp_path / "run" / "metrics.jsonl"
    changes = ["--set", "steps=100000", "--set", f"run_dir={tmp_path}/run"]
    with own_process(BIN / "longspan", "train", folder / "run.toml", "--quiet", *changes) as own:
        began = time.monotonic()
        while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
            assert own.poll() is None, own.communicate()[1]
            assert time.monotonic() - began < 300
            time.sleep(0.05)
        _, victim = ranks_of(own.pid)
        killed = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        out, err = own.communicate(timeout=120)
        assert time.monotonic() - killed < 20
    assert (own.returncode, out) == (2, "")
    assert (
        "error: rank 1 of 2 was killed by SIGKILL; the others were ended\n\nhint: SIGKILL usually means the kernel's OOM killer"
        in err
    )
