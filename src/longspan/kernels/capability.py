"""What a CUDA device is, as far as attention kernels differ by it; tests put another device in here."""

import torch

AMPERE, HOPPER, BLACKWELL = 8, 9, 10


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability, `(9, 0)` of an H100. AMD's devices have version numbers of their own: they count as Ampere, which has
    no kernel that is Hopper's alone."""
    return torch.cuda.get_device_capability(device) if torch.version.hip is None else (AMPERE, 0)
