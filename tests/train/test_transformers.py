"""Runs of models of transformers: what they start from, what they leave, and what they refuse."""

import json
import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from longspan.errors import LongspanError, SpecError
from longspan.model.transformers_model import build
from longspan.train import checkpoint
from longspan.train.flops import step_flops
from longspan.train.run import prepare, reckon, run
from longspan.train.train_config import TrainConfig, model_config
from tests.ranks import run_ranks
from tests.train.tiny import make_config, make_meshes, write_corpus
from tests.train.transformers_models import section

Tensor = torch.Tensor
IDS = torch.randint(256, (1, 21), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("transformers")
    write_corpus(folder)
    return folder


def run_on_rank(group: Any, rank: int, config: TrainConfig) -> Any:
    with patch("longspan.train.run.join", return_value=make_meshes(config)):
        return run(config, quiet=True)


def train(config: TrainConfig) -> Any:
    prepare(config)
    return run_ranks(config.parallel.cp * (config.parallel.dp or 1), run_on_rank, config)[0]


def metrics(config: TrainConfig) -> list[dict[str, Any]]:
    lines = (config.run_dir / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "loss" in record]


def hub_folder(path: Path, model_type: str = "qwen3", **changes: Any) -> Any:
    """A folder as users download it, and its model."""
    config = make_config(path, model=section(model_type, **changes))
    model: Any = build(model_config(config), seed=3, dtype=torch.float32)
    model.save_pretrained(path)
    files = {
        "tokenizer.json": "{}", "tokenizer_config.json": '{"eos_token": "x"}', "chat_template.jinja": "{{ messages }}",
        "generation_config.json": '{"top_k": 7}',
    }  # fmt: skip
    for name, text in files.items():
        (path / name).write_text(text)
    return model.eval()


@torch.no_grad()
def logits_of(path: Path) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    logits: Tensor = model(IDS).logits
    return logits


def test_losses_are_the_same_at_every_degree_and_after_a_resume(folder: Path) -> None:
    """One run at cp=1, one at cp=2 that stops after step 2 and resumes under DDP: held-out losses and metrics agree."""

    def configured(name: str, **changes: Any) -> TrainConfig:
        values = {"steps": 3, "eval_every": 3, "checkpoint_every": 2, "run_dir": str(folder / name)}
        return make_config(folder, model=section("qwen3_moe", tie_word_embeddings=True), **values, **changes)

    one = train(configured("one"))
    train(configured("two", parallel__cp=2, eval_rows=1).model_copy(update={"steps": 2}))
    config = configured("two", parallel__cp=2, resume=True, parallel__wrapper="ddp")
    two = train(config)
    assert two.loss == pytest.approx(one.loss, rel=1e-9)
    assert two.heldout_loss == pytest.approx(one.heldout_loss, rel=1e-9)
    first = metrics(configured("one"))[0]
    assert first["loss"] == pytest.approx(metrics(config)[0]["loss"], rel=1e-9)
    assert math.isfinite(first["tflops"])


def test_init_from_any_folder_and_the_export_is_complete(folder: Path, tmp_path: Path) -> None:
    """The first loss is that of the folder's weights; with a learning rate of almost 0, the export has equal logits."""
    source = tmp_path / "source"
    entries = {"max_position_embeddings": 131072, "bos_token_id": 1, "eos_token_id": 0}
    hub_folder(source, "qwen3_moe", **entries)
    config = make_config(
        folder, model=None, init_from=str(source), run_dir=str(tmp_path / "run"), steps=1, export=True, dtype="fp32",
        parallel__cp=2, optim={"lr": 1e-30},
    )  # fmt: skip
    train(config)
    written = tmp_path / "run" / "model"
    exported = json.loads((written / "config.json").read_text())
    assert {key: exported[key] for key in entries} == entries
    assert exported["model_type"] == "qwen3_moe"
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (written / name).read_text() == (source / name).read_text()
    torch.testing.assert_close(logits_of(written), logits_of(source), rtol=0, atol=1e-6)


def test_the_decoder_of_longspan_serves_llama_and_agrees_with_transformers(folder: Path, tmp_path: Path) -> None:
    """`model.rope_theta` beside `init_from` changes both alike, and their exports keep what the folder says."""
    source = tmp_path / "source"
    hub_folder(source, "llama", max_position_embeddings=4096, bos_token_id=1, eos_token_id=[0, 2])
    losses = {}
    for name in ("longspan", "transformers"):
        changes = {"rope_theta": 500.0, "implementation": name}
        config = make_config(
            folder,
            model=changes,
            init_from=str(source),
            run_dir=str(tmp_path / name),
            steps=2,
            export=True,
            parallel__cp=2,
        )
        losses[name] = train(config).loss
        exported = json.loads((tmp_path / name / "model" / "config.json").read_text())
        theta = exported.get("rope_theta") or exported["rope_parameters"]["rope_theta"]
        assert theta == 500.0
        assert (exported["max_position_embeddings"], exported["bos_token_id"]) == (4096, 1)
        assert exported["eos_token_id"] == [0, 2]
        assert (tmp_path / name / "model" / "generation_config.json").read_text() == '{"top_k": 7}'
    assert losses["longspan"] == pytest.approx(losses["transformers"], rel=1e-6)
    plain = make_config(
        folder, model=None, init_from=str(source), parallel__cp=2, run_dir=str(tmp_path / "plain"), steps=2
    )
    assert type(model_config(plain)).__name__ == "ModelConfig"
    assert abs(train(plain).loss - losses["longspan"]) > 1e-4


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        ({"kind": "linear", "factor": 4.0}, 4 * 512),
        ({"kind": "yarn", "factor": 8.0, "original_max_positions": 512}, 8 * 512),
        (
            {
                "kind": "llama3",
                "factor": 2.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_positions": 512,
            },
            2 * 512,
        ),
    ],
)
def test_rope_changes_are_those_of_transformers(tmp_path: Path, scaling: dict[str, Any], positions: int) -> None:
    """The changed model computes what transformers computes from an exported folder, whose longest position it states."""
    from longspan.model.transformers_model import save_transformers

    hub_folder(tmp_path / "source", max_position_embeddings=512)
    changes = {"rope_scaling": scaling, "rope_theta": 20000.0}
    shape: Any = model_config(make_config(model=changes, init_from=str(tmp_path / "source")))
    model: Any = build(shape, seed=0, dtype=torch.float32)
    save_transformers(shape, dict(model.named_parameters()), tmp_path / "changed", longest=48)
    exported = json.loads((tmp_path / "changed" / "config.json").read_text())
    assert exported["max_position_embeddings"] == positions
    rope = exported["rope_parameters"]
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == (scaling["kind"], scaling["factor"], 20000.0)
    with torch.no_grad():
        logits = model.eval()(IDS).logits
    torch.testing.assert_close(logits_of(tmp_path / "changed"), logits)
    assert not torch.allclose(logits_of(tmp_path / "source"), logits, atol=1e-3)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"parallel__tp": 2},
            "parallel.tp=2 for model_type 'qwen3': a model of transformers is sharded over dp and cp only",
        ),
        ({"parallel__pp": 2}, "parallel.pp=2 for model_type 'qwen3'"),
        ({"parallel__ep": 2, "parallel__cp": 2}, "parallel.ep=2 for model_type 'qwen3'"),
        (
            {"parallel__route": "upipe", "parallel__cp": 2},
            "route 'upipe' for model_type 'qwen3': only longspan's decoder",
        ),
        ({"compile": True}, "compile=true for model_type 'qwen3': only blocks of longspan's decoder are compiled"),
        ({"dropout": 0.1}, "dropout=0.1 for model_type 'qwen3': only longspan's decoder draws it by token"),
        (
            {"model": section("qwen3", hidden_sise=8)},
            "model.config has entries that Qwen3Config does not read: hidden_sise",
        ),
        ({"model": {"model_type": "qwen33"}}, "model_type 'qwen33' is not a causal language model of the installed"),
        (
            {"model": section("qwen3", attention_dropout=0.1)},
            "Qwen3ForCausalLM cannot be trained on a sharded sequence",
        ),
        ({"model": section("qwen3", vocab_size=100)}, "the tokenizer has 256 tokens, but model.vocab_size is 100"),
    ],
)
def test_what_a_run_refuses_by_name(folder: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as told:
        prepare(make_config(folder, **({"model": section("qwen3")} | changes)))
    assert told.value.message.startswith(said)
    assert told.value.hint


def test_a_model_that_mixes_tokens_outside_attention_is_refused_before_any_rank_starts(folder: Path) -> None:
    config = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 256, "state_size": 8}
    with pytest.raises(SpecError, match="MambaForCausalLM cannot be trained on a sharded sequence"):
        prepare(make_config(folder, model={"model_type": "mamba", "config": config}))


