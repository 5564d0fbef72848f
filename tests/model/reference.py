"""A small model, and plain attention to run it with: the reference side of every test here."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan.model import ModelConfig


def make_config(**changes: Any) -> ModelConfig:
    shape = {
        "vocab_size": 61,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "intermediate_size": 48,
    }
    return ModelConfig(**(shape | changes))


def dense_attend(q: Tensor, k: Tensor, v: Tensor, mask: str) -> Tensor:
    """Causal SDPA over one document, with the window in the mask's name if there is one."""
    T = q.shape[2]
    distance = torch.arange(T)[:, None] - torch.arange(T)[None, :]
    seen = distance >= 0
    if mask != "full":
        seen &= distance < int(mask.removeprefix("window-"))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)


def relative_error(value: Tensor, right: Tensor) -> float:
    return float((value - right).detach().abs().max() / right.detach().abs().max())
