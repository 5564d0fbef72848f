"""A run goes on from a checkpoint as if it had never stopped, at the same degree bit for bit and at any other to rounding."""

import json
import shutil
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from longspan.errors import CheckpointError, DataError, SpecError
from longspan.model import Decoder, load_pretrained
from longspan.names import RENAMED
from longspan.train import checkpoint
from longspan.train.axes import topology_of
from longspan.train.model import make_model
from longspan.train.run import prepare, run
from longspan.train.train_config import TrainConfig
from longspan.verify.baseline import attend_documents
from tests.oracle import raised
from tests.ranks import run_ranks
from tests.train.tiny import MODEL, make_config, make_meshes, make_step, write_corpus

AXES_MODEL = {**MODEL, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
EXPERTS_MODEL = {
    **AXES_MODEL, "intermediate_size": None,
    "experts": {"num_experts": 4, "top_k": 2, "intermediate_size": 8, "balance": 0.01, "balance_over": "document"},
}  # fmt: skip


def run_on_ranks(group: Any, rank: int, config: TrainConfig) -> dict[str, Any] | None:
    with patch("longspan.train.run.join", return_value=make_meshes(config)):
        summary = run(config, quiet=True)
    return None if summary is None else asdict(summary)


def train(config: TrainConfig) -> dict[str, Any]:
    summary, *others = run_ranks(topology_of(config).world, run_on_ranks, config)
    assert others == [None] * len(others)
    assert summary is not None
    return summary


def metrics(config: TrainConfig, kind: str = "loss") -> dict[int, float]:
    lines = map(json.loads, (config.run_dir / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line[kind] for line in lines if kind in line}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_corpus(folder)
    return folder


CHANGES = {
    "steps": 4,
    "checkpoint_every": 2,
    "eval_every": 2,
    "eval_rows": 3,
    "gradient_accumulation_steps": 2,
    "export": True,
}


def stop_and_go(folder: Path, name: str, change: dict[str, Any], **first: Any) -> tuple[TrainConfig, TrainConfig]:
    """A run of four steps, and one that goes on from its checkpoint at step two, changed."""
    through = make_config(folder, run_dir=str(folder / name), **(CHANGES | first))
    if not through.run_dir.exists():
        train(through)
    change = CHANGES | first | change
    again = make_config(folder, run_dir=str(folder / f"{name}-{len(list(folder.iterdir()))}"), resume=True, **change)
    shutil.copytree(through.run_dir / "checkpoints" / "step-00000002", again.run_dir / "checkpoints" / "step-00000002")
    prepare(again)
    summary = train(again)
    assert summary["steps"] == 4
    return through, again


@pytest.mark.parametrize(
    ("dtype", "dp", "cp", "wrapper"),
    [
        ("fp32", 1, 2, "fsdp"),
        ("fp16", 1, 2, "fsdp"),
        pytest.param("bf16", 1, 2, "fsdp", marks=pytest.mark.nightly),
        pytest.param("fp32", 2, 2, "fsdp", marks=pytest.mark.nightly),
        ("fp64", 1, 2, "ddp"),
    ],
)
def test_resume_at_the_same_degree_bit_for_bit(folder: Path, dtype: str, dp: int, cp: int, wrapper: str) -> None:
    degrees = {"parallel__dp": dp, "parallel__cp": cp, "parallel__wrapper": wrapper}
    through, again = stop_and_go(folder, f"same-{dtype}-{dp}-{wrapper}", {}, dtype=dtype, **degrees)
    for kind in ("loss", "grad_norm", "learning_rate", "targets", "tokens", "tokens_seen", "heldout_loss"):
        whole = metrics(through, kind)
        assert list(whole) == ([2, 4] if kind == "heldout_loss" else [1, 2, 3, 4])
        assert metrics(again, kind) == {step: value for step, value in whole.items() if step > 2}, kind
    a, b = (load_file(config.run_dir / "model" / "model.safetensors") for config in (through, again))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("fp64", 1e-9), pytest.param("fp32", 1e-5, marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize(
    "change",
    [
        {"parallel__cp": 1},
        {"parallel__cp": 4},
        {"parallel__dp": 2, "parallel__cp": 1, "gradient_accumulation_steps": 1},
        {"parallel__dp": 2, "parallel__cp": 2, "gradient_accumulation_steps": 1, "parallel__layout": "striped"},
        {"parallel__wrapper": "ddp"},
    ],
)
def test_resume_at_another_degree(folder: Path, dtype: str, tolerance: float, change: dict[str, Any]) -> None:
    through, again = stop_and_go(folder, f"other-{dtype}", change, dtype=dtype, parallel__cp=2)
    for kind in ("loss", "grad_norm", "heldout_loss"):
        late = {step: value for step, value in metrics(through, kind).items() if step > 2}
        assert metrics(again, kind) == pytest.approx(late, rel=tolerance), kind
    for kind in ("targets", "tokens", "tokens_seen", "learning_rate"):  # the same rows
        assert metrics(again, kind) == {s: v for s, v in metrics(through, kind).items() if s > 2}


EXPERTS = {"model": EXPERTS_MODEL, "export": False, "dropout": 0.1}
AXES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "cp2 -> tp2pp2": ({"parallel__cp": 2, "dropout": 0.1}, {"parallel__tp": 2, "parallel__pp": 2, "parallel__cp": 1}),
    "pp2 -> hsdp, tied": (
        {"parallel__pp": 2, "model__tie_embeddings": True},
        {"parallel__pp": 1, "parallel__dp": 2, "parallel__cp": 2, "parallel__dp_replicate": 2,
         "gradient_accumulation_steps": 1},
    ),
    "tp2ep2 -> dp2ep2": (
        {"parallel__tp": 2, "parallel__ep": 2, "gradient_accumulation_steps": 4, **EXPERTS},
        {"parallel__dp": 2, "parallel__ep": 2, "parallel__tp": 1, "gradient_accumulation_steps": 2},
    ),
    "tp2pp2, interleaved -> cp2": (
        {"parallel__tp": 2, "parallel__pp": 2, "parallel__schedule": "interleaved", "dropout": 0.1,
         "model": {**AXES_MODEL, "num_layers": 4}},
        {"parallel__tp": 1, "parallel__pp": 1, "parallel__schedule": "1f1b", "parallel__cp": 2},
    ),
    "dp2ep2 -> tp2cp2ep2": (
        {"parallel__dp": 2, "parallel__ep": 2, **EXPERTS},
        {"parallel__dp": 1, "parallel__ep": 2, "parallel__cp": 2, "parallel__tp": 2, "gradient_accumulation_steps": 4},
    ),
}  # fmt: skip
WIDEST = {"tp2pp2, interleaved -> cp2", "dp2ep2 -> tp2cp2ep2"}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.nightly if case in WIDEST else ()) for case in AXES]
)
def test_resume_on_other_axes(folder: Path, case: str) -> None:
    """A checkpoint knows no axis: parameters, moments and settings are found by the names of the whole model."""
    first, change = AXES[case]
    first = {"model": dict(AXES_MODEL), "dtype": "fp64", "optim__eps": 1e-5, **first}
    through, again = stop_and_go(folder, f"axes-{len(list(folder.iterdir()))}", change, **first)
    for kind in ("loss", "grad_norm", "heldout_loss"):
        late = {step: value for step, value in metrics(through, kind).items() if step > 2}
        assert metrics(again, kind) == pytest.approx(late, rel=1e-9), kind
    if again.export:
        a, b = (load_file(config.run_dir / "model" / "model.safetensors") for config in (through, again))
        assert a.keys() == b.keys()
        assert all(torch.allclose(a[name], b[name], rtol=1e-9, atol=1e-12) for name in a)


