"""Compute capability of a CUDA device, as kernels distinguish devices. Tests replace the function to simulate devices."""

import torch

AMPERE, HOPPER, BLACKWELL = 8, 9, 10


def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability, such as `(9, 0)` for an H100. AMD devices number theirs differently and count as
    Ampere, so that no kernel for Hopper alone is chosen."""
    return torch.cuda.get_device_capability(device) if torch.version.hip is None else (AMPERE, 0)
