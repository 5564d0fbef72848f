"""The device type of a run, and the check that this machine has enough devices."""

import torch

from longspan.errors import SpecError


def device_type(device: str) -> str:
    """Return the device type, "cpu" or "cuda". "auto" is CUDA if available."""
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_devices(device: str, ranks: int, cpu: str = 'parallel.device="cpu"') -> None:
    """Raise `SpecError` if this machine has fewer devices than `ranks`. `cpu`: the setting that the hint names."""
    if device_type(device) == "cpu":
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise SpecError('device "cuda" is set, but this machine has no CUDA device', hint=f"set {cpu}")
    if ranks > count:
        raise SpecError(
            f"{ranks} ranks on this machine, which has {count} CUDA device{'s' * (count != 1)}: each rank needs its own",
            hint=f"set {cpu}, or start at most {count} rank{'s' * (count != 1)} here",
        )
