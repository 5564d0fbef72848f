"""Where a run computes, and whether this machine has devices enough for it."""

import torch

from longspan.errors import SpecError


def device_type(device: str) -> str:
    """Where a run computes, "cpu" or "cuda": `device`, or for "auto" CUDA if it is available."""
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_devices(device: str, ranks: int, cpu: str = 'parallel.device="cpu"') -> None:
    """Refuse `ranks` ranks on this machine if it has fewer devices for them. `cpu`: the setting by which they need none.

    Raises `SpecError`.
    """
    if device_type(device) == "cpu":
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise SpecError('device "cuda" is asked for and this machine has no CUDA device', hint=f"set {cpu}")
    if ranks > count:
        raise SpecError(
            f"{ranks} ranks on this machine, which has {count} CUDA device{'s' * (count > 1)}: each rank needs its own",
            hint=f"set {cpu}, or start at most {count} rank{'s' * (count > 1)} here",
        )
