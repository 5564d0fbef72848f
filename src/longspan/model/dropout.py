"""Counter-based dropout keyed by a token's global number: the mask is the same in recomputation and on any rank.
No mask is stored between forward and backward: the mask is generated again.
"""

from typing import Any

import torch
from torch import Tensor, nn

from longspan.errors import SpecError
from longspan.model.chunks import chunk_elements
from longspan.model.philox import check_keep, keep


class TokenDropout(nn.Module):
    """Set elements to 0 with probability `p` and multiply the other elements by `1 / (1 - p)`, in training mode.

    The mask depends only on `seed`, `site`, the token's global number and the feature's index (see `philox.keep`).
    Every dropout module of a model needs a different `site`. Raises SpecError: p outside [0, 1).
    """

    def __init__(self, p: float, seed: int, site: int) -> None:
        super().__init__()
        check_keep(p, seed, site)
        self.p, self.seed, self.site = p, seed, site

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Drop elements of x (B, T, E). tokens int64 (B, T): global number of each slot's token, -1 for padding slots."""
        if tokens.dtype != torch.int64 or tokens.shape != x.shape[:-1]:
            raise SpecError(
                f"tokens {tuple(tokens.shape)} {tokens.dtype} do not match x {tuple(x.shape)}",
                hint="give the global token numbers as torch.int64, sharded like the ids",
            )
        if not self.training or self.p == 0:
            return x
        out: Tensor = _Drop.apply(x, tokens, self.p, self.seed, self.site)  # type: ignore[no-untyped-call]
        return out

    def extra_repr(self) -> str:
        return f"p={self.p}, seed={self.seed}, site={self.site}"


class _Drop(torch.autograd.Function):
    """Apply the same mask in forward and backward: dropout is linear in x and equals its transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, p: float, seed: int, site: int) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.options = p, seed, site
        return _drop(x, tokens, p, seed, site)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _drop(grad, *ctx.saved_tensors, *ctx.options), None, None, None, None


def _drop(x: Tensor, tokens: Tensor, p: float, seed: int, site: int) -> Tensor:
    def drop(x: Tensor, tokens: Tensor) -> Tensor:
        kept = keep(tokens.clamp_min(0), x.shape[-1], p, seed=seed, site=site)
        return torch.where(kept, x * (1 / (1 - p)), 0)

    # Compiled code is fused and needs no chunks.
    if torch.compiler.is_compiling() or x.numel() <= (size := chunk_elements(x.device.type)):
        return drop(x, tokens)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows = max(1, size // x.shape[-1])
    flat = (out.flatten(0, -2), x.flatten(0, -2), tokens.flatten())
    for part, *given in zip(*(each.split(num_rows) for each in flat), strict=True):
        part.copy_(drop(*given))
    return out
