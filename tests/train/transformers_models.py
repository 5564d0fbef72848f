"""Tiny models of transformers as [model] sections."""

from typing import Any

_SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 48, "vocab_size": 256, "initializer_range": 0.2,
}  # fmt: skip
_WINDOWS: dict[str, Any] = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": _SIZES,
    "gemma3_text": _SIZES | _WINDOWS,
    "gpt_oss": _SIZES | _WINDOWS | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": _SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "llama": _SIZES,
}


def section(model_type: str, **changes: Any) -> dict[str, Any]:
    """The [model] section of a type, with changed entries of its configuration."""
    return {"model_type": model_type, "config": CONFIGS[model_type] | changes}
