"""The transport in memory: NCCL's rules, each broken on purpose, and what every rank is told."""

import pytest
import torch

from longspan.comm.agree import check_agreement
from longspan.comm.groups import rank_and_size
from longspan.comm.hops import Hop
from longspan.comm.in_memory import MemoryWorld, run
from longspan.comm.row_exchange import exchange_counts, exchange_rows
from longspan.comm.traffic import Call
from longspan.errors import CommError
from tests.oracle import raised


def meter(rank=0):
    return Call("forward", "ring", "none", rank)


def hop(group, sends=(), receives=()):
    return Hop(list(sends), list(receives)).post(group, meter())


def _round(group, rank):
    following, previous = (rank + 1) % group.size, (rank - 1) % group.size
    theirs = [torch.zeros(2), torch.zeros(3, dtype=torch.int64)]
    mine = [torch.full((2,), float(rank)), torch.arange(3) + 10 * rank]
    flight = hop(group, [(following, x) for x in mine], [(previous, x) for x in theirs])
    untouched = theirs[0].eq(0).all()
    flight.wait(meter())
    return bool(untouched), theirs[0].tolist(), theirs[1].tolist()


@pytest.mark.parametrize("ranks", [2, 3, 16])
def test_messages_arrive_in_order_and_not_before_they_are_awaited(ranks):
    previous = [(rank - 1) % ranks for rank in range(ranks)]
    assert run(ranks, _round) == [(True, [float(p)] * 2, [10 * p + n for n in range(3)]) for p in previous]


def _overwritten(group, rank):
    x = torch.full((2,), 1.0)
    if rank:
        flight = hop(group, [(0, x)])
        x.fill_(7.0)  # too early: the message has not left
        flight.wait(meter())
        return None
    hop(group, receives=[(1, x)]).wait(meter())
    return x.tolist()


def test_a_buffer_that_is_overwritten_before_its_message_has_left_gives_wrong_numbers():
    assert run(2, _overwritten)[0] == [7.0, 7.0]


def _circle(group, rank):
    other = 1 - rank
    first = hop(group, receives=[(other, torch.empty(2))])
    second = hop(group, [(other, torch.empty(2))])
    return raised(first.wait, meter()), second


def test_batches_of_a_rank_finish_in_the_order_in_which_they_were_posted():
    text = (
        "deadlock: rank 0 waits for 1: batch 0, 2 x torch.float32 from 1; "
        "rank 1 waits for 0: batch 0, 2 x torch.float32 from 0"
    )
    for error, _ in run(2, _circle):
        assert error == ("CommError", text)


def _send_first(group, rank, elements):
    arrived = torch.empty(elements)
    hop(group, [(1 - rank, torch.full((elements,), float(rank)))]).wait(meter())
    hop(group, receives=[(1 - rank, arrived)]).wait(meter())
    return arrived.tolist()


def test_small_messages_may_leave_without_a_receiver():
    assert run(2, _send_first, 3, world=MemoryWorld(2, buffered=12)) == [[1.0] * 3, [0.0] * 3]
    with pytest.raises(
        CommError, match=r"rank 0 waits for 1: batch 0, 4 x torch\.float32 to 1; rank 1 waits for 0: batch 0"
    ):
        run(2, _send_first, 4, world=MemoryWorld(2, buffered=12))


def _unequal(group, rank, x):
    flight = hop(group, [(1, x)]) if rank == 0 else hop(group, receives=[(0, torch.empty(3))])
    flight.wait(meter())


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (torch.empty(2), "rank 0 sends 2 x torch.float32 to rank 1, which awaits 3 x torch.float32"),
        (torch.empty(3).bfloat16(), "rank 0 sends 3 x torch.bfloat16 to rank 1, which awaits 3 x torch.float32"),
        (torch.empty(3, device="meta"), "a tensor on meta was given to ranks that exchange tensors on cpu"),
        (torch.empty(3, 2)[:, 0], "a tensor of shape (3,) and strides (2,) is not contiguous"),
    ],
)
def test_ends_of_a_message_that_do_not_fit(x, text):
    with pytest.raises(CommError) as error:
        run(2, _unequal, x)
    assert str(error.value) == text


