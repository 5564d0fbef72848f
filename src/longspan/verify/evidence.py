"""The results of one side of a verification: losses, gradient norms, a digest of the model's inputs, and the first step's
gradients."""

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
    """`losses`, `grad_norms` (before clipping) and `inputs` (see `digest_inputs`) per step, and `gradients`, a safetensors
    file by parameter name."""

    losses: list[float]
    grad_norms: list[float]
    inputs: list[str]
    gradients: Path

    def read_gradients(self) -> dict[str, torch.Tensor]:
        """Read the first step's unsharded gradients by parameter name."""
        return load_file(self.gradients)

    @staticmethod
    def write_gradients(path: Path, gradients: Mapping[str, torch.Tensor]) -> None:
        """Write unsharded gradients by parameter name."""
        save_file({name: gradient.detach().contiguous() for name, gradient in gradients.items()}, path)


def input_rows(ids: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor) -> npt.NDArray[np.int64]:
    """Return (id, position, label) of each input token, int64 `(n, 3)`, without padding slots (position -1)."""
    rows = torch.stack([x.reshape(-1) for x in (ids, positions, labels)], dim=1).cpu().numpy()
    return rows[rows[:, 1] >= 0]


def digest_inputs(parts: Iterable[npt.NDArray[np.int64]]) -> str:
    """Return a digest of all tokens of a global batch, independent of their order and rank.

    The digest detects a document whose positions do not begin at 0. Gradients would not: rotary embedding depends only on
    differences of positions.
    """
    rows = np.concatenate(list(parts))
    return hashlib.sha256(rows[np.lexsort(rows.T)].astype("<i8").tobytes()).hexdigest()
