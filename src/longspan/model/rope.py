"""Rotary position embedding from explicit positions (Su et al., 2021, arXiv:2104.09864, eq. 34; Llama's order of dims).
Tables are computed from the given positions, so a shard of any layout gets the table rows of its own tokens.
"""

import math

import torch
from torch import Tensor

from longspan.model.model_config import Llama3RopeScaling, ModelConfig


def rotary_tables(position_ids: Tensor, config: ModelConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return `(cos, sin)`, each `(B, 1, T, D)`, for int64 positions `(B, T)`; padding slots, at -1, give finite values.

    The tables are fp64 for `dtype` fp64, else fp32, and equal Hugging Face Llama's bit for bit.
    """
    dtype = torch.float64 if dtype == torch.float64 else torch.float32
    frequencies = _inverse_frequencies(config, dtype, position_ids.device)
    angles = position_ids[:, None, :, None].to(dtype) * frequencies  # (B, 1, T, D/2)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x (B, heads, T, D)` by the tables, in the dtype of the tables. Returns the dtype of `x`.

    Dim `d` pairs with `d + D/2`:  D=4:  [x0 x1 x2 x3]  ->  [x0 x1 x2 x3] cos + [-x2 -x3 x0 x1] sin
    """
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def _inverse_frequencies(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Tensor:
    exponents = torch.arange(0, config.head_dim, 2, dtype=dtype, device=device) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    return frequencies if config.rope_scaling is None else _scale_llama3(frequencies, config.rope_scaling)


def _scale_llama3(frequencies: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """Scale frequencies as does `apply_scaling` in meta-llama/llama-models, models/llama3/model.py.

    With wavelength `w = 2 pi / f` and `s = (L / w - low) / (high - low)` clamped to [0, 1]:
    `f' = (1 - s) f / factor + s f`.
    """
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((scaling.original_max_positions / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies
