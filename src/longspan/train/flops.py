"""Speed of a run: tokens/s, FLOP/s and model FLOPs utilisation (MFU). No torch.

    FLOPs = 6 x parameters that multiply x tokens  +  12 x query heads x head_dim x visible pairs, summed over layers

The product of n rows with an (a, b) matrix is 2 n a b FLOPs; backward has two such products. With head dim D, attention has
4 D FLOPs per pair and head in forward and 8 D in backward. Recomputation of layers or in a flash kernel is not counted.
Follows Chowdhery et al., 2022 (arXiv:2204.02311, appendix B), except that they count all S x S pairs of a row instead of
the visible pairs.
"""

import math
import re
from dataclasses import dataclass

from longspan.model.model_config import ModelConfig
from longspan.model.transformers_config import TransformersConfig
from longspan.names import DTYPES

PEAKS: dict[tuple[str, ...], tuple[float, float]] = {
    ("A100",): (312, 19.5),
    ("A800",): (312, 19.5),
    ("H100",): (989, 67),
    ("H100", "PCIE"): (756, 51),
    ("H100", "NVL"): (835, 60),
    ("H800",): (989, 67),
    ("H800", "PCIE"): (756, 51),
    ("GH200",): (989, 67),
    ("H200",): (989, 67),
    ("H200", "NVL"): (835, 60),
    ("H20",): (148, 44),
    ("B200",): (2250, 75),
    ("GB200",): (2500, 80),
    ("L40",): (181, 90.5),
    ("L40S",): (362, 91.6),
    ("MI300X",): (1307, 163.4),
    ("MI325X",): (1307, 163.4),
}
"""Words in a device's name -> (dense TFLOP/s in bf16 and fp16, TFLOP/s in fp32 without TF32) of one device.

From the vendors' data sheets ("NVIDIA A100 Tensor Core GPU", "H100", "H200", "L40", "L40S", "Blackwell Architecture
Technical Brief" for B200 and GB200, "AMD Instinct MI300X", "MI325X"). NVIDIA's figures from H100 on assume sparsity
and are halved here. A name without a form factor ("NVIDIA H100 80GB HBM3") is the SXM module.
"""


@dataclass(frozen=True)
class Speed:
    """Speed of one step or of several. TFLOP/s are per device."""

    seconds: float
    tokens_per_second: float
    tokens_per_second_per_device: float
    tflops: float
    """TFLOP/s per device, with attention on visible pairs only. NaN for a model whose heads the configuration does not give."""
    tflops_full: float
    """TFLOP/s per device as if every token attended to `seq_len` tokens, for comparison with published figures."""
    mfu: float | None
    """`tflops` / peak of the device. None for a device outside `PEAKS`, or if `tflops` is NaN."""


@dataclass(frozen=True)
class Meter:
    """Converts tokens, visible pairs and seconds of a run to a `Speed`."""

    model: ModelConfig | TransformersConfig
    seq_len: int
    devices: int
    peak: float | None
    """Peak FLOP/s of one device: see `peak_flops`."""

    def speed(self, tokens: int, pairs: int, seconds: float) -> Speed:
        """Return the speed of all devices together. `pairs`: visible pairs of `tokens`, summed over layers."""
        each = seconds * self.devices
        done = step_flops(self.model, tokens, pairs)
        full = step_flops(self.model, tokens, tokens * self.seq_len * self.model.num_layers)
        return Speed(
            seconds=seconds,
            tokens_per_second=_over(tokens, seconds),
            tokens_per_second_per_device=_over(tokens, each),
            tflops=_over(done / 1e12, each),
            tflops_full=_over(full / 1e12, each),
            mfu=None if self.peak is None or math.isnan(done) else _over(done, each * self.peak),
        )


def step_flops(model: ModelConfig | TransformersConfig, tokens: int, pairs: int) -> float:
    """Return the FLOPs of forward and backward on all devices together. `pairs`: visible pairs, summed over layers.

    NaN for a model of transformers whose configuration does not give one number of heads and one head dim.
    """
    if isinstance(model, TransformersConfig):
        if model.heads is None or model.head_dim is None:
            return math.nan
        return 6 * model.multiplying_parameters * tokens + 12 * model.heads[0] * model.head_dim * pairs
    return 6 * multiplying_parameters(model) * tokens + 12 * model.num_heads * model.head_dim * pairs


def multiplying_parameters(model: ModelConfig) -> int:
    """Number of parameters that multiply each token: projections, MLP and output head.

    Excludes norms and the embedding lookup. Experts count the router, `top_k` routed experts and the shared expert.
    """
    attention = model.hidden_size * model.head_dim * 2 * (model.num_heads + model.num_kv_heads)
    experts = model.experts
    if experts is None:
        assert model.intermediate_size is not None, "the configuration has one of intermediate_size and experts"
        feed_forward = 3 * model.hidden_size * model.intermediate_size
    else:
        active = experts.top_k * experts.intermediate_size + experts.shared_intermediate_size
        feed_forward = model.hidden_size * (experts.num_experts + 3 * active)
    return model.num_layers * (attention + feed_forward) + model.vocab_size * model.hidden_size


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Dense peak FLOP/s of a device in "bf16", "fp16" or "fp32", by its driver's name.

    None for a device outside `PEAKS`, another dtype, or a MIG slice.
    """
    words = set(re.split(r"[^A-Z0-9]+", device_name.upper()))
    known = [key for key in PEAKS if words.issuperset(key)]
    if not known or "MIG" in words or DTYPES[dtype].itemsize > 4:
        return None
    return PEAKS[max(known, key=len)][dtype == "fp32"] * 1e12


def _over(amount: float, seconds: float) -> float:
    return amount / seconds if seconds else math.nan
