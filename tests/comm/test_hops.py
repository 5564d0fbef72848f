"""Hops between real ranks: what arrives, what is counted, and what a rank that died does to the others."""

import os
import signal

import pytest
import torch
import torch.distributed as dist

from longspan.comm.hops import Hop, joined
from longspan.comm.traffic import Call
from longspan.comm.transport import Transport
from longspan.cp.attention import attention
from longspan.errors import CommError
from longspan.kernels.choice import KERNELS
from longspan.plan import Layout, Mask, plan_attention
from tests.oracle import raised
from tests.ranks import own_ranks, run_ranks


def _round(group, rank):
    size = dist.get_world_size(group)
    following, previous = (rank + 1) % size, (rank - 1) % size
    mine = [torch.full((3, 2), float(rank)), torch.arange(5, dtype=torch.int64) + 10 * rank]
    theirs = [torch.empty(3, 2), torch.empty(5, dtype=torch.int64)]
    meter = Call("forward", "ring", "none", rank)
    flight = Hop([(following, x) for x in mine], [(previous, x) for x in theirs]).post(group, meter)
    before = (meter.bytes_sent, meter.messages_sent, meter.bytes_received)
    flight.wait(meter)
    flight.wait(meter)
    assert theirs[0].eq(previous).all()
    assert theirs[1].tolist() == [10 * previous + n for n in range(5)]
    return before, meter.bytes_received, meter.seconds_waiting > 0


@pytest.mark.parametrize("ranks", [2, 3])
def test_messages_arrive_in_order_and_are_counted_once(ranks):
    nbytes = 3 * 2 * 4 + 5 * 8
    assert run_ranks(ranks, _round) == [((nbytes, 2, 0), nbytes, True)] * ranks


def _all_to_all(group, rank, layout):
    """Rank `r` sends `r + 1` rows to every lower rank and two messages to the next; some of them nothing at all."""
    size = dist.get_world_size(group)
    sends, receives, right = [], [], []
    for peer in range(rank):
        sends.append((peer, torch.full((rank + 1, 2), float(10 * rank + peer))))
    if rank + 1 < size:
        sends += [(rank + 1, torch.full((3,), float(rank))), (rank + 1, torch.full((2, 2), -float(rank)))]
    for peer in range(rank + 1, size):
        receives.append((peer, torch.empty(peer + 1, 2)))
        right.append(torch.full((peer + 1, 2), float(10 * peer + rank)))
    if rank:
        receives += [(rank - 1, torch.empty(3)), (rank - 1, torch.empty(2, 2))]
        right += [torch.full((3,), float(rank - 1)), torch.full((2, 2), -float(rank - 1))]
    if layout == "joined":  # one after the other in one piece of memory, sorted by peer: posted without a copy
        receives, right = (
            list(x) for x in zip(*sorted(zip(receives, right, strict=True), key=lambda p: p[0][0]), strict=True)
        )
        sizes = [x.numel() for _, x in receives]
        flat = torch.split(torch.empty(sum(sizes)), sizes)
        receives = [(peer, part.view(x.shape)) for (peer, x), part in zip(receives, flat, strict=True)]
        assert joined([x for _, x in receives]) is not None
    meter = Call("forward", "rotate", "none", rank)
    flight = Hop(sends, receives).post(group, meter, collective=torch.empty(0))
    flight.wait(meter)
    flight.wait(meter)
    for (peer, got), want in zip(receives, right, strict=True):
        assert torch.equal(got, want), (rank, peer, got, want)
    counted = (meter.bytes_sent, meter.bytes_received, meter.collectives, meter.messages_sent)
    assert counted == (sum(x.nbytes for _, x in sends), sum(x.nbytes for _, x in receives), 1, len(sends))
    return [interval.name for interval in meter.intervals], meter.bytes_received