def test_a_run_that_is_done_is_not_run_again(folder: Path) -> None:
    config = make_config(folder, run_dir=str(folder / "done"), steps=2, checkpoint_every=2, parallel__cp=2)
    first = train(config)
    told = (config.run_dir / "metrics.jsonl").read_text()
    again = train(config.model_copy(update={"resume": True}))
    assert (again["steps"], again["tokens"]) == (2, first["tokens"])
    assert (config.run_dir / "metrics.jsonl").read_text() == told
    longer = train(config.model_copy(update={"resume": True, "steps": 3}))
    assert (longer["steps"], list(metrics(config))) == (3, [1, 2, 3])


def test_steps_that_are_done_again_are_told_once(folder: Path) -> None:
    """A run killed after its last checkpoint has told steps that the resumed run does again; its last line may be cut."""
    config = make_config(
        folder, run_dir=str(folder / "again"), steps=4, checkpoint_every=2, parallel__cp=2, eval_every=3
    )
    train(config)
    whole = (config.run_dir / "metrics.jsonl").read_text()
    shutil.rmtree(config.run_dir / "checkpoints" / "step-00000004")
    (config.run_dir / "metrics.jsonl").write_text(whole + '{"step": 5, "lo')
    losses, heldout = metrics_of(whole, "loss"), metrics_of(whole, "heldout_loss")
    train(config.model_copy(update={"resume": True}))
    lines = (config.run_dir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 3, 4, 4]
    assert (metrics(config), metrics(config, "heldout_loss")) == (losses, heldout)


