"""What one side of a verification shows: losses, gradient norms, and a file with the first step's gradients."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


@dataclass(frozen=True)
class Evidence:
    """`losses` and `grad_norms` (before clipping) of each step; `gradients` is a safetensors file, by parameter name."""

    losses: list[float]
    grad_norms: list[float]
    gradients: Path

    def read_gradients(self) -> dict[str, torch.Tensor]:
        """The first step's gradient of every parameter, whole."""
        return load_file(self.gradients)

    @staticmethod
    def write_gradients(path: Path, gradients: Mapping[str, torch.Tensor]) -> None:
        """Write whole gradients, by parameter name."""
        save_file({name: gradient.detach().contiguous() for name, gradient in gradients.items()}, path)
