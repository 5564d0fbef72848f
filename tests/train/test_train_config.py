"""A configuration from a file and overrides, and what is said of one that cannot be carried out."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from longspan.errors import SpecError
from longspan.model import FolderChanges
from longspan.train.train_config import TrainConfig, load_config

TEXT = """
steps = 10
[data]
paths = ["corpus"]
seq_len = 64
[model]
vocab_size = 256
hidden_size = 16
num_layers = 2
num_heads = 2
num_kv_heads = 1
intermediate_size = 32
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(TEXT)
    return path


def test_defaults(file: Path) -> None:
    config = load_config(file)
    assert config.steps == 10
    assert (config.parallel.cp, config.parallel.dp, config.parallel.layout, config.parallel.wrapper) == (
        1, None, "zigzag", "fsdp",
    )  # fmt: skip
    assert (config.dtype, config.recompute, config.resume, config.export) == ("fp32", "none", False, False)


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("steps=20", lambda c: c.steps, 20),
        ("parallel.cp=4", lambda c: c.parallel.cp, 4),
        ("parallel.layout=striped", lambda c: c.parallel.layout, "striped"),
        ('parallel.layout="striped"', lambda c: c.parallel.layout, "striped"),
        ("optim.lr=1e-2", lambda c: c.optim.lr, 0.01),
        ("optim.betas=[0.8, 0.99]", lambda c: c.optim.betas, (0.8, 0.99)),
        ("optim.clip_norm=none", lambda c: c.optim.clip_norm, None),
        ("imbalance_limit=1.5", lambda c: c.imbalance_limit, 1.5),
        ("imbalance_limit=none", lambda c: c.imbalance_limit, None),
        ("resume=true", lambda c: c.resume, True),
        ("run_dir=runs/a=b", lambda c: c.run_dir, Path("runs/a=b")),
        ("data.paths=['a', 'b']", lambda c: c.data.paths, ("a", "b")),
        ("data.packing=fit", lambda c: c.data.fit_options.buffer, 64),
        (" model.hidden_size =32", lambda c: c.model.hidden_size, 32),
        ("model.windows=[8, 16]", lambda c: c.model.windows, (8, 16)),
        (
            "model.rope_scaling={factor = 8.0, low_freq_factor = 1.0, high_freq_factor = 4.0, original_max_positions = 64}",
            lambda c: c.model.rope_scaling.factor,
            8.0,
        ),
    ],
)
def test_overrides(file: Path, override: str, read: Any, value: Any) -> None:
    assert read(load_config(file, [override])) == value


def test_options_of_fit(file: Path) -> None:
    fit = load_config(file, ["data.packing=fit", "data.fit.buckets=[8, 32]", "data.fit.balance=area"]).data.fit_options
    assert fit is not None
    assert (fit.buckets, fit.balance) == ((8, 32), "area")
    with pytest.raises(ValidationError, match=r'fit\.buffer=8 has no effect with packing "stream"'):
        load_config(file, ["data.fit.buffer=8"])


def test_the_last_override_of_a_value_counts(file: Path) -> None:
    assert load_config(file, ["steps=20", "parallel.cp=2", "steps=30"]).steps == 30


@pytest.mark.parametrize(
    ("override", "message", "hint"),
    [
        ("steps", "--set 'steps' is not of the form section.key=value", "write it as --set parallel.cp=2"),
        ("=3", "--set '=3' is not of the form section.key=value", "write it as --set parallel.cp=2"),
        ("parallel.=3", "--set 'parallel.=3' is not of the form section.key=value", "write it as --set parallel.cp=2"),
        (
            "steps.cp=3",
            "--set 'steps.cp=3': steps is a value, not a section",
            "set the value itself: --set steps=value",
        ),
    ],
)
def test_overrides_that_name_nothing(file: Path, override: str, message: str, hint: str) -> None:
    with pytest.raises(SpecError) as told:
        load_config(file, [override])
    assert (told.value.message, told.value.hint) == (message, hint)


@pytest.mark.parametrize(
    ("override", "place", "text"),
    [
        ("parallel.cpp=2", ("parallel", "cpp"), "Extra inputs are not permitted"),
        ("layout=zigzag", ("layout",), "Extra inputs are not permitted"),
        ("data.rows=1", ("data", "rows"), "Extra inputs are not permitted"),
        ("parallel.cp=0", ("parallel", "cp"), "greater than or equal to 1"),
        ("imbalance_limit=1", ("imbalance_limit",), "greater than 1"),
        ("parallel.layout=spiral", ("parallel", "layout"), "layout 'spiral' is not known"),
        ("parallel.route=spiral", ("parallel", "route"), "route 'spiral' is not known"),
        ("parallel.comm_dtype=fp16", ("parallel", "comm_dtype"), "comm_dtype 'fp16' is not known"),
        ("dtype=fp8", ("dtype",), "dtype 'fp8' is not known"),
        ("optim.lr=0", ("optim", "lr"), "greater than 0"),
        ("optim.min_lr_ratio=1.5", ("optim", "min_lr_ratio"), "less than or equal to 1"),
        ("steps=1.5", ("steps",), "integer"),
        ("seed=-1", ("seed",), "greater than or equal to 0"),
        ("model.num_kv_heads=3", ("model",), "3 KV heads do not divide 2 query heads"),
    ],
)
def test_values_that_are_refused(file: Path, override: str, place: tuple[str, ...], text: str) -> None:
    with pytest.raises(ValidationError) as told:
        load_config(file, [override])
    (problem,) = told.value.errors()
    assert problem["loc"] == place
    assert text in problem["msg"]


@pytest.mark.parametrize(
    ("overrides", "message", "hint"),
    [
        (
            ["init_from=weights"],
            "both model and init_from are given",
            "give [model] to start from random weights, or init_from to start from a folder",
        ),
        (
            ["model=none"],
            "neither model nor init_from is given",
            "give [model] to start from random weights, or init_from to start from a folder",
        ),
        (
            ["parallel.wrapper=ddp", "dtype=bf16"],
            'dtype="bf16" with parallel.wrapper="ddp": DDP keeps one copy of the weights, in fp32',
            'use parallel.wrapper="fsdp" for bf16 and fp16',
        ),
        (
            ["parallel.wrapper=ddp", "dtype=fp16"],
            'dtype="fp16" with parallel.wrapper="ddp": DDP keeps one copy of the weights, in fp32',
            'use parallel.wrapper="fsdp" for bf16 and fp16',
        ),
        (
            ["parallel.heads_per_stage=2"],
            "parallel.heads_per_stage=2 has no effect on route 'ring'",
            'remove it, or set parallel.route="upipe"',
        ),
        (
            ["parallel.costs=costs.json"],
            "parallel.costs=costs.json has no effect on route 'ring' and layout 'zigzag'",
            'remove it, or set parallel.route="auto" or parallel.layout="balanced"',
        ),
        (
            ["parallel.route=upipe", "recompute=block"],
            'recompute="block" with route "upipe": this route already recomputes attention',
            'set recompute="none", or another route',
        ),
        (
            ["optim.warmup_steps=11"],
            "optim.warmup_steps 11 is more than steps 10",
            "lower optim.warmup_steps or raise steps",
        ),
    ],
)
def test_combinations_that_are_refused(file: Path, overrides: list[str], message: str, hint: str) -> None:
    with pytest.raises(ValidationError) as told:
        load_config(file, overrides)
    (problem,) = told.value.errors()
    assert (problem["ctx"]["error"].message, problem["ctx"]["error"].hint) == (message, hint)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("data.row_tokens=64", "data.row_tokens is now data.seq_len"),
        ("model.ffn_width=64", "model.ffn_width is now model.intermediate_size"),
        (
            "model.experts.shared_ffn_width=64",
            "model.experts.shared_ffn_width is now model.experts.shared_intermediate_size",
        ),
        ("rows_per_batch=2", "rows_per_batch is now micro_batch_size"),
        ("accumulation=2", "accumulation is now gradient_accumulation_steps"),
        ("parallel.replicas=2", "parallel.replicas is now parallel.dp_replicate"),
        ("parallel.wire_dtype=bf16", "parallel.wire_dtype is now parallel.comm_dtype"),
        ("parallel.slots_multiple_of=8", "parallel.slots_multiple_of is now parallel.pad_to_multiple_of"),
    ],
)
def test_an_old_key_is_told_the_new_one(file: Path, override: str, told: str) -> None:
    with pytest.raises(SpecError) as error:
        load_config(file, [override])
    assert (error.value.message, error.value.hint) == (f"{file}: {told}", "rename these keys")


def test_combinations_that_are_allowed(file: Path) -> None:
    assert load_config(file, ["model=none", "init_from=weights"]).init_from == Path("weights")
    changed = load_config(file, ["model=none", "init_from=weights", "model.rope_theta=500000"]).model
    assert changed == FolderChanges(rope_theta=500000.0)
    assert load_config(file, ["parallel.wrapper=ddp", "dtype=fp64"]).dtype == "fp64"
    assert load_config(file, ["optim.warmup_steps=10"]).optim.warmup_steps == 10


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[data\n", "is not TOML: Expected ']' at the end of a table declaration (at line 1, column 6)"),
        (b"steps = 1\nsteps = 2\n", "is not TOML: Cannot overwrite a value (at line 2, column 10)"),
        (b"a = '\xff'\n", "is not TOML: 'utf-8' codec can't decode byte 0xff in position 5: invalid start byte"),
    ],
)
def test_a_file_that_is_not_toml(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "bad.toml").write_bytes(content)
    with pytest.raises(SpecError) as told:
        load_config(tmp_path / "bad.toml")
    assert told.value.message == f"{tmp_path / 'bad.toml'} {message}"
    assert told.value.hint == "correct the file; its keys are those of TrainConfig"


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as told:
        load_config(tmp_path / "none.toml")
    assert told.value.message == f"cannot read {tmp_path / 'none.toml'}: No such file or directory"
    assert told.value.hint == "give the path of a TOML file"


def test_a_configuration_does_not_change(file: Path) -> None:
    config: TrainConfig = load_config(file)
    with pytest.raises(ValidationError, match="frozen"):
        config.steps = 3
    with pytest.raises(ValidationError, match="frozen"):
        config.parallel.cp = 3
