"""A Llama-like decoder: all but attention is local to a token, so a shard of the sequence runs through it unchanged.
Attention is a callable given to `forward`: the executor of a Plan under context parallelism, plain SDPA without.

Shapes: B batch, T this rank's slots, E width, H query heads, K KV heads, D head dim.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from longspan.model.config import ModelConfig
from longspan.model.loss import token_loss_sum
from longspan.model.rope import apply_rotary, rotary_tables
from longspan.spec import SpecError


@dataclass(frozen=True)
class WholeLayer:
    """Attention that takes a layer's input and its projections, and never sees q, k, v of all heads.

    `run(x, layer, rotate, mask)`: x (B, T, E), the layer with its weights, what gives some heads (B, heads, T, D) their
    positions, the name of the layer's mask; gives (B, T, E), the output projection included.
    """

    run: Callable[[Tensor, "SelfAttention", Callable[[Tensor], Tensor], str], Tensor]


Attend = Callable[[Tensor, Tensor, Tensor, str], Tensor] | WholeLayer
"""`attend(q, k, v, mask)`: q (B, H, T, D), k and v (B, K, T, D), the name of the layer's mask; gives (B, H, T, D)."""

Recompute = Literal["none", "block", "full"]
SAVED_OPS = ("longspan::attention_forward",)


