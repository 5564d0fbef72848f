"""The shape of a decoder as plain numbers, for checks of degrees and estimates of memory and traffic."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertsShape:
    """The mixture of experts (MoE) that replaces every feed-forward."""

    num_experts: int
    top_k: int
    intermediate_size: int
    """Intermediate size of one expert."""
    shared_intermediate_size: int = 0
    """Intermediate size of the shared expert; 0 without a shared expert."""
    balance: bool = False
    """Whether a load-balancing loss is added."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder's dimensions: numbers of layers and heads, and sizes in elements."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    intermediate_size: int = 0
    """Intermediate size of a dense layer; 0 with experts."""
    experts: ExpertsShape | None = None
    qk_norm: bool = False
    tie_embeddings: bool = False
