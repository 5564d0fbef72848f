"""Communication dtypes of keys and values: unchanged, bf16, or fp8 with a shared exponent per 32 elements (MXFP8).

fp8     element = e4m3 value * 2 ** (exponent byte - 127);   a head's row of D elements is D + ceil(D / 32) bytes
"""

from typing import Protocol

import torch

from longspan.plan.comm_dtype import FP8_BLOCK

Tensor = torch.Tensor

_E4M3_FRACTION, _E4M3_EXPONENT = 1.75, 8
"""The largest e4m3 number is 1.75 * 2 ** 8."""
_BIAS = 127


class Wire(Protocol):
    """Encodes rows to a communication dtype. The last dim may change size and dtype."""

    def encode(self, x: Tensor) -> Tensor: ...

    def decode(self, x: Tensor, like: Tensor) -> Tensor:
        """Return rows with the dtype and the last dim of `like`."""
        ...

    def width(self, like: Tensor) -> tuple[int, torch.dtype]:
        """Return (size, dtype) of the encoded last dim, for rows like `like`."""
        ...


class AsTheyAre:
    """Rows travel in their own dtype."""

    def encode(self, x: Tensor) -> Tensor:
        return x

    def decode(self, x: Tensor, like: Tensor) -> Tensor:
        return x

    def width(self, like: Tensor) -> tuple[int, torch.dtype]:
        return like.shape[3], like.dtype


class Bf16:
    """Rows travel in bf16."""

    def encode(self, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16)

    def decode(self, x: Tensor, like: Tensor) -> Tensor:
        return x.to(like.dtype)

    def width(self, like: Tensor) -> tuple[int, torch.dtype]:
        return like.shape[3], torch.bfloat16


class Fp8:
    """Rows travel as e4m3 bytes, followed by their exponents."""

    def encode(self, x: Tensor) -> Tensor:
        D = x.shape[3]
        blocks = _blocks(x.float())
        fraction, exponent = torch.frexp(blocks.abs().amax(-1, keepdim=True))
        # Scale a block's largest element into [1, 1.75] * 2 ** 8; an element in (1.75, 2) * 2 ** 8 is halved once more.
        # Close to the largest float, saturate at 1.75 * 2 ** 8 instead: the halved value, rounded up, would decode to inf.
        exponent = exponent - 1 - _E4M3_EXPONENT + (fraction > _E4M3_FRACTION / 2)
        exponent = exponent.clamp(-_BIAS, _BIAS - _E4M3_EXPONENT)
        most = _E4M3_FRACTION * 2**_E4M3_EXPONENT
        scaled = torch.ldexp(blocks, -exponent).clamp(-most, most)
        scaled = torch.where(blocks.isfinite(), scaled, torch.nan).to(torch.float8_e4m3fn)
        values = scaled.flatten(-2)[..., :D].view(torch.uint8)
        return torch.cat((values, (exponent.squeeze(-1) + _BIAS).to(torch.uint8)), dim=-1)

    def decode(self, x: Tensor, like: Tensor) -> Tensor:
        D = like.shape[3]
        values = _blocks(x[..., :D].contiguous().view(torch.float8_e4m3fn).float())
        exponent = x[..., D:].to(torch.int32).unsqueeze(-1) - _BIAS
        return torch.ldexp(values, exponent).flatten(-2)[..., :D].to(like.dtype)

    def width(self, like: Tensor) -> tuple[int, torch.dtype]:
        return like.shape[3] - (-like.shape[3] // FP8_BLOCK), torch.uint8


def _blocks(x: Tensor) -> Tensor:
    """`(..., D)` -> `(..., ceil(D / 32), 32)`, zero-padded."""
    missing = -x.shape[-1] % FP8_BLOCK
    return torch.nn.functional.pad(x, (0, missing)).unflatten(-1, (-1, FP8_BLOCK))


WIRES: dict[str | None, Wire] = {None: AsTheyAre(), "bf16": Bf16(), "fp8": Fp8()}
