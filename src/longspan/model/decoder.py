"""A Llama-like decoder. Everything but attention is local to a token, so a shard of the sequence needs no changes.
Attention is a callable passed to `forward`: the executor of a Plan under context parallelism, else plain SDPA.

Shapes: B batch, T this rank's slots, E hidden size, H query heads, K KV heads, D head dim. Under tensor parallelism H and K are
heads of this rank; with sequence parallelism hidden states between layers are (B, T / tp, E).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from longspan.errors import SpecError
from longspan.model.dropout import TokenDropout
from longspan.model.experts import MixtureOfExperts, Routing
from longspan.model.loss import token_loss_sum
from longspan.model.model_config import ModelConfig
from longspan.model.philox import normal
from longspan.model.regions import local_region
from longspan.model.rope import apply_rotary, rotary_tables


@dataclass(frozen=True)
class WholeLayer:
    """Attention that also runs the projections, so that q, k, v of all heads never exist at once.

    `run(x, layer, rotate, mask)` takes x (B, T, E), the layer with its weights, `rotate` to apply rotary embedding to heads
    (B, heads, T, D), and the name of the layer's mask. Returns (B, T, E), after the output projection.
    """

    run: Callable[[Tensor, "SelfAttention", Callable[[Tensor], Tensor], str], Tensor]


Attend = Callable[[Tensor, Tensor, Tensor, str], Tensor] | WholeLayer
"""`attend(q, k, v, mask)`: q (B, H, T, D), k and v (B, K, T, D), the name of the layer's mask; returns (B, H, T, D)."""

Recompute = Literal["none", "block", "full"]
SAVED_OPS = ("longspan::attention_forward",)
_RESIDUAL = ("o_proj", "down_proj")

# Experts are an FSDP2 unit inside a decoder block. The unit's profiler markers differ between recomputation and forward.
SAC_IGNORED_OPS |= {
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
}