@pytest.mark.parametrize("layout", ["apart", "joined"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_messages_of_a_hop_in_one_all_to_all(ranks, layout):
    for rank, (names, received) in enumerate(run_ranks(ranks, _all_to_all, layout)):
        assert names == ["waiting", "hop"]
        above = sum(2 * (peer + 1) for peer in range(rank + 1, ranks))
        assert received == 4 * (above + (7 if rank else 0))


def _nothing_to_carry(group, rank):
    """Only rank 0 has something for rank 1; the others take part all the same, with no tensor at all."""
    meter = Call("forward", "rotate", "none", rank)
    arrived = torch.empty(2, dtype=torch.float64)
    hop = Hop()
    if rank == 0:
        hop.sends = [(1, torch.tensor([1.5, 2.5], dtype=torch.float64))]
    if rank == 1:
        hop.receives = [(0, arrived)]
    hop.post(group, meter, collective=arrived).wait(meter)
    empty = Hop().post(group, meter)
    empty.wait(meter)
    return meter.collectives, meter.bytes_sent, meter.bytes_received, arrived.tolist() if rank == 1 else None


def test_ranks_with_nothing_to_carry_take_part():
    assert run_ranks(3, _nothing_to_carry) == [(1, 16, 0, None), (1, 0, 16, [1.5, 2.5]), (1, 0, 0, None)]


def test_tensors_that_lie_one_after_the_other_are_one():
    flat = torch.arange(12.0)
    a, b, c = flat[:4].view(2, 2), flat[4:6], flat[6:]
    assert joined([a, b, c]).tolist() == list(range(12))
    assert joined([a, b]).data_ptr() == flat.data_ptr()
    assert joined([b, c]).tolist() == list(range(4, 12))
    assert joined([a, c]) is None  # a gap
    assert joined([b, a]) is None  # another order
    assert joined([a, torch.ones(2)]) is None  # other memory
    assert joined([]) is None


def _in_the_cp_group(group, rank):
    # tp2 x cp2: ranks 0, 2 and 1, 3 are neighbours in cp. Hops through the world would reach the tp neighbour.
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    own = groups[rank % 2]
    place = rank // 2
    arrived = torch.empty(1)
    meter = Call("forward", "ring", "none", place)
    Hop([(1 - place, torch.tensor([float(rank)]))], [(1 - place, arrived)]).post(own, meter).wait(meter)
    return int(arrived.item())


def test_peers_are_ranks_of_the_given_group():
    assert run_ranks(4, _in_the_cp_group) == [2, 3, 0, 1]


class OneWorkForAll(Transport):
    """A backend that answers for a whole batch with one work, as NCCL does; its peers are gone."""

    rank, size = 0, 4

    def global_rank(self, rank):
        return rank

    def carries(self, device):
        return device

    def post(self, sends, receives):
        return [self]

    def all_to_all(self, incoming, outgoing, received, sent):
        return self

    def all_gather(self, everyone, mine):
        self.wait()

    def wait(self):
        raise RuntimeError("connection closed\nand more")


@pytest.mark.parametrize("collective", [None, torch.empty(0)])
def test_a_batch_with_one_work_blames_all_its_peers(collective):
    x = [torch.ones(1) for _ in range(3)]
    flight = Hop([(3, x[0])], [(1, x[1]), (2, x[2])]).post(
        OneWorkForAll(), Call("forward", "ring", "none", 0), collective
    )
    with pytest.raises(CommError) as error:
        flight.wait(Call("forward", "ring", "none", 0))
    assert error.value.message == "a hop with rank 1, 2, 3 of the context-parallel group failed: connection closed"


def test_an_empty_hop_needs_no_group():
    meter = Call("forward", "ring", "none", 0)
    flight = Hop().post(None, meter)
    flight.wait(meter)
    assert (meter.messages_sent, meter.bytes_sent, meter.bytes_received, meter.seconds_waiting) == (0, 0, 0, 0.0)


def _attend_until(group, rank, victim, phase, route):
    """One rank kills itself inside a kernel, between posting a hop and waiting for it."""
    S, P = 48, dist.get_world_size(group)
    plan = plan_attention(Layout.zigzag(S, P), Mask.full(S), route, (6, 6))
    q, k, v = (torch.randn(1, 6, S // P, 8, requires_grad=True) for _ in range(3))

    def step():
        attention(q, k, v, plan=plan, group=group).sum().backward()

    step()
    if rank == victim:
        setattr(KERNELS["sdpa"], phase, lambda *arguments: os.kill(os.getpid(), signal.SIGKILL))
    return raised(step)


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize(
    ("ranks", "route"),
    [
        (2, "ring"),
        (4, "ring"),
        (3, "rotate"),
        *(pytest.param(3, r, marks=pytest.mark.slow) for r in ("exchange", "ulysses")),
    ],
)
def test_a_rank_killed_mid_hop_is_an_error_on_the_others_and_no_hang(ranks, route, phase):
    victim = 1
    endings = own_ranks(ranks, _attend_until, victim, phase, route, timeout=50.0)
    assert endings[victim].exit_code == -signal.SIGKILL
    for rank, ending in enumerate(endings):
        if rank == victim:
            continue
        assert ending.value is not None, (rank, ending)
        kind, text = ending.value
        assert kind == "CommError", (rank, ending)
        assert text.startswith("a hop with rank ")
        hint = "look at the log of that rank: it most likely ended first, or its loss did not depend on attention"
        assert text.endswith(f"\n\nhint: {hint}")
        if route == "ring" and abs(rank - victim) == 1:
            named = text.removeprefix("a hop with rank ").split(" of the context-parallel group failed: ")[0]
            assert str(victim) in named.split(", "), (rank, text)
        assert ending.seconds < 50
