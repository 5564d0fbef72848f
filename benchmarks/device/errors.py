"""How far off a result may be: twice the error of plain PyTorch in the same type, plus float noise (DESIGN, section 6)."""

from collections.abc import Sequence

import torch

Tensor = torch.Tensor
NOISE = 4 * torch.finfo(torch.float32).eps
"""Relative to the tensor: the roundings of the plain computation may happen to cancel."""


def of_limit(got: Sequence[Tensor], plain: Sequence[Tensor], right: Sequence[Tensor], floor: float = 1e-2) -> float:
    """The worst error of `got` over what it may be, given the right tensors in fp64 and plain PyTorch's in the same type.

    Of each tensor the greatest error and the root mean square, each over the tensor's own. The greatest is one element's:
    rounding it to the type may cost half a unit in the last place, and by luck costs less. `floor`: the least size that errors
    are taken relative to, for inputs of size 1: a gradient that is 0 by right, as a lone key's, has only rounding in it.
    """
    worst = 0.0
    for ours, theirs, want in zip(got, plain, right, strict=True):
        assert ours.shape == want.shape == theirs.shape, f"shapes {ours.shape}, {theirs.shape}, {want.shape} differ"
        half = torch.finfo(theirs.dtype).eps / 2
        (greatest, rms), (their_greatest, their_rms) = _errors(ours, want, floor), _errors(theirs, want, floor)
        shares = greatest / (2 * max(their_greatest, half) + NOISE), rms / (2 * their_rms + NOISE)
        # NaN of either side: infinite, and never lost in a maximum.
        worst = max(worst, *(share if share == share else float("inf") for share in shares))
    return worst


def _errors(x: Tensor, want: Tensor, floor: float) -> tuple[float, float]:
    want = want.to(x.device)
    off = x.double() - want
    greatest = off.abs().max() / want.abs().max().clamp_min(floor)
    rms = off.square().mean().sqrt() / want.square().mean().sqrt().clamp_min(floor)
    return greatest.item(), rms.item()