class Decoder(nn.Module):
    """Embedding, `config.num_layers` blocks, final norm, head.

    Parameter names are those of Hugging Face's LlamaForCausalLM without the prefix `model.`. RMSNorm and rotary
    embedding compute in fp32 (fp64 for fp64); q, k and v reach `attend` in the model's own dtype.

    recompute: "none" keeps activations; "block" keeps each block's input and the results of `saved_ops`, and recomputes
    the rest in backward; "full" keeps only the input. saved_ops: qualified names of operators that are not recomputed;
    default: forward of the attention executor, so that recomputation repeats no communication.

    dropout: probability of residual dropout after attention and MLP, in training mode. The mask follows from `seed` and the
    token's global number (see `TokenDropout`). `seed` also determines the initial weights.

    part: the layers of a pipeline stage, such as range(0, 4). Parameter names stay those of the complete model. The first
    stage has the embedding; the last stage has norm and head (and a copy of the embedding, if tied).

    To build on the meta device, call `to_empty` and then `init_weights`: the weights equal those of the constructor.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        recompute: Recompute = "none",
        saved_ops: tuple[str, ...] = SAVED_OPS,
        dropout: float = 0.0,
        seed: int = 0,
        part: range | None = None,
    ) -> None:
        super().__init__()
        if recompute not in get_args(Recompute):
            raise SpecError(f"recompute {recompute!r} is unknown", hint=f"use one of {list(get_args(Recompute))}")
        self.config, self.dropout, self.seed = config, dropout, seed
        self.part = range(config.num_layers) if part is None else part
        is_first, is_last = 0 in self.part, config.num_layers - 1 in self.part
        saved_ops = saved_ops if recompute == "block" else ()
        has_embedding = is_first or (is_last and config.tie_embeddings)
        self.embed_tokens = _Embedding(config.vocab_size, config.hidden_size) if has_embedding else None
        self.layers = nn.ModuleList(
            Block(config, layer, recompute, saved_ops, dropout, seed) if layer in self.part else nn.Identity()
            for layer in range(config.num_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps) if is_last else None
        self.lm_head = _Linear(config.hidden_size, config.vocab_size) if is_last and not config.tie_embeddings else None
        self.loss_sum: Callable[[Tensor, Tensor, Tensor], Tensor] = token_loss_sum
        """Loss from hidden states, labels and the head's weight. Tensor parallelism replaces it with a vocab-parallel one."""
        self.init_weights()

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attend: Attend,
        labels: Tensor | None = None,
        *,
        tokens: Tensor | None = None,
        routing: Routing | None = None,
    ) -> Tensor:
        """Return final hidden states (B, T, E) or, given labels, the sum of the token losses (see `token_loss_sum`).

        input_ids, position_ids and labels are (B, T) int64. position_ids are positions within each token's document, -1 for
        padding slots, whose ids are ignored. The loss is computed inside `forward`, so that a wrapper that gathers weights
        during `forward` (FSDP2) also gathers the head.

        tokens: global number of each token, int64, shaped like the hidden states without E; required for dropout. routing:
        required for layers of experts. Later pipeline stages take hidden states in place of `input_ids`; all but the last
        stage return hidden states.
        """
        if self.dropout and self.training and tokens is None:
            raise SpecError(
                f"dropout {self.dropout} needs the global token numbers, but tokens is None",
                hint="pass tokens=, or call eval() to turn dropout off",
            )
        x = input_ids
        if 0 in self.part:
            if position_ids.dtype != torch.int64 or position_ids.shape != input_ids.shape or input_ids.ndim != 2:
                raise SpecError(
                    f"position_ids are {tuple(position_ids.shape)} {position_ids.dtype}, "
                    f"input_ids {tuple(input_ids.shape)}",
                    hint="both must be (batch, slots); positions must be torch.int64 and sharded like the ids",
                )
            assert self.embed_tokens is not None, "the stage of the first layer has the embedding"
            x = self.embed_tokens(input_ids.masked_fill(position_ids < 0, 0))
        cos, sin = rotary_tables(position_ids, self.config, x.dtype)
        for layer in self.part:
            x = self.layers[layer](x, cos, sin, attend, self.config.mask_names[layer], tokens, routing)
        if self.norm is None:
            return x
        hidden: Tensor = self.norm(x)
        return hidden if labels is None else self.loss_sum(hidden, labels, self.head_weight)

    @property
    def blocks(self) -> list["Block"]:
        """The layers of this stage."""
        return [self.layers[layer] for layer in self.part]  # type: ignore[misc]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits (B, T, vocab_size) of hidden states (B, T, E), in the same dtype. To train, pass labels to `forward`."""
        logits: Tensor = F.linear(hidden, self.head_weight) if self.lm_head is None else self.lm_head(hidden)
        return logits

    @property
    def head_weight(self) -> Tensor:
        """The head's weight (vocab_size, E); the embedding's weight if tied."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        assert head is not None, "the stage of the last layer has the head"
        return head.weight

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialise all weights: normal(0, init_std), norms 1. An element depends only on the seed, the parameter's name and the
        element's index in the unsharded parameter, so shards match the unsharded model.

        Projections onto the residual stream (`o_proj`, `down_proj`) use `init_std / sqrt(2 * num_layers)`, as in GPT-2 (Radford
        et al., 2019, section 2.3).
        """
        residual_std = self.config.init_std / math.sqrt(2 * self.config.num_layers)
        for name, parameter in self.named_parameters():
            local, region = local_region(parameter)
            if parameter.ndim == 1:
                local.fill_(1.0)
            elif not local.is_meta and local.numel():
                std = residual_std if name.removesuffix(".weight").endswith(_RESIDUAL) else self.config.init_std
                shape = tuple(parameter.shape)
                local.copy_(
                    normal(shape, region, seed=self.seed, name=name, std=std, dtype=local.dtype, device=local.device)
                )


