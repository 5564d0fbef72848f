"""FLOPs of attention over visible pairs, and speeds in TFLOP/s. For FLOPs of a step see `longspan.train.flops`."""

import torch

from benchmarks.device.rows import Figures
from longspan.train.flops import peak_flops
from longspan.train.model import TORCH_DTYPES

FORWARD, BACKWARD = 4, 10
"""FLOPs per visible pair, head and dim: two matrix products in forward, five in backward, which recomputes the scores."""
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def attention_flops(pairs: int, num_heads: int, head_dim: int) -> int:
    """Return the FLOPs of forward and backward, including the recomputation of scores, as is usual for kernels."""
    return (FORWARD + BACKWARD) * pairs * num_heads * head_dim


def speed(flops: int, milliseconds: float, device: torch.device, dtype: torch.dtype) -> Figures:
    """Return the TFLOP/s of a call, and TFLOP/s / the device's peak if the peak is known."""
    found: Figures = {"tflops": flops / milliseconds / 1e9}
    if device.type == "cuda" and (peak := peak_flops(torch.cuda.get_device_name(device), _NAMES[dtype])) is not None:
        found["of_peak"] = 1e3 * flops / milliseconds / peak
    return found