def test_weights_that_do_not_fit_the_configuration_are_named(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    hub_folder(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    extra = weights | {"model.layers.0.self_attn.bias": torch.zeros(3)}
    for tensors, what in (({"model.norm.weight": weights["model.norm.weight"]}, "missing"), (extra, "unexpected")):
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(SpecError, match=rf"{what} tensors, \d+: (lm_head|model)"):
            build(model_config(make_config(model=None, init_from=str(tmp_path))), seed=0, dtype=torch.float32)


@pytest.mark.parametrize("implementation", ["longspan", "transformers"])
def test_a_tied_head_in_the_weights_is_taken_if_equal_and_else_named(
    folder: Path, tmp_path: Path, implementation: str
) -> None:
    from safetensors.torch import load_file, save_file

    hub_folder(tmp_path, "llama", tie_word_embeddings=True)
    weights = load_file(tmp_path / "model.safetensors")
    shape = {"model": {"implementation": implementation}, "init_from": str(tmp_path)}

    def started() -> Tensor:
        from longspan.train.model import make_model, make_transformers

        config = make_config(folder, **shape)
        if implementation == "longspan":
            return make_model(config).embed_tokens.weight  # type: ignore[union-attr]
        return dict(make_transformers(config, model_config(config)).named_parameters())["model.embed_tokens.weight"]

    head = weights["model.embed_tokens.weight"]
    save_file(weights | {"lm_head.weight": head.clone()}, tmp_path / "model.safetensors", {"format": "pt"})
    torch.testing.assert_close(started().float(), head)
    save_file(weights | {"lm_head.weight": head + 1}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(SpecError, match=r"lm_head\.weight"):
        started()


def test_recomputation_keeps_or_repeats_attention(folder: Path, tmp_path: Path) -> None:
    """Pairs computed by each rank in forward and backward, over those without recomputation: 1 for "block", 1.5 for "full"."""
    pairs = {}
    for recompute in ("none", "block", "full"):
        config = make_config(
            folder, model=section("qwen3"), run_dir=str(tmp_path / recompute), steps=1, recompute=recompute,
            parallel__cp=2, optim={"warmup_steps": 0},
        )  # fmt: skip
        train(config)
        (step,) = metrics(config)
        pairs[recompute] = [usage["pairs"] for usage in step["ranks"]]
    assert pairs["block"] == pairs["none"]
    assert pairs["full"] == [1.5 * count for count in pairs["none"]]


def test_rows_of_a_run_are_packed(folder: Path, tmp_path: Path) -> None:
    """The plans of a manifest are those of the model: its masks, heads and head dim."""
    from longspan.train.pack_run import pack_run
    from longspan.train.train_config import PackConfig

    values = make_config(folder, model=section("gemma3_text"), parallel__cp=2).model_dump()
    report = pack_run(PackConfig.model_validate(values), tmp_path / "rows.parquet")
    assert report.masks == {"window-9": 1, "full": 1}
    assert (list(report.heads or ()), report.head_dim, report.cp) == ([4, 2], 8, 2)
    assert report.tokens.sum() == report.rank_tokens.sum()


def test_a_checkpoint_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    config = make_config(
        folder, model=section("qwen3"), run_dir=str(tmp_path), steps=1, checkpoint_every=1, optim={"warmup_steps": 0}
    )
    train(config)
    (saved,) = tmp_path.glob("checkpoints/*")
    other = make_config(folder, model=section("qwen3", hidden_size=64))
    record = checkpoint.read_record(saved)
    with pytest.raises(LongspanError, match="hidden_size is 32 in the checkpoint, 64 here"):
        checkpoint.check_model(saved, record, model_config(other))
    with pytest.raises(LongspanError, match="model_type is qwen3 in the checkpoint, gemma3_text here"):
        checkpoint.check_model(saved, record, model_config(make_config(folder, model=section("gemma3_text"))))


def test_flops_count_matrices_and_chosen_experts() -> None:
    """By hand: qwen3_moe, 2 layers: q 32x32, k and v 32x16, o 32x32, router 4x32, 2 of 4 experts of 3 x 32 x 16; head 256x32."""
    model: Any = model_config(make_config(model=section("qwen3_moe")))
    weights = 2 * (32 * 32 * 2 + 2 * 32 * 16 + 4 * 32 + 2 * 3 * 32 * 16) + 256 * 32
    assert step_flops(model, tokens=10, pairs=7) == 6 * weights * 10 + 12 * 4 * 8 * 7


def test_a_dry_run_counts_weights_exactly_and_activations_by_a_run_without_memory(folder: Path) -> None:
    config = make_config(folder, model=section("qwen3"), parallel__cp=2, dtype="fp32")
    shape: Any = model_config(config)
    sizes = [p.numel() for p in build(shape, seed=0, dtype=torch.float32).parameters()]
    (stage,) = reckon(config, prepare(config)).budget.stages
    assert stage.num_parameters == sum(sizes) // 2  # every first dim is even
    assert (stage.parameters, stage.gradients, stage.moments) == (2 * sum(sizes), 2 * sum(sizes), 4 * sum(sizes))
    assert stage.activations is not None
    assert stage.activations > 2 * 24 * (32 + 48) * 4  # 2 layers of 24 slots: more than inputs and MLP
