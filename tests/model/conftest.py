"""The inputs that the tests of this folder share."""

import pytest
import torch
from torch import Tensor

torch.set_num_threads(1)


@pytest.fixture
def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Ids, positions and labels of two rows of 13 tokens; some labels are ignored."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(61, (2, 13), generator=generator)
    labels = ids.roll(-1, dims=1)
    labels[:, -1] = -100
    labels[0, 3:7] = -100
    return ids, torch.arange(13).expand(2, 13), labels