def metrics_of(text: str, kind: str) -> dict[int, float]:
    return {line["step"]: line[kind] for line in map(json.loads, text.splitlines()) if kind in line}


def test_a_checkpoint_says_where_the_run_stood(folder: Path) -> None:
    config = make_config(
        folder, run_dir=str(folder / "stood"), steps=2, checkpoint_every=1, dtype="fp16", parallel__dp=2
    )
    summary = train(config)
    record = checkpoint.read_record(config.run_dir / "checkpoints" / "step-00000002")
    assert (record["step"], record["tokens"], record["loader"]["row"]) == (2, summary["tokens"], 4)
    assert record["loss_scale"]["patience"] == 1000
    assert record["model"]["hidden_size"] == 16
    assert not list(config.run_dir.glob("checkpoints/*.partial"))


@pytest.fixture
def saved(folder: Path, tmp_path: Path) -> TrainConfig:
    """A run with one checkpoint, at step 1."""
    config = make_config(folder, run_dir=str(folder / "saved"), steps=1, checkpoint_every=1, parallel__cp=2)
    if not config.run_dir.exists():
        train(config)
    shutil.copytree(config.run_dir, tmp_path / "run")
    return config.model_copy(update={"run_dir": tmp_path / "run"})


def test_a_checkpoint_is_not_written_over(saved: TrainConfig) -> None:
    name, text = raised(prepare, saved)
    assert name == "CheckpointError"
    assert text == (
        f"{saved.run_dir}/checkpoints/step-00000001 exists: this run would overwrite the checkpoints of another run\n\n"
        "hint: set resume=true to continue from this checkpoint, or choose another run_dir"
    )


def load_on_ranks(group: Any, rank: int, config: TrainConfig) -> tuple[str, str]:
    return raised(checkpoint.load, checkpoint.newest(config.run_dir), make_step(config))


def test_a_checkpoint_of_another_model_is_refused_before_and_on_every_rank(folder: Path, saved: TrainConfig) -> None:
    other = make_config(
        folder, run_dir=str(saved.run_dir), resume=True, model__hidden_size=32, model__num_layers=3, parallel__cp=2
    )
    text = (
        f"{saved.run_dir}/checkpoints/step-00000001 is a checkpoint of another model: "
        "hidden_size is 16 in the checkpoint, 32 here; num_layers is 2 in the checkpoint, 3 here; "
        "head_dim is 8 in the checkpoint, 16 here\n\n"
        "hint: use the [model] section of the run that saved the checkpoint, or choose another run_dir"
    )
    assert raised(prepare, other) == ("CheckpointError", text)
    assert run_ranks(2, load_on_ranks, other) == [("CheckpointError", text)] * 2


def test_a_checkpoint_that_was_being_written_is_ignored(saved: TrainConfig) -> None:
    """Whatever a dead run left: shards alone, or all but the rename."""
    whole = saved.run_dir / "checkpoints" / "step-00000001"
    shutil.copytree(whole, whole.with_name("step-00000007.partial"))
    (whole.with_name("step-00000009")).mkdir()
    assert checkpoint.newest(saved.run_dir) == whole
    shutil.copytree(whole, whole.with_name("step-00000002.partial"))
    going_on = saved.model_copy(update={"resume": True, "steps": 2})
    prepare(going_on)
    assert train(going_on)["steps"] == 2
    assert checkpoint.newest(saved.run_dir) == whole.with_name("step-00000002")


