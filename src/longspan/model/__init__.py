"""A decoder with explicit positions, its loss, and Hugging Face Llama folders in and out.

Names load when they are first used, so that a run's configuration is read without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longspan.model.config import ExpertsConfig, Llama3RopeScaling, ModelConfig
    from longspan.model.decoder import SAVED_OPS, Attend, Block, Decoder, Recompute, SelfAttention, WholeLayer
    from longspan.model.dropout import TokenDropout
    from longspan.model.expert_parallel import apply_expert_parallel
    from longspan.model.experts import MixtureOfExperts, Routing
    from longspan.model.huggingface import load_pretrained, load_weights, read_config, save_pretrained
    from longspan.model.loss import IGNORED, VocabShard, count_targets, mean_loss_scale, token_loss_sum
    from longspan.model.tensor_parallel import apply_tensor_parallel

_HOME = {
    "IGNORED": "loss",
    "SAVED_OPS": "decoder",
    "Attend": "decoder",
    "Block": "decoder",
    "Decoder": "decoder",
    "ExpertsConfig": "config",
    "Llama3RopeScaling": "config",
    "MixtureOfExperts": "experts",
    "ModelConfig": "config",
    "Recompute": "decoder",
    "Routing": "experts",
    "SelfAttention": "decoder",
    "TokenDropout": "dropout",
    "VocabShard": "loss",
    "WholeLayer": "decoder",
    "apply_expert_parallel": "expert_parallel",
    "apply_tensor_parallel": "tensor_parallel",
    "count_targets": "loss",
    "load_pretrained": "huggingface",
    "load_weights": "huggingface",
    "mean_loss_scale": "loss",
    "read_config": "huggingface",
    "save_pretrained": "huggingface",
    "token_loss_sum": "loss",
}

__all__ = [
    "IGNORED",
    "SAVED_OPS",
    "Attend",
    "Block",
    "Decoder",
    "ExpertsConfig",
    "Llama3RopeScaling",
    "MixtureOfExperts",
    "ModelConfig",
    "Recompute",
    "Routing",
    "SelfAttention",
    "TokenDropout",
    "VocabShard",
    "WholeLayer",
    "apply_expert_parallel",
    "apply_tensor_parallel",
    "count_targets",
    "load_pretrained",
    "load_weights",
    "mean_loss_scale",
    "read_config",
    "save_pretrained",
    "token_loss_sum",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'longspan.model' has no attribute {name!r}")
    return getattr(import_module(f"longspan.model.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
