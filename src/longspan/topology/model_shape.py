"""The shape of a decoder as plain numbers: what degrees, memory and traffic of a run are worked out from."""

from dataclasses import dataclass

from longspan.names import mask_name


@dataclass(frozen=True)
class ExpertsShape:
    """The mixture of experts in place of every feed-forward."""

    num_experts: int
    top_k: int
    intermediate_size: int
    """Features inside one expert."""
    shared_intermediate_size: int = 0
    """Features inside the shared expert; 0 without one."""
    balance: bool = False
    """Whether a balance loss is taken."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder's counts and sizes, in elements."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    intermediate_size: int = 0
    """Features inside the feed-forward of a dense layer; 0 with experts."""
    experts: ExpertsShape | None = None
    windows: tuple[int | None, ...] = ()
    """Attention window of each layer, None for full attention. Empty: full attention in every layer."""
    qk_norm: bool = False
    tie_embeddings: bool = False

    @property
    def mask_names(self) -> tuple[str, ...]:
        """The mask of each layer by name."""
        return tuple(map(mask_name, self.windows or (None,) * self.num_layers))