def _collectives(group, rank, kinds):
    def work(group, rank, kind):
        if kind == "nothing":
            return
        if kind == "a message":
            hop(group, [((rank + 1) % group.size, torch.ones(1))]).wait(meter())
        elif kind == "a gather":
            check_agreement(group, {"plans": b""})
        else:
            exchange_counts(torch.ones(group.size, 1, dtype=torch.int64 if kind == "int64" else torch.int32), group)

    return raised(work, group, rank, kinds[rank])


@pytest.mark.parametrize(
    ("kinds", "text"),
    [
        (("int64", "int64", "int32"), "rank 2 runs all-to-all of torch.int32 while rank 0 runs all-to-all of torch.int64"),
        (
            ("int64", "a gather", "int64"),
            "rank 1 runs all-gather of 514 x torch.uint8 while rank 0 runs all-to-all of torch.int64",
        ),
        (
            ("int64", "int64", "nothing"),
            "deadlock: rank 0 waits for 2: batch 0, all-to-all of torch.int64; "
            "rank 1 waits for 2: batch 0, all-to-all of torch.int64; rank 2 has ended",
        ),
        (
            ("int64", "int64", "a message"),
            "deadlock: rank 0 waits for 2: batch 0, all-to-all of torch.int64; rank 1 waits for 2: batch 0, "
            "all-to-all of torch.int64; rank 2 waits for 0: batch 0, 1 x torch.float32 to 0",
        ),
    ],
)  # fmt: skip
def test_every_rank_takes_part_in_a_collective(kinds, text):
    found = [error for _, error in run(3, _collectives, kinds) if error]
    assert found
    assert all(text in error for error in found)


def _sizes(group, rank):
    sent = [1, 2] if rank == 0 else [3, 1]
    received = [1, 3] if rank == 0 else [1, 1]  # rank 0 sends two rows
    exchange_rows(torch.ones(sum(sent), 2), sent, received, group)


def test_pieces_of_a_collective_that_do_not_fit():
    with pytest.raises(CommError, match=r"rank 0 gives 4 x torch\.float32 to rank 1, which awaits 2 x torch\.float32"):
        run(2, _sizes)


def _rows(group, rank):
    sent = [rank + peer for peer in range(group.size)]
    x = torch.cat([torch.full((n, 2), 10.0 * rank + peer) for peer, n in enumerate(sent)]).requires_grad_()
    rows = exchange_rows(x, sent, [peer + rank for peer in range(group.size)], group)
    rows.backward(rows.detach())
    return rows[:, 0].tolist(), torch.equal(x.grad, x)


def test_rows_and_their_gradients():
    for rank, (rows, home) in enumerate(run(3, _rows)):
        assert rows == [10.0 * peer + rank for peer in range(3) for _ in range(peer + rank)]
        assert home


def _one_raises(group, rank):
    if rank == 1:
        raise ValueError("a wrong turn")
    return raised(lambda: hop(group, receives=[(1, torch.empty(1))]).wait(meter()))


def test_a_rank_that_raises_takes_the_others_down_and_is_named():
    others = {}

    def look(group, rank):
        others[rank] = _one_raises(group, rank)

    with pytest.raises(ValueError, match="a wrong turn") as error:
        run(3, look)
    assert error.value.__notes__ == ["on rank 1 of 3"]
    assert others == dict.fromkeys((0, 2), ("CommError", "rank 1 ended: ValueError: a wrong turn"))


def _in_groups(group, rank):
    own = group.world.group(rank, [rank % 2, rank % 2 + 2])
    agreed = raised(check_agreement, own, {"plans": bytes([rank if rank % 2 else 0])})
    return rank_and_size(own), agreed


def test_groups_of_some_ranks():
    results = run(4, _in_groups)
    assert [place for place, _ in results] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert [kind for _, (kind, _) in results] == ["", "DisagreementError", "", "DisagreementError"]
    assert "plans: rank 1 (global rank 3) differ from rank 0 (global rank 1)" in results[3][1][1]
