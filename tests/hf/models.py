"""Tiny models of transformers, and what they compute on one rank by transformers' own attention, one document at a time."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from longspan import hf  # noqa: F401  registers the name

Tensor = torch.Tensor

LENGTHS = [40, 17, 39]
VOCAB = 64
_SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "attention_dropout": 0.0,
}  # fmt: skip


@dataclass(frozen=True)
class Tiny:
    """A kind of model with settings of its own, and how it is compared."""

    kind: str
    settings: dict[str, Any] = field(default_factory=dict)
    plain: str = "sdpa"
    """Attention implementation of the one-rank side."""
    bounds: tuple[float, float] = (1e-12, 1e-10)
    """Of the loss, and of each gradient relative to its size. Wider where the model computes in fp32 islands."""

    def build(self, implementation: str) -> PreTrainedModel:
        """Return the model in fp64, with the same weights each time, none of them zero or one."""
        torch.manual_seed(0)
        config = AutoConfig.for_model(self.kind, **(_SIZES | self.settings))
        config._experts_implementation = "eager"  # the default has no fp64
        model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        return model


_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_ISLANDS = (1e-8, 1e-5)
MODELS = {
    tiny.kind: tiny
    for tiny in (
        Tiny("llama"),
        Tiny("qwen3"),
        Tiny("mistral", {"sliding_window": 30}),
        Tiny("smollm3", {"num_hidden_layers": 4}),
        Tiny("olmo2"),
        Tiny("olmo3", {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}),
        Tiny("phi3"),
        Tiny("glm"),
        Tiny("gpt_neox"),
        Tiny("gpt2", {"n_embd": 32, "n_head": 4, "n_layer": 2, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}),
        Tiny("opt", {"ffn_dim": 48, "dropout": 0.0, "word_embed_proj_dim": 32}),
        Tiny(
            "minicpm3",
            {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
             "qk_rope_head_dim": 8, "v_head_dim": 12},
        ),
        Tiny("qwen3_moe", dict(num_experts=4, **_EXPERTS)),
        Tiny("mixtral", {"num_local_experts": 4, "sliding_window": None}),
        Tiny("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 30}, "eager", (1e-12, 1e-12)),
        Tiny("deepseek_v3", dict(num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16,
             qk_rope_head_dim=8, v_head_dim=12, n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1, **_EXPERTS),
             bounds=_ISLANDS),
        Tiny("gemma2", {"sliding_window": 30, "query_pre_attn_scalar": 8}, "eager", _ISLANDS),
        Tiny("gemma3_text", {"sliding_window": 20, "query_pre_attn_scalar": 8, "num_hidden_layers": 3,
             "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}, bounds=_ISLANDS),
        Tiny("cohere2", {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}, bounds=_ISLANDS),
        Tiny("llama4_text", {"attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 48,
             "num_hidden_layers": 4},
             "eager", _ISLANDS),
        Tiny("mimo_v2_flash", dict(head_dim=12, v_head_dim=8, swa_head_dim=12, swa_v_head_dim=8, swa_num_attention_heads=4,
             swa_num_key_value_heads=4, sliding_window=20, n_routed_experts=4, hybrid_layer_pattern=[0, 1], **_EXPERTS),
             "eager", _ISLANDS),
    )
}  # fmt: skip
"""MHA, GQA, MLA, windows, chunks, sinks, soft-caps, NoPE, experts, two KV counts."""


def documents(lengths: list[int] = LENGTHS, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (1, length), generator=generator) for length in lengths]


def packed(parts: list[Tensor]) -> dict[str, Tensor]:
    """Return the documents as one packed row, as a flattening collator makes it."""
    ids = torch.cat(parts, 1)
    positions = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
    return {"input_ids": ids, "labels": ids, "position_ids": positions}


def loss_of(logits: Tensor, labels: Tensor, num_targets: int) -> Tensor:
    """Sum in fp64, because the loss of transformers is in fp32. `labels` are shifted."""
    return (
        F.cross_entropy(logits.double().flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        / num_targets
    )


def shifted(ids: Tensor) -> Tensor:
    return torch.cat([ids[:, 1:], torch.full((len(ids), 1), -100)], 1)


def alone(model: PreTrainedModel, parts: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return loss and gradients of the documents, each alone."""
    targets = sum(part.shape[1] - 1 for part in parts)
    losses = [loss_of(model(input_ids=part, use_cache=False).logits, shifted(part), targets) for part in parts]
    loss = torch.stack(losses).sum()
    loss.backward()
    return loss.detach(), gradients(model)


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(
    found: list[tuple[Tensor, dict[str, Tensor]]], wanted: tuple[Tensor, dict[str, Tensor]], bounds: Any
) -> None:
    """Hold the sums of the ranks' (loss, gradients) against one rank's. A gradient that is rounding alone has no size."""
    loss, whole = wanted
    assert abs(float(sum(share for share, _ in found) - loss)) <= bounds[0]
    assert all(grads.keys() == whole.keys() for _, grads in found)
    largest = max(float(gradient.norm()) for gradient in whole.values())
    for name, gradient in whole.items():
        difference = float((sum(grads[name] for _, grads in found) - gradient).norm())
        assert difference <= bounds[1] * max(float(gradient.norm()), 1e-6 * largest), name
