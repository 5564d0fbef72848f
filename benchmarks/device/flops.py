"""FLOPs of attention, visible pairs only, and speeds made of FLOPs. Those of a step are in `longspan.train.flops`."""

import torch

from benchmarks.device.rows import Figures
from longspan.train.flops import peak_flops
from longspan.train.model import TORCH_DTYPES

FORWARD, BACKWARD = 4, 10
"""A visible pair, head and dim: two products of matrices; in backward five, one of which computes the scores again."""
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def attention_flops(pairs: int, num_heads: int, head_dim: int) -> int:
    """Forward and backward, as kernels are measured: what backward computes again counts."""
    return (FORWARD + BACKWARD) * pairs * num_heads * head_dim


def speed(flops: int, milliseconds: float, device: torch.device, dtype: torch.dtype) -> Figures:
    """What a row says of a speed; with the part of the device's peak, where that is known."""
    found: Figures = {"tflops": flops / milliseconds / 1e9}
    if device.type == "cuda" and (peak := peak_flops(torch.cuda.get_device_name(device), _NAMES[dtype])) is not None:
        found["of_peak"] = 1e3 * flops / milliseconds / peak
    return found
