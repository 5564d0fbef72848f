"""Hops between real ranks: what arrives, what is counted, and what a rank that died does to the others."""

import os
import signal

import pytest
import torch
import torch.distributed as dist

from longspan.attention.attention import attention
from longspan.attention.kernel import KERNELS
from longspan.comm.hops import Hop
from longspan.comm.traffic import Call
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


def test_an_empty_hop_needs_no_group():
    meter = Call("forward", "ring", "none", 0)
    flight = Hop().post(None, meter)
    flight.wait(meter)
    assert (meter.messages_sent, meter.bytes_sent, meter.bytes_received, meter.seconds_waiting) == (0, 0, 0, 0.0)


def _attend_until(group, rank, victim, phase):
    """One rank kills itself inside a kernel, between posting a hop and waiting for it."""
    S, P = 48, dist.get_world_size(group)
    plan = plan_attention(Layout.zigzag(S, P), Mask.full(S))
    q, k, v = (torch.randn(1, 2, S // P, 8, requires_grad=True) for _ in range(3))

    def step():
        attention(q, k, v, plan=plan, group=group).sum().backward()

    step()
    if rank == victim:
        setattr(KERNELS["sdpa"], phase, lambda *arguments: os.kill(os.getpid(), signal.SIGKILL))
    return raised(step)


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_killed_mid_hop_is_an_error_on_the_others_and_no_hang(ranks, phase):
    victim = 1
    endings = own_ranks(ranks, _attend_until, victim, phase, timeout=50.0)
    assert endings[victim].exit_code == -signal.SIGKILL
    for rank, ending in enumerate(endings):
        if rank == victim:
            continue
        assert ending.value is not None, (rank, ending)
        kind, text = ending.value
        assert kind == "CommError", (rank, ending)
        assert text.startswith("a hop with rank ")
        assert text.endswith("\n\nhint: look at the log of that rank: it most likely ended first")
        if abs(rank - victim) == 1:
            named = text.removeprefix("a hop with rank ").split(" of the context-parallel group failed: ")[0]
            assert str(victim) in named.split(", "), (rank, text)
        assert ending.seconds < 50
