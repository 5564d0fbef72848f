"""All-to-all of rows with a count for each pair of ranks. Differentiable."""

from typing import Any

import torch

from longspan.comm.groups import RankGroup, rank_and_size
from longspan.comm.transport import transport_of
from longspan.errors import CommError, SpecError


def exchange_rows(x: torch.Tensor, sent: list[int], received: list[int], group: RankGroup | None) -> torch.Tensor:
    """Send rows to the ranks of `group`, and return the rows received, in rank order. Collective, differentiable.

    x `(sum(sent), E)` -> `(sum(received), E)`. The first `sent[0]` rows go to rank 0 of the group, the next `sent[1]`
    to rank 1, and so on. `received[r]` rows come from rank r, and must equal the `sent` of rank r for this rank. Any count
    may be 0. Backward swaps `sent` and `received`. `group` None is a group of this rank alone and returns `x`.

    Raises `SpecError` for counts that do not fit, and `CommError` if a peer is gone.
    """
    ranks = rank_and_size(group)[1]
    if x.ndim != 2 or len(sent) != ranks or len(received) != ranks or sum(sent) != x.shape[0]:
        raise SpecError(
            f"a tensor {tuple(x.shape)} cannot be sent as {sent} rows and received as {received} among {ranks} ranks",
            hint="give a tensor of two dims, and counts to and from each rank of the group",
        )
    if ranks == 1:
        return x
    rows: torch.Tensor = _Exchange.apply(x, sent, received, group)  # type: ignore[no-untyped-call]
    return rows


def exchange_counts(counts: torch.Tensor, group: RankGroup | None) -> torch.Tensor:
    """Exchange counts `(ranks, n)`: row r is sent to rank r, and row r of the result comes from rank r. Collective; any
    dtype; not differentiable. `group` None is a group of this rank alone and returns `counts`."""
    ranks = rank_and_size(group)[1]
    if counts.ndim != 2 or counts.shape[0] != ranks:
        raise SpecError(f"counts {tuple(counts.shape)} do not have a row for each of {ranks} ranks")
    return counts if ranks == 1 else _all_to_all(counts.detach(), [1] * ranks, [1] * ranks, group)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sent: list[int], received: list[int], group: RankGroup) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return exchange_rows(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def _all_to_all(x: torch.Tensor, sent: list[int], received: list[int], group: RankGroup | None) -> torch.Tensor:
    assert group is not None, "a group of several ranks"
    transport = transport_of(group)
    outgoing = x.contiguous().to(transport.carries(x.device))
    incoming = outgoing.new_empty(sum(received), *x.shape[1:])
    row = x.shape[1:].numel()
    sizes = ([rows * row for rows in counts] for counts in (received, sent))
    try:
        transport.all_to_all(incoming.view(-1), outgoing.view(-1), *sizes).wait()
    except RuntimeError as error:
        ranks = [transport.global_rank(rank) for rank in range(transport.size)]
        raise CommError(
            f"an exchange of rows among ranks {ranks} failed: {str(error).splitlines()[0]}",
            hint="look at the logs of those ranks: one of them most likely ended first",
        ) from error
    return incoming.to(x.device)
