"""What one side of a verification shows: losses, gradient norms, a digest of what the model was given, and a file with the
first step's gradients."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file


@dataclass(frozen=True)
class Evidence:
    """`losses`, `grad_norms` (before clipping) and `inputs` (see `digest_inputs`) of each step; `gradients` is a safetensors
    file, by parameter name."""

    losses: list[float]
    grad_norms: list[float]
    inputs: list[str]
    gradients: Path

    def read_gradients(self) -> dict[str, torch.Tensor]:
        """The first step's gradient of every parameter, whole."""
        return load_file(self.gradients)

    @staticmethod
    def write_gradients(path: Path, gradients: Mapping[str, torch.Tensor]) -> None:
        """Write whole gradients, by parameter name."""
        save_file({name: gradient.detach().contiguous() for name, gradient in gradients.items()}, path)


def input_rows(ids: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor) -> npt.NDArray[np.int64]:
    """(id, position, label) of each token that a model was given, int64 `(n, 3)`; dead slots, at position -1, left out."""
    rows = torch.stack([x.reshape(-1) for x in (ids, positions, labels)], dim=1).cpu().numpy()
    return rows[rows[:, 1] >= 0]


def digest_inputs(parts: Iterable[npt.NDArray[np.int64]]) -> str:
    """Of all tokens of a global batch, in whatever order and on whatever rank.

    Rotary embedding knows only differences of positions, so no gradient shows that a document did not begin at 0.
    """
    rows = np.concatenate(list(parts))
    return hashlib.sha256(rows[np.lexsort(rows.T)].astype("<i8").tobytes()).hexdigest()