def written_slowly(group: Any, rank: int, config: TrainConfig) -> list[bool]:
    """Whether this rank finds the folders of a checkpoint and of an export as soon as it is told of them."""
    step, rename = make_step(config), Path.rename

    def rename_late(source: Path, target: Path) -> Path:
        time.sleep(1)
        return rename(source, target)

    with patch.object(Path, "rename", rename_late):
        saved = checkpoint.save(config.run_dir, step, checkpoint.Progress(1, 48, {}))
        there = [(saved / "run.json").exists()]
        return [*there, (checkpoint.export(config.run_dir, step) / "config.json").exists()]


def test_what_rank_0_writes_is_there_when_any_rank_goes_on(tmp_path: Path) -> None:
    config = make_config(tmp_path, parallel__cp=2)
    assert run_ranks(2, written_slowly, config) == [[True, True]] * 2


def test_the_newest_checkpoint_is_that_of_the_latest_step(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path) is None
    for step in (2, 100, 30):
        folder = tmp_path / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "run.json").write_text("{}")
    assert checkpoint.newest(tmp_path) == tmp_path / "checkpoints" / "step-00000100"


@pytest.mark.parametrize("text", ["", "{"])
def test_a_damaged_record_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"is not a complete checkpoint: run.json: Expecting"):
        checkpoint.read_record(tmp_path)
    with pytest.raises(CheckpointError, match=r"is not a complete checkpoint: run.json: \[Errno 2\]"):
        checkpoint.read_record(tmp_path / "nowhere")


@pytest.mark.parametrize("tied", [False, True])
def test_export_is_a_folder_that_transformers_reads(folder: Path, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    config = make_config(
        folder, run_dir=str(folder / f"export-{tied}"), steps=2, checkpoint_every=2, export=True, dtype="fp32",
        parallel__cp=2, model__tie_embeddings=tied,
    )  # fmt: skip
    train(config)
    dcp_to_torch_save(config.run_dir / "checkpoints" / "step-00000002", config.run_dir / "whole.pt")
    ours = Decoder(config.model)
    ours.load_state_dict(torch.load(config.run_dir / "whole.pt", weights_only=False)["model"])
    first = make_model(config)
    assert not torch.equal(ours.norm.weight, first.norm.weight)

    theirs = AutoModelForCausalLM.from_pretrained(config.run_dir / "model", dtype=torch.float32)
    ids = torch.randint(256, (1, 21), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        hidden = ours(ids, torch.arange(21)[None], lambda q, k, v, mask: attend_documents(q, k, v, [21], mask))
        logits, right = ours.logits(hidden), theirs(ids).logits
    torch.testing.assert_close(logits, right, rtol=1e-5, atol=1e-5 * float(right.abs().max()))
    again = load_pretrained(config.run_dir / "model")
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model__qk_norm": True}, "qk_norm=True, windows=()"),
        ({"model__windows": [4, None]}, "qk_norm=False, windows=(4, None)"),
        (
            {
                "model__intermediate_size": None,
                "model__experts": {"num_experts": 4, "top_k": 2, "intermediate_size": 8},
            },
            "qk_norm=False, windows=(), 4 experts",
        ),
    ],
)
def test_a_model_that_cannot_be_exported_is_refused_before_the_run(
    folder: Path, change: dict[str, Any], said: str
) -> None:
    with pytest.raises(SpecError) as told:
        prepare(make_config(folder, run_dir=str(folder / "never"), export=True, **change))
    assert told.value.message == f"export=true: a Hugging Face Llama folder cannot represent {said}"
    assert told.value.hint == "set export=false and use checkpoint_every, or remove these options of the model"


def test_a_run_starts_from_an_exported_folder(folder: Path) -> None:
    """The first loss on the same rows is that of the weights in the folder, at another degree and type."""
    first = make_config(folder, run_dir=str(folder / "source"), steps=3, export=True, parallel__cp=2, dtype="fp32")
    train(first)
    values = first.model_dump(exclude={"model", "parallel"}) | {
        "init_from": first.run_dir / "model", "run_dir": folder / "from", "steps": 1, "export": False,
    }  # fmt: skip
    started = TrainConfig.model_validate(values)
    loss = train(started)["loss"]
    assert loss < metrics(first)[1] - 0.01


