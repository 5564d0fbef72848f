"""Rows between real ranks: who gets which, what their gradients do, ranks with nothing to send, and refusals."""

import os
import signal

import pytest
import torch
import torch.distributed as dist

from longspan.comm.row_exchange import exchange_counts, exchange_rows
from tests.oracle import raised
from tests.ranks import own_ranks, run_ranks

# COUNTS[ranks][r][q]: rows that rank r sends to rank q. Of four ranks, rank 1 sends nothing and rank 3 gets nothing.
COUNTS = {
    2: [[2, 3], [1, 0]],
    3: [[0, 4, 1], [2, 2, 0], [0, 0, 0]],
    4: [[1, 2, 3, 0], [0, 0, 0, 0], [5, 0, 1, 0], [2, 2, 0, 0]],
}


def _rows(r, q, count, dtype):
    """The rows from r to q: each says where it comes from, where it goes, and its number."""
    return torch.tensor([[r, q, n, 0.5] for n in range(count)], dtype=dtype).view(count, 4)


def _exchange(group, rank, counts, dtype):
    ranks = len(counts)
    sent, received = counts[rank], [row[rank] for row in counts]
    x = torch.cat([_rows(rank, q, count, dtype) for q, count in enumerate(sent)]).requires_grad_()
    y = exchange_rows(x, sent, received, group)
    assert torch.equal(y, torch.cat([_rows(r, rank, count, dtype) for r, count in enumerate(received)]))
    # The gradient of a row is what its receiver gives it: a view that is not contiguous, 3 times the row and 10 for itself.
    y.backward((3 * y.detach() + 10 * rank).T.contiguous().T)
    to = torch.repeat_interleave(torch.arange(ranks), torch.tensor(sent))[:, None].to(dtype)
    assert torch.equal(x.grad, 3 * x.detach() + 10 * to)
    return x.grad.dtype, y.dtype


@pytest.mark.parametrize("ranks", sorted(COUNTS))
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rows_arrive_in_rank_order_and_their_gradients_go_back(ranks, dtype):
    assert run_ranks(ranks, _exchange, COUNTS[ranks], dtype) == [(dtype, dtype)] * ranks


def _nothing(group, rank):
    x = torch.empty(0, 3, dtype=torch.float64, requires_grad=True)
    y = exchange_rows(x, [0, 0], [0, 0], group)
    y.sum().backward()
    return tuple(y.shape), tuple(x.grad.shape)


def test_no_row_at_all():
    assert run_ranks(2, _nothing) == [((0, 3), (0, 3))] * 2


def _twice(group, rank):
    """Gradients of gradients: exchanged as cubes, so that the second derivative is 6 x."""
    x = torch.arange(1.0, 5.0, dtype=torch.float64).view(2, 2).requires_grad_()
    y = exchange_rows(x, [1, 1], [1, 1], group)
    (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    return torch.equal(first, 3 * x**2), torch.equal(second, 6 * x)


def test_gradients_have_gradients():
    assert run_ranks(2, _twice) == [(True, True)] * 2


def _counts(group, rank):
    ranks = dist.get_world_size(group)
    counts = torch.tensor([[100 * rank + 10 * q + n for n in range(2)] for q in range(ranks)])
    return exchange_counts(counts, group).tolist()


def test_counts_are_transposed():
    for rank, got in enumerate(run_ranks(3, _counts)):
        assert got == [[100 * r + 10 * rank, 100 * r + 10 * rank + 1] for r in range(3)]


def test_one_rank_is_the_identity():
    x = torch.randn(3, 2, requires_grad=True)
    assert exchange_rows(x, [3], [3], None) is x
    counts = torch.tensor([[1, 2]])
    assert exchange_counts(counts, None) is counts


@pytest.mark.parametrize(
    ("x", "sent", "received"),
    [
        (torch.zeros(3, 2), [2], [3]),
        (torch.zeros(3, 2), [1, 2], [3]),
        (torch.zeros(3, 2), [3], [1, 2]),
        (torch.zeros(3), [3], [3]),
    ],
)
def test_counts_that_do_not_fit_are_refused(x, sent, received):
    assert raised(exchange_rows, x, sent, received, None) == (
        "SpecError",
        f"a tensor {tuple(x.shape)} cannot be sent as {sent} rows and received as {received} among 1 ranks\n\n"
        "hint: give a tensor of two dims, and counts to and from each rank of the group",
    )
    assert raised(exchange_counts, torch.zeros(2, 3), None) == (
        "SpecError",
        "counts (2, 3) do not have a row for each of 1 ranks",
    )


def _exchange_until(group, rank):
    x = torch.ones(2, 1)
    exchange_rows(x, [1, 1], [1, 1], group)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return raised(exchange_rows, x, [1, 1], [1, 1], group)


def test_a_rank_that_died_is_an_error_on_the_others():
    alive, dead = own_ranks(2, _exchange_until, timeout=50.0)
    assert dead.exit_code == -signal.SIGKILL
    kind, text = alive.value
    assert kind == "CommError"
    assert text.startswith("an exchange of rows among ranks [0, 1] failed: ")
    assert text.endswith("\n\nhint: look at the logs of those ranks: one of them most likely ended first")
