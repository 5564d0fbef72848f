"""How fast a run is: tokens and FLOP/s of a device, and MFU, by one definition for all that shows them. No torch.

    FLOPs = 6 x parameters that multiply x tokens  +  12 x query heads x head_dim x visible pairs, layer by layer

A product of n rows with an (a, b) matrix is 2 n a b, and backward makes two such products. Attention makes two products of
head_dim for each pair and head, 4 D, and backward counts twice that. Recomputation, of layers or in a flash kernel, is no
progress and counts nothing (Chowdhery et al., 2022, arXiv:2204.02311, appendix B; there over the full square of a row).
"""

import math
import re
from dataclasses import dataclass

from longspan.model.model_config import ModelConfig
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
"""Words of a device's name -> dense TFLOP/s in bf16 and fp16, and in fp32 (without TF32, as by torch's default), of one device.

From the makers' data sheets ("NVIDIA A100 Tensor Core GPU", "H100", "H200", "L40", "L40S", "Blackwell Architecture Technical
Brief" for B200 and GB200, "AMD Instinct MI300X", "MI325X"). Those of NVIDIA from H100 on show figures with sparsity: halved here.
A name without a form ("NVIDIA H100 80GB HBM3") is the SXM module.
"""


@dataclass(frozen=True)
class Speed:
    """Of a step, or of the steps of a run. FLOP/s are of one device; `mfu` is None where its peak is not in `PEAKS`."""

    seconds: float
    tokens_per_second: float
    tokens_per_second_per_device: float
    tflops: float
    """Visible pairs alone."""
    tflops_full: float
    """As if every token saw a whole row: what some publish, and no work that was done."""
    mfu: float | None
    """`tflops` over the device's peak."""


@dataclass(frozen=True)
class Meter:
    """What turns tokens, pairs and seconds of a run into its `Speed`."""

    model: ModelConfig
    seq_len: int
    devices: int
    peak: float | None
    """FLOP/s of a device: see `peak_flops`."""

    def speed(self, tokens: int, pairs: int, seconds: float) -> Speed:
        """Of all devices together in `seconds`: `tokens` of the rows, and their visible pairs, summed over layers."""
        each = seconds * self.devices
        done = step_flops(self.model, tokens, pairs)
        full = step_flops(self.model, tokens, tokens * self.seq_len * self.model.num_layers)
        return Speed(
            seconds=seconds,
            tokens_per_second=_over(tokens, seconds),
            tokens_per_second_per_device=_over(tokens, each),
            tflops=_over(done / 1e12, each),
            tflops_full=_over(full / 1e12, each),
            mfu=None if self.peak is None else _over(done, each * self.peak),
        )


def step_flops(model: ModelConfig, tokens: int, pairs: int) -> int:
    """Forward and backward, on all devices together. `pairs`: visible (query, key) pairs, summed over layers."""
    return 6 * multiplying_parameters(model) * tokens + 12 * model.num_heads * model.head_dim * pairs


def multiplying_parameters(model: ModelConfig) -> int:
    """Elements of the matrices that a token is multiplied by: projections, feed-forward, the head.

    Not the embedding, which is looked up (tied, its matrix counts once, as the head), and not norms. Of experts the router, the
    `top_k` that a token goes to, and the shared one.
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
    """Dense peak FLOP/s of a device in "bf16", "fp16" or "fp32", by the name its driver gives; None for what is not in `PEAKS`,
    such as a CPU, fp64, or a slice of a device (MIG)."""
    words = set(re.split(r"[^A-Z0-9]+", device_name.upper()))
    known = [key for key in PEAKS if words.issuperset(key)]
    if not known or "MIG" in words or DTYPES[dtype].itemsize > 4:
        return None
    return PEAKS[max(known, key=len)][dtype == "fp32"] * 1e12


def _over(amount: float, seconds: float) -> float:
    return amount / seconds if seconds else math.nan
