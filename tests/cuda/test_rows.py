"""What ranks send each other of the device's tensors never comes to the host; and what goes to the device does not wait."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from longspan import Layout
from longspan.comm.gather import stack
from longspan.comm.row_exchange import exchange_counts, exchange_rows
from longspan.comm.sharding import gather
from longspan.comm.upload import upload
from longspan.model.loss import VocabShard, token_loss_sum
from tests.cuda import CudaTensor, Ledger, stand_in
from tests.ranks import run_ranks


def _stack(group: Any, rank: int) -> torch.Tensor:
    return stack(torch.arange(3, device="cuda") + 10 * rank, group)


def _rows(group: Any, rank: int) -> torch.Tensor:
    return exchange_rows(
        torch.arange(6.0, device="cuda").view(3, 2) + 10 * rank, [1, 2], [1, 1] if rank == 0 else [2, 2], group
    )


def _counts(group: Any, rank: int) -> torch.Tensor:
    return exchange_counts(torch.tensor([[1, 2], [3, 4]]).pin_memory().to("cuda", non_blocking=True) + 10 * rank, group)


def _gather(group: Any, rank: int) -> torch.Tensor:
    layout = Layout.zigzag(8, 2)
    x = torch.from_numpy(layout.positions(rank)).pin_memory().to("cuda", non_blocking=True)
    return gather(x, layout, rank, 0, group)


def _vocabulary(group: Any, rank: int) -> torch.Tensor:
    """Logits are 0 for all 8 ids of the two halves: each of 3 tokens has a loss of log 8."""
    hidden, weight = torch.ones(3, 2, device="cuda"), torch.zeros(4, 2, device="cuda")
    return token_loss_sum(hidden, torch.arange(3, device="cuda"), weight, vocab=VocabShard(4 * rank, 8, group))


SENT = {
    # A call on each of two ranks, and what both get.
    "stack": (_stack, [[[0, 1, 2], [10, 11, 12]]] * 2),
    "rows": (_rows, [[[0, 1], [10, 11]], [[2, 3], [4, 5], [12, 13], [14, 15]]]),
    "counts": (_counts, [[[1, 2], [11, 12]], [[3, 4], [13, 14]]]),
    "gather": (_gather, [list(range(8))] * 2),
    "vocabulary": (_vocabulary, [3 * np.log(8)] * 2),
}


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
@pytest.mark.parametrize("name", SENT)
def test_rows_of_the_device_travel_without_the_host(name: str, backend: str) -> None:
    for (got, ledger), want in zip(run_ranks(2, _send, name, backend), SENT[name][1], strict=True):
        assert np.allclose(got, want, rtol=1e-6)
        assert [copy for copy in ledger.copies if copy.direction == "to host"] == []
        assert len(ledger.collectives) == 1
        assert ledger.syncs == [], ledger.syncs_by_site()


def _send(group: Any, rank: int, name: str, backend: str) -> tuple[Any, Ledger]:
    with stand_in():
        nccl = dist.new_group(backend=backend)
        with stand_in() as ledger:
            got = SENT[name][0](nccl, rank)
        assert isinstance(got, CudaTensor)
        return got.tolist(), ledger


def test_an_upload_does_not_wait() -> None:
    with stand_in() as ledger:
        x = upload(torch.arange(3), "cuda")
        assert ledger.syncs == []
        assert [(copy.direction, copy.nbytes, copy.pinned) for copy in ledger.copies] == [("to device", 24, True)]
        assert upload(x, torch.device("cuda")) is x
        assert x.tolist() == [0, 1, 2]
    host = torch.arange(3)
    assert upload(host, "cpu") is host
