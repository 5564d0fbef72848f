"""stack: every rank's tensor on every rank, in rank order."""

import pytest
import torch

from longspan.comm.gather import stack
from tests.ranks import run_ranks

SHAPES = [(), (3,), (2, 3), (2, 0)]


def make(rank, shape, dtype):
    return (torch.arange(torch.Size(shape).numel()).view(shape) + 10 * rank).to(dtype)


def _stack(group, rank):
    for shape in SHAPES:
        for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8):
            everyone = stack(make(rank, shape, dtype), group)
            assert everyone.dtype == dtype
            assert torch.equal(everyone, torch.stack([make(r, shape, dtype) for r in range(group.size())]))
    turned = stack(make(rank, (2, 3), torch.float32).mT.requires_grad_(), group)
    assert not turned.requires_grad
    assert torch.equal(turned, torch.stack([make(r, (2, 3), torch.float32).mT for r in range(group.size())]))
    return True


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_rank_gets_all_tensors_in_rank_order(ranks):
    assert run_ranks(ranks, _stack) == [True] * ranks


@pytest.mark.parametrize("shape", SHAPES)
def test_without_a_group(shape):
    x = make(1, shape, torch.float32).requires_grad_()
    assert stack(x, None).tolist() == [x.tolist()]
    assert not stack(x, None).requires_grad


def _subgroup(group, rank):
    own = torch.distributed.new_subgroups(2)[0]
    return stack(torch.tensor([rank]), own).flatten().tolist()


def test_a_group_other_than_the_world():
    assert run_ranks(4, _subgroup) == [[0, 1], [0, 1], [2, 3], [2, 3]]