def test_export_does_not_write_over_the_weights_of_another_run(folder: Path) -> None:
    config = make_config(folder, run_dir=str(folder / "exported"), export=True)
    (config.run_dir / "model").mkdir(parents=True)
    with pytest.raises(CheckpointError) as error:
        prepare(config)
    assert str(error.value) == (
        f"{config.run_dir}/model exists: export would overwrite the weights of another run\n\n"
        "hint: choose another run_dir, remove this folder, or set export=false"
    )


def test_a_resumed_run_exports_again(folder: Path) -> None:
    config = make_config(folder, run_dir=str(folder / "exported-twice"), steps=2, checkpoint_every=1, export=True)
    train(config)
    before = (config.run_dir / "model" / "model.safetensors").read_bytes()
    train(config.model_copy(update={"steps": 3, "resume": True}))
    assert (config.run_dir / "model" / "model.safetensors").read_bytes() != before
    assert not (config.run_dir / "model.partial").exists()


def test_resume_with_fewer_steps_than_done_is_refused(saved: TrainConfig) -> None:
    record = json.loads((checkpoint.newest(saved.run_dir) / "run.json").read_text())
    assert record["step"] > 0
    record["step"] = saved.steps + 1
    with patch("longspan.train.checkpoint.read_record", return_value=record), pytest.raises(CheckpointError) as error:
        prepare(saved.model_copy(update={"resume": True}))
    assert f"is at step {saved.steps + 1}, but steps={saved.steps}" in str(error.value)


def test_resume_on_other_rows_is_refused_before_the_run(saved: TrainConfig) -> None:
    data = saved.data.model_copy(update={"seq_len": saved.data.seq_len + 1})
    with pytest.raises(DataError, match="loader state is of another stream: seq_len is 48 in the state, 49 here"):
        prepare(saved.model_copy(update={"resume": True, "data": data}))


def test_resume_without_a_checkpoint_is_told(folder: Path) -> None:
    config = make_config(folder, run_dir=str(folder / "nothing"), steps=1, resume=True)
    with pytest.warns(UserWarning, match="no checkpoint in .*nothing: training starts at step 1"):
        warn_here(config)


def warn_here(config: TrainConfig) -> None:
    """The warning of rank 0 happens in its process: look for it there, and tell it here."""
    for text in run_ranks(1, warnings_of_a_run, config)[0]:
        warnings.warn(text, stacklevel=1)


def warnings_of_a_run(group: Any, rank: int, config: TrainConfig) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_on_ranks(group, rank, config)
    return [str(warning.message) for warning in caught]


def test_a_checkpoint_that_lacks_a_shard_is_named(folder: Path) -> None:
    config = make_config(folder, run_dir=str(folder / "shard"), steps=1, checkpoint_every=1)
    train(config)
    broken = checkpoint.newest(config.run_dir)
    for shard in broken.glob("*.distcp"):
        shard.unlink()
    ((name, text),) = run_ranks(1, raised_by_a_run, config.model_copy(update={"steps": 2, "resume": True}))
    assert name == "CheckpointError"
    assert f"{broken} cannot be read" in text


def raised_by_a_run(group: Any, rank: int, config: TrainConfig) -> tuple[str, str]:
    return raised(run_on_ranks, group, rank, config)


def test_a_run_that_diverges_ends_with_an_error(folder: Path) -> None:
    config = make_config(folder, run_dir=str(folder / "diverged"), dtype="fp32", optim__lr=1e18, parallel__cp=2)
    for name, text in run_ranks(2, raised_by_a_run, config):
        assert name == "DivergedError"
        assert "the run has diverged" in text


def test_a_checkpoint_with_the_keys_of_before_is_read(folder: Path) -> None:
    """Keys of the loader's state and of the model that have other names now."""
    through, _ = stop_and_go(folder, "old-keys", {}, dtype="fp64")
    again = make_config(folder, run_dir=str(folder / "old-keys-again"), resume=True, **(CHANGES | {"dtype": "fp64"}))
    step = again.run_dir / "checkpoints" / "step-00000002"
    shutil.copytree(through.run_dir / "checkpoints" / "step-00000002", step)
    text = (step / "run.json").read_text()
    for old in ("row_tokens", "width", "ffn_width"):
        assert f'"{RENAMED[old]}"' in text
        text = text.replace(f'"{RENAMED[old]}"', f'"{old}"')
    (step / "run.json").write_text(text)
    train(again)
    assert metrics(again) == {step: loss for step, loss in metrics(through).items() if step > 2}