class Block(nn.Module):
    """A pre-norm layer of attention and a gated feed-forward: the unit of FSDP and of activation recomputation."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        recompute: Recompute,
        saved_ops: tuple[str, ...],
        dropout: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.saved_ops = saved_ops
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.self_attn = SelfAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp: FeedForward | MixtureOfExperts
        if config.experts is None:
            assert config.intermediate_size is not None, "the configuration has one of intermediate_size and experts"
            self.mlp = FeedForward(config.hidden_size, config.intermediate_size)
        else:
            shared = config.experts.shared_intermediate_size
            self.mlp = MixtureOfExperts(config, layer, FeedForward(config.hidden_size, shared) if shared else None)
        self.dropouts = nn.ModuleList(TokenDropout(dropout, seed, 2 * layer + site) for site in range(2))

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        mask: str,
        tokens: Tensor | None = None,
        routing: Routing | None = None,
    ) -> Tensor:
        """Map x (B, T, E) to (B, T, E). cos, sin (B, 1, T, D) in fp32 or fp64; tokens, routing as in `Decoder.forward`."""
        if cos.dtype not in (torch.float32, torch.float64):
            raise SpecError(
                f"the rotary tables that reached a decoder block are {cos.dtype}: a wrapper casts the inputs of its modules",
                hint="with FSDP2 use MixedPrecisionPolicy(param_dtype=..., cast_forward_inputs=False)",
            )
        if self.recompute == "none" or not torch.is_grad_enabled():
            return self._compute(x, cos, sin, attend, mask, tokens, routing)
        # Checkpoint inside the module's hooks, so that a wrapper's all-gathers are neither recorded nor recomputed.
        out: Tensor = checkpoint(
            self._compute,
            *(x, cos, sin, attend, mask, tokens, routing),
            use_reentrant=False,
            preserve_rng_state=False,  # dropout is counter-based: it has no RNG state
            context_fn=partial(create_selective_checkpoint_contexts, partial(keep_saved_ops, self.saved_ops)),
        )
        return out

    def _compute(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        mask: str,
        tokens: Tensor | None,
        routing: Routing | None,
    ) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), cos, sin, attend, mask)
        x = x + self._dropped(0, attended, tokens)
        normed = self.post_attention_layernorm(x)
        fed = self.mlp(normed, routing) if isinstance(self.mlp, MixtureOfExperts) else self.mlp(normed)
        out: Tensor = x + self._dropped(1, fed, tokens)
        return out

    def _dropped(self, site: int, added: Tensor, tokens: Tensor | None) -> Tensor:
        dropped: Tensor = added if tokens is None else self.dropouts[site](added, tokens)
        return dropped


class SelfAttention(nn.Module):
    """Projections, optional QK-norm over the head dim (as in Qwen3), rotary embedding. KV heads are not repeated."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = _Linear(config.hidden_size, config.num_heads * config.head_dim)
        self.k_proj = _Linear(config.hidden_size, config.num_kv_heads * config.head_dim)
        self.v_proj = _Linear(config.hidden_size, config.num_kv_heads * config.head_dim)
        self.o_proj = _Linear(config.num_heads * config.head_dim, config.hidden_size)
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

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = _Linear(hidden_size, intermediate_size)
        self.up_proj = _Linear(hidden_size, intermediate_size)
        self.down_proj = _Linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Linear(nn.Linear):
    """A linear map without bias and without torch's initialisation: `Decoder.init_weights` sets every weight."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        pass


class _Embedding(nn.Embedding):
    """An embedding without torch's initialisation."""

    def reset_parameters(self) -> None:
        pass


def keep_saved_ops(saved_ops: tuple[str, ...], ctx: Any, op: Any, /, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Match operators by "namespace::name", any overload, so that no import of the operators is needed."""
    is_saved = op.name().partition(".")[0] in saved_ops
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE
