"""FLOPs of attention and of a step, visible pairs only; the one place where a speed is made of them."""

from benchmarks.device.rows import Figures
from longspan.model import ModelConfig

FORWARD, BACKWARD = 4, 10
"""A visible pair, head and dim: two products of matrices; in backward five, one of which computes the scores again."""


def attention_flops(pairs: int, num_heads: int, head_dim: int) -> int:
    """Forward and backward, as kernels are measured: what backward computes again counts."""
    return (FORWARD + BACKWARD) * pairs * num_heads * head_dim


def step_flops(model: ModelConfig, tokens: int, pairs: int) -> int:
    """6 x parameters a token, and attention's products, of which none counts twice: 12 a pair, head and dim of each layer."""
    return 6 * model.num_parameters * tokens + 12 * pairs * model.num_layers * model.num_heads * model.head_dim


def speed(flops: int, milliseconds: float) -> Figures:
    """What a row says of a speed."""
    return {"tflops": flops / milliseconds / 1e9}
