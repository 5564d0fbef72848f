"""A decoder with explicit positions, its loss, and Hugging Face Llama folders in and out."""

from longspan.model.config import Llama3RopeScaling, ModelConfig
from longspan.model.decoder import SAVED_OPS, Attend, Block, Decoder, Recompute, SelfAttention, WholeLayer
from longspan.model.huggingface import load_pretrained, read_config, save_pretrained
from longspan.model.loss import IGNORED, count_targets, mean_loss_scale, token_loss_sum

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
