"""The reference kernel against plain math, on tiles of every kind."""

import pytest
import torch

from longspan.kernels.reference import ReferenceKernel

from .tiles import PRECISION, TILES, check_kernel, every_tile

KERNEL = ReferenceKernel()


@every_tile()
def test_every_tile(kind, heads, dtype):
    check_kernel(KERNEL, TILES[kind], heads, dtype, PRECISION[dtype])


@pytest.mark.parametrize("kind", TILES)
def test_keys_and_values_of_other_dims(kind):
    check_kernel(KERNEL, TILES[kind], (4, 2), torch.float64, PRECISION[torch.float64], dim=6, dim_v=4)


@pytest.mark.parametrize("kind", TILES)
def test_takes_every_tile_whole(kind):
    assert KERNEL.split(TILES[kind], torch.device("cpu"), torch.float32) == (TILES[kind],)


def test_refuses_what_is_not_floating():
    ints = torch.zeros(1, 1, 1, 8, dtype=torch.int64)
    assert KERNEL.refusal(ints, ints, ints) == "torch.int64 is not a floating-point dtype"
    assert KERNEL.refusal(ints.half(), ints.half(), ints.half()) is None
