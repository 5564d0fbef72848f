"""A decoder with explicit positions, its loss, and Hugging Face Llama folders in and out.

Names load when they are first used, so that a run's configuration is read without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longspan.model.config import Llama3RopeScaling, ModelConfig
    from longspan.model.decoder import SAVED_OPS, Attend, Block, Decoder, Recompute, SelfAttention, WholeLayer
    from longspan.model.huggingface import load_pretrained, read_config, save_pretrained
    from longspan.model.loss import IGNORED, count_targets, mean_loss_scale, token_loss_sum

_HOME = {
    "IGNORED": "loss",
    "SAVED_OPS": "decoder",
    "Attend": "decoder",
    "Block": "decoder",
    "Decoder": "decoder",
    "Llama3RopeScaling": "config",
    "ModelConfig": "config",
    "Recompute": "decoder",
    "SelfAttention": "decoder",
    "WholeLayer": "decoder",
    "count_targets": "loss",
    "load_pretrained": "huggingface",
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
    "Llama3RopeScaling",
    "ModelConfig",
    "Recompute",
    "SelfAttention",
    "WholeLayer",
    "count_targets",
    "load_pretrained",
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
