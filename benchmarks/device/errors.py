"""Compare an error with its limit: twice the error of plain PyTorch in the same dtype, plus float noise."""

from collections.abc import Sequence

import torch

Tensor = torch.Tensor
NOISE = 4 * torch.finfo(torch.float32).eps
"""Allowed in addition to the limit, relative to the tensor: the plain result's rounding errors may cancel by chance."""


def of_limit(got: Sequence[Tensor], plain: Sequence[Tensor], right: Sequence[Tensor], floor: float = 1e-2) -> float:
    """Return the largest error / limit of `got`, given `right` in fp64 and `plain` PyTorch's result in the same dtype.

    The maximum and the root mean square of each tensor's error are compared, relative to those of `right`. The limit of the
    maximum is at least half a unit in the last place, which one element's rounding may cost. `floor`: lower bound of the
    sizes that errors are divided by, for inputs of size 1: a gradient that should be 0, as with a single key, holds only
    rounding errors.
    """
    worst = 0.0
    for ours, theirs, want in zip(got, plain, right, strict=True):
        assert ours.shape == want.shape == theirs.shape, f"shapes {ours.shape}, {theirs.shape}, {want.shape} differ"
        half = torch.finfo(theirs.dtype).eps / 2
        (greatest, rms), (their_greatest, their_rms) = _errors(ours, want, floor), _errors(theirs, want, floor)
        shares = greatest / (2 * max(their_greatest, half) + NOISE), rms / (2 * their_rms + NOISE)
        # NaN becomes infinite, since max() may drop a NaN.
        worst = max(worst, *(share if share == share else float("inf") for share in shares))
    return worst


def _errors(x: Tensor, want: Tensor, floor: float) -> tuple[float, float]:
    want = want.to(x.device)
    off = x.double() - want
    greatest = off.abs().max() / want.abs().max().clamp_min(floor)
    rms = off.square().mean().sqrt() / want.square().mean().sqrt().clamp_min(floor)
    return greatest.item(), rms.item()
