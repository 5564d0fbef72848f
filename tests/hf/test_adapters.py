"""Adapters of peft under context parallelism: LoRA and its kin equal one process, what mixes tokens is refused by name."""

from functools import cache
from typing import Any

import pytest
import torch
from peft import (
    AdaptionPromptConfig,
    IA3Config,
    LilyConfig,
    LoraConfig,
    PeftConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    PveraConfig,
    ShadowConfig,
    get_peft_model,
)

from longspan import ContextParallel, hf
from longspan.errors import SpecError
from tests.hf.models import LENGTHS, MODELS, alone, assert_same, documents, gradients, loss_of, packed
from tests.ranks import run_threads

Tensor = torch.Tensor

CAUSAL: dict[str, Any] = {"task_type": "CAUSAL_LM"}
LORA: dict[str, Any] = CAUSAL | {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}
EXACT = {
    "lora": lambda: LoraConfig(**LORA),
    "dora and a trained head": lambda: LoraConfig(use_dora=True, modules_to_save=["lm_head"], **LORA),
    "ia3": lambda: IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], **CAUSAL),
}
CHECKPOINTS = [None, {"use_reentrant": False}, {"use_reentrant": True}]


def adapted(config: PeftConfig, implementation: str) -> PeftModel:
    """Return the tiny llama in fp64 with this adapter, whose weights are the same each time, none of them zero."""
    model = get_peft_model(MODELS["llama"].build(implementation), config).double().train()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.double) * 0.1)
    return model


@cache
def wanted(name: str) -> tuple[Tensor, dict[str, Tensor]]:
    return alone(adapted(EXACT[name](), "sdpa"), documents())


def train(group, rank: int, name: str, checkpoint: dict[str, bool] | None) -> tuple[Tensor, dict[str, Tensor]]:
    model = adapted(EXACT[name](), "longspan")
    if checkpoint is not None:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(checkpoint)
    with hf.sequence(ContextParallel(group), model, packed(documents())) as seq:
        logits = model(**seq.inputs).logits
    loss = loss_of(logits, seq.inputs["shift_labels"], sum(LENGTHS) - len(LENGTHS))
    seq.backward(loss)
    return loss.detach(), gradients(model)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=["kept", "recomputed", "recomputed, re-entrant"])
@pytest.mark.parametrize("name", EXACT)
def test_gradients_of_adapters_equal_one_process(name: str, checkpoint: dict[str, bool] | None) -> None:
    found = run_threads(2, train, name, checkpoint)
    assert_same(found, wanted(name), MODELS["llama"].bounds)
    assert 0 < len(found[0][1]) < len(list(MODELS["llama"].build("sdpa").parameters()))  # adapters alone


_PROMPT = "puts learned tokens before the tokens that it is given"
REFUSED = {
    "prompt tuning": (PromptTuningConfig(num_virtual_tokens=4, **CAUSAL), "PROMPT_TUNING", _PROMPT),
    "prefix tuning": (PrefixTuningConfig(num_virtual_tokens=4, **CAUSAL), "PREFIX_TUNING", _PROMPT),
    "p-tuning": (PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=8, **CAUSAL), "P_TUNING", _PROMPT),
    "adaption prompt": (
        AdaptionPromptConfig(adapter_len=4, adapter_layers=2, **CAUSAL), "ADAPTION_PROMPT", "an attention of its own",
    ),
    "alora": (LoraConfig(alora_invocation_tokens=[5, 6], **LORA), "LORA", "invocation tokens (aLoRA)"),
    "lily": (LilyConfig(r=4, num_B=2, target_modules=["q_proj"], **CAUSAL), "LILY", "a mean over the tokens"),
    "pvera": (PveraConfig(r=4, target_modules=["q_proj"], **CAUSAL), "PVERA", "draws noise"),
    "shadow": (ShadowConfig(**CAUSAL), "SHADOW", "a second model"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_adapters_that_mix_tokens_are_refused(name: str) -> None:
    config, method, words = REFUSED[name]
    model = get_peft_model(MODELS["llama"].build("longspan").float(), config)
    with pytest.raises(SpecError) as error, hf.sequence(ContextParallel(None), model, packed(documents())):
        pass
    assert error.value.message.startswith(f"adapter 'default' of PeftModelForCausalLM is of {method}, which ")
    assert words in error.value.message
    assert error.value.hint == (
        "use LoRA or another adapter of linear layers, or train this adapter without context parallelism"
    )


def test_dropout_of_adapters_is_refused_in_training_alone() -> None:
    model = adapted(LoraConfig(lora_dropout=0.25, **LORA), "longspan")
    cp = ContextParallel(None)
    with pytest.raises(SpecError) as error, hf.sequence(cp, model, packed(documents())):
        pass
    assert error.value.message == (
        "adapter 'default' of PeftModelForCausalLM has lora_dropout=0.25: "
        "its masks on this rank's tokens would be other ones than on the whole row"
    )
    assert "set lora_dropout=0.0" in str(error.value)
    with hf.sequence(cp, model.eval(), packed(documents())) as seq:
        assert model(**seq.inputs).loss > 0


def test_adapters_are_seen_from_the_model_within() -> None:
    model = adapted(LoraConfig(lora_dropout=0.5, **LORA), "longspan").base_model.model
    with pytest.raises(SpecError) as error, hf.sequence(ContextParallel(None), model, packed(documents())):
        pass
    assert error.value.message.startswith("adapter 'default' of LlamaForCausalLM has lora_dropout=0.5")
