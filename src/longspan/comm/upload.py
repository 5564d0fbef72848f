"""Tensors of the host on their way to a device, without a wait."""

import torch


def upload(x: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """`x` on `device`. To CUDA by way of pinned memory: a copy from any other waits for all that the stream has yet to do."""
    if x.device.type == "cpu" and torch.device(device).type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)
