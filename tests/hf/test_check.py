"""`hf.check` on models of each kind: what passes, and what is refused by module, layer, cause and way out."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from longspan.errors import SpecError
from longspan.hf.model_check import check
from longspan.hf.probe import AttentionCall

_LAYERS = {"num_hidden_layers": 4}
_NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "dropout": 0.0, "attention_dropout": 0.0}


def on_meta(kind: str, maker: Any = AutoModelForCausalLM, **settings: Any) -> PreTrainedModel:
    """A model of full width without weights."""
    config = AutoConfig.for_model(kind, **(_LAYERS | _NO_DROPOUT | settings))
    with torch.device("meta"):
        return maker.from_config(config, attn_implementation="eager")


def refusal(model: nn.Module, seq_len: int = 96) -> SpecError:
    with pytest.raises(SpecError) as caught:
        check(model, seq_len)
    return caught.value


def test_what_a_check_has_seen() -> None:
    """Every kind of layer once: gpt-oss alternates windows and full attention, 64 query and 8 KV heads are 4 and 2 here."""
    seen = check(on_meta("gpt_oss", num_hidden_layers=6, sliding_window=40), 96)
    assert seen.kinds == ("window-40", "full")
    assert seen.lengths == (52, 96)
    assert seen.calls == (
        AttentionCall("model.layers.0.self_attn", "window-40", 4, 2),
        AttentionCall("model.layers.1.self_attn", "full", 4, 2),
    )


@pytest.mark.parametrize(
    ("kind", "settings", "kinds"),
    [
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}, ("full",)),
        ("gpt2", {}, ("full",)),
        ("mistral", {"sliding_window": 60}, ("window-60",)),
        ("deepseek_v3", {"first_k_dense_replace": 1}, ("full",)),
        ("llama4_text", {"attention_chunk_size": 64, "floor_scale": 8192}, ("chunk-64", "full")),
    ],
)
def test_models_that_pass(kind: str, settings: dict[str, Any], kinds: tuple[str, ...]) -> None:
    assert check(on_meta(kind, **settings), 96).kinds == kinds


_MIXES = "mixes tokens outside attention"
_LINEAR = "linear_attention"
_LONG = {
    "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 48, "long_factor": [4.0] * 48},
    "original_max_position_embeddings": 64, "max_position_embeddings": 4096, "pad_token_id": 0,
}  # fmt: skip
_DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
_SHARD = "computes positions, rotary tables or scales from the shard"
_ALONE = "mixes tokens without calling the attention function of transformers' AttentionInterface"


@pytest.mark.parametrize(
    ("kind", "settings", "place", "cause"),
    [
        ("qwen3_next", {"layer_types": ["full_attention", *[_LINEAR] * 3]}, "layer 1, model.layers.1.linear_attn", _MIXES),
        ("lfm2", {"layer_types": ["full_attention", *["conv"] * 3]}, "layer 1, model.layers.1.conv", _MIXES),
        ("falcon_h1", {}, "layer 0, model.layers.0.mamba", _MIXES),
        ("mamba2", {}, "layer 0, backbone.layers.0.mixer", _ALONE),
        ("bloom", {"n_layer": 2, "hidden_dropout": 0.0}, "layer 0, transformer.h.0.self_attention", _ALONE),
        ("falcon", {}, "layer 0, transformer.h.0.self_attention", _ALONE),
        ("deepseek_v32", {}, "layer 0, model.layers.0.self_attn", "passes indices to attention"),
        ("bart", {"decoder_layers": 2, "encoder_layers": 2}, "decoder", "counts positions from the start of the shard"),
        ("llama", {"rope_parameters": _DYNAMIC, "max_position_embeddings": 64}, "model.rotary_emb", _SHARD),
        ("phi3", _LONG, "model.rotary_emb", _SHARD),
        ("llama4_text", {"floor_scale": 60, "attention_chunk_size": 64}, "layer 3, model.layers.3.self_attn", _SHARD),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)  # fmt: skip
def test_what_is_refused(kind: str, settings: dict[str, Any], place: str, cause: str) -> None:
    message = refusal(on_meta(kind, **settings)).message
    assert re.search(re.escape(place), message)
    assert cause in message


@pytest.mark.parametrize("kind", ["llama", "phi3", "llama4_text"])
def test_thresholds_of_length_pass_on_shorter_rows(kind: str) -> None:
    """The same settings as above, on rows that do not reach them."""
    settings: dict[str, dict[str, Any]] = {
        "llama": {"rope_parameters": _DYNAMIC, "max_position_embeddings": 64},
        "phi3": _LONG,
        "llama4_text": {"floor_scale": 60, "attention_chunk_size": 64},
    }
    check(on_meta(kind, **settings[kind]), 56)


def test_a_refusal_in_full() -> None:
    error = refusal(on_meta("llama", rope_parameters=_DYNAMIC, max_position_embeddings=64))
    assert str(error) == (
        "LlamaForCausalLM cannot be trained on a sharded sequence: model.rotary_emb (LlamaRotaryEmbedding) computes positions, "
        "rotary tables or scales from the shard that it is given, not from position_ids alone\n\n"
        "hint: take rope_type 'default', 'linear', 'llama3' or 'yarn'; or a seq_len below the length at which it changes"
    )


def test_dropout() -> None:
    assert "transformer.drop (Dropout) has dropout p=0.2" in refusal(on_meta("gpt2", embd_pdrop=0.2)).message
    assert "model.layers.0.self_attn (LlamaAttention) has dropout attention_dropout=0.1" in (
        refusal(on_meta("llama", attention_dropout=0.1)).message
    )


def test_heads_that_pool_or_ask_for_places() -> None:
    classes = on_meta("llama", AutoModelForSequenceClassification, pad_token_id=0)
    places = on_meta("llama", AutoModelForQuestionAnswering)
    for model in (classes, places):
        assert "has no logits for each token" in refusal(model).message


def test_several_devices() -> None:
    model = on_meta("llama")
    model.hf_device_map = {"model.embed_tokens": 0, "model.layers": 1, "lm_head": 1}
    assert "lies on devices 0, 1 (hf_device_map)" in refusal(model).message


class _Adapted(nn.Module):
    """What `peft.PeftModel` shows of itself."""

    def __init__(self, model: nn.Module, **settings: Any) -> None:
        super().__init__()
        self.base_model = model
        self.peft_config = {"default": SimpleNamespace(**settings)}

    def get_base_model(self) -> nn.Module:
        return self.base_model  # type: ignore[return-value]


def test_adapters() -> None:
    model = on_meta("llama")
    assert check(_Adapted(model, peft_type="LORA", is_prompt_learning=False), 96).kinds == ("full",)
    for settings in (
        {"peft_type": "PROMPT_TUNING", "is_prompt_learning": True},
        {"peft_type": "LORA", "is_prompt_learning": False, "alora_invocation_tokens": [7]},
    ):
        message = refusal(_Adapted(model, **settings)).message
        assert message.startswith(f"adapter 'default' ({settings['peft_type']}) adds or looks for tokens")


def test_nothing_is_left_behind() -> None:
    model = on_meta("llama")
    torch.manual_seed(3)
    before, config = torch.get_rng_state(), model.config.to_dict()
    check(model, 96)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.config.to_dict() == config
    assert "longspan_probe" not in AttentionInterface().valid_keys()


def test_a_model_sharded_by_fsdp2_is_its_own_class() -> None:
    model = on_meta("llama")
    cls = type(model)
    model.__class__ = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {})
    assert check(model, 96).kinds == ("full",)


def test_what_is_no_model_of_transformers() -> None:
    assert refusal(nn.Linear(2, 2)).message == "Linear is not a model of transformers"


@pytest.mark.nightly
def test_an_8b_llama_at_131072_tokens_takes_a_minute_and_4_gib() -> None:
    import resource
    import time

    model = on_meta(
        "llama", num_hidden_layers=32, hidden_size=4096, num_attention_heads=32, num_key_value_heads=8,
        intermediate_size=14336, vocab_size=128256, max_position_embeddings=131072,
    )  # fmt: skip
    held, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    assert check(model, 131072).lengths == (52, 131072)
    assert time.process_time() - began < 60
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held) < 4 << 20  # in KiB