class Decoder(nn.Module):
    """Embedding, `config.num_layers` blocks, final norm, head.

    Parameter names are those of Hugging Face's LlamaForCausalLM without the prefix `model.`. RMSNorm and rotary
    embedding compute in fp32 (fp64 for fp64); q, k and v reach `attend` in the model's own dtype.

    recompute: "none" keeps activations; "block" keeps each block's input and the results of `saved_ops`, and computes
    the rest again in backward; "full" keeps the input alone. saved_ops: qualified names of operators never run twice; the
    default is the attention executor's forward, so that recomputation repeats no hop.

    `Decoder` can be made on the meta device; after `to_empty`, `init_weights` draws what the constructor would have.
    """

    def __init__(
        self, config: ModelConfig, *, recompute: Recompute = "none", saved_ops: tuple[str, ...] = SAVED_OPS
    ) -> None:
        super().__init__()
        if recompute not in get_args(Recompute):
            raise SpecError(f"recompute {recompute!r} is unknown", hint=f"use one of {list(get_args(Recompute))}")
        self.config = config
        self.embed_tokens = _Embedding(config.vocab_size, config.width)
        saved_ops = saved_ops if recompute == "block" else ()
        self.layers = nn.ModuleList(Block(config, recompute, saved_ops) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.lm_head = None if config.tie_embeddings else _Linear(config.width, config.vocab_size)
        self.init_weights()

    def forward(self, input_ids: Tensor, position_ids: Tensor, attend: Attend, labels: Tensor | None = None) -> Tensor:
        """Final hidden states (B, T, E) or, given labels, the sum of the token losses (see `token_loss_sum`).

        input_ids, position_ids and labels are (B, T) int64. position_ids are positions inside each token's document;
        a dead slot has -1, and its id is not looked at. The loss is computed here, and not by the caller, so that a
        wrapper that gathers weights for the length of `forward` (FSDP2) covers the head.
        """
        if position_ids.dtype != torch.int64 or position_ids.shape != input_ids.shape or input_ids.ndim != 2:
            raise SpecError(
                f"position_ids are {tuple(position_ids.shape)} {position_ids.dtype}, "
                f"input_ids {tuple(input_ids.shape)}",
                hint="both are (batch, slots); positions are torch.int64 and sharded like the ids",
            )
        x = self.embed_tokens(input_ids.masked_fill(position_ids < 0, 0))
        cos, sin = rotary_tables(position_ids, self.config, x.dtype)
        for block, mask in zip(self.layers, self.config.mask_names, strict=True):
            x = block(x, cos, sin, attend, mask)
        hidden: Tensor = self.norm(x)
        return hidden if labels is None else token_loss_sum(hidden, labels, self.head_weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """(B, T, E) -> (B, T, vocab_size), in the dtype of `hidden`. Training passes labels to `forward` instead."""
        logits: Tensor = F.linear(hidden, self.head_weight) if self.lm_head is None else self.lm_head(hidden)
        return logits

    @property
    def head_weight(self) -> Tensor:
        """The head's weight (vocab_size, E): the embedding's own if tied."""
        return (self.embed_tokens if self.lm_head is None else self.lm_head).weight

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw all weights from the default generator: normal(0, init_std), norms 1.

        What is added to the residual stream (`o_proj`, `down_proj`) is drawn with `init_std / sqrt(2 * num_layers)`,
        as in GPT-2 (Radford et al., 2019, section 2.3).
        """
        residual_std = self.config.init_std / math.sqrt(2 * self.config.num_layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                is_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                parameter.normal_(0.0, residual_std if is_residual else self.config.init_std)


class Block(nn.Module):
    """Attention and a gated feed-forward layer, each on a normalised residual: the unit to shard and recompute."""

    def __init__(self, config: ModelConfig, recompute: Recompute, saved_ops: tuple[str, ...]) -> None:
        super().__init__()
        self.recompute = recompute
        self.saved_ops = saved_ops
        self.input_layernorm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.self_attn = SelfAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, mask: str) -> Tensor:
        """x (B, T, E) -> (B, T, E); cos, sin (B, 1, T, D) in fp32 or fp64."""
        if cos.dtype not in (torch.float32, torch.float64):
            raise SpecError(
                f"rotary tables reached a block as {cos.dtype}: a wrapper casts the inputs of the modules it wraps",
                hint="with FSDP2 use MixedPrecisionPolicy(param_dtype=..., cast_forward_inputs=False)",
            )
        if self.recompute == "none" or not torch.is_grad_enabled():
            return self._compute(x, cos, sin, attend, mask)
        # Inside the module's own hooks: a wrapper's gathers are no part of what is recorded and recomputed.
        out: Tensor = checkpoint(
            self._compute,
            *(x, cos, sin, attend, mask),
            use_reentrant=False,
            preserve_rng_state=False,  # a block draws no random number
            context_fn=partial(create_selective_checkpoint_contexts, partial(_policy, self.saved_ops)),
        )
        return out

    def _compute(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, mask: str) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class SelfAttention(nn.Module):
    """Projections, optional QK-norm over the head dim (as in Qwen3), rotary embedding; KV heads are never expanded."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = _Linear(config.width, config.num_heads * config.head_dim)
        self.k_proj = _Linear(config.width, config.num_kv_heads * config.head_dim)
        self.v_proj = _Linear(config.width, config.num_kv_heads * config.head_dim)
        self.o_proj = _Linear(config.num_heads * config.head_dim, config.width)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, mask: str) -> Tensor:
        if isinstance(attend, WholeLayer):
            return attend.run(x, self, lambda heads: apply_rotary(heads, cos, sin), mask)
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, T, heads * D) -> (B, heads, T, D)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out = attend(apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v, mask)
        merged: Tensor = self.o_proj(out.transpose(1, 2).flatten(-2))
        return merged


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, 2020, arXiv:2002.05202, eq. 6): `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = _Linear(config.width, config.ffn_width)
        self.up_proj = _Linear(config.width, config.ffn_width)
        self.down_proj = _Linear(config.ffn_width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Linear(nn.Linear):
    """A linear map without bias and without torch's own draw: `Decoder.init_weights` draws every weight once."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        pass


class _Embedding(nn.Embedding):
    """An embedding without torch's own draw."""

    def reset_parameters(self) -> None:
        pass


def _policy(saved_ops: tuple[str, ...], ctx: Any, op: Any, /, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Operators are matched by name, "namespace::name" whatever the overload, so that none has to be imported here."""
    is_saved = op.name().partition(".")[0] in saved_ops
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE
