"""Attention on the device: every kind of tile and every route against the dense oracle; streams in order; no wait of the host."""

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from longspan import Layout, Mask, UpipeAttention, attention, plan_attention, record, shard
from longspan.comm.gather import stack
from longspan.plan.bands import UNBOUNDED
from tests.cp.cases import masks_of
from tests.cuda import CudaTensor, Ledger, RaceError, stand_in
from tests.cuda.memory import memory_of
from tests.cuda.streams import Device, Event, here, share
from tests.kernels.tiles import PRECISION, TILES
from tests.oracle import Inputs, dense_attention, make_inputs, raised, relative_error
from tests.ranks import run_ranks, run_threads

ROUTES = ("ring", "exchange", "ulysses", "allgather", "rotate")
KERNELS = {torch.bfloat16: "sdpa", torch.float32: "efficient"}
"""That "auto" takes on a device without a package beside torch."""


class Seen(NamedTuple):
    """What a rank found: the greatest errors, and what a call forward and backward did beside computing."""

    out: float
    gradients: float
    syncs: dict[str, int]
    copies: list[Any]
    streams: set[str]


def attend(
    mask: Mask, group: Any = None, rank: int = 0, ranks: int = 1, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> tuple[Seen, Ledger]:
    """Attention of this rank, forward and backward, on the device."""
    heads = (4, 2)
    given = make_inputs(mask.seq_len, heads, dtype=dtype)
    want = dense_attention(Inputs(*(x.double() for x in given)), mask)
    layout = Layout.zigzag(mask.seq_len, ranks)
    plan = plan_attention(layout, mask, heads=heads, **options)
    q, k, v, dout = (shard(x, layout, rank, 2).to("cuda") for x in given)
    for x in (q, k, v):
        x.requires_grad_()
    with stand_in() as ledger, record() as calls:
        out = attention(q, k, v, plan=plan, group=group)
        out.backward(dout)
    assert {call.kernel for call in calls} == {KERNELS[dtype]}
    got = (out.detach(), q.grad, k.grad, v.grad)
    assert all(isinstance(x, CudaTensor) for x in got)
    floors = [max(1e-3, x.abs().max().item()) for x in want[:4]]
    errors = [
        relative_error(x.cpu(), shard(y, layout, rank, 2), floor)
        for x, y, floor in zip(got, want[:4], floors, strict=True)
    ]
    streams = {launch.stream for launch in (*ledger.launches, *ledger.collectives)}
    return Seen(errors[0], max(errors[1:]), ledger.syncs_by_site(), list(ledger.copies), streams), ledger


def check(seen: Seen, dtype: torch.dtype = torch.bfloat16) -> None:
    assert seen.out < PRECISION[dtype][0], seen
    assert seen.gradients < PRECISION[dtype][1], seen
    assert seen.syncs == {}, seen
    assert [copy for copy in seen.copies if copy.direction == "to host" or not copy.pinned] == [], seen


def mask_of_tile(kind: str) -> Mask:
    q0, q1, k0, k1, lo, hi = TILES[kind]
    return Mask.bands(
        max(q1, k1), [(q0, q1, k0, k1, None if lo <= -UNBOUNDED else lo, None if hi >= UNBOUNDED else hi)]
    )


@pytest.mark.parametrize("kind", TILES)
def test_every_tile(kind: str) -> None:
    with stand_in():
        check(attend(mask_of_tile(kind))[0])


@pytest.mark.parametrize("dtype", KERNELS, ids=str)
@pytest.mark.parametrize("number", range(9))
def test_every_mask(number: int, dtype: torch.dtype) -> None:
    with stand_in():
        check(attend(masks_of(23)[number], dtype=dtype)[0], dtype)


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_on_two_ranks(route: str) -> None:
    for results in run_ranks(2, _attend_all, route):
        for seen in results:
            check(seen)
        assert any("the NCCL stream" in stream for seen in results for stream in seen.streams)


def _attend_all(group: Any, rank: int, route: str) -> list[Seen]:
    with stand_in():
        nccl = dist.new_group(backend="cpu:gloo,cuda:nccl")
        return [attend(mask, nccl, rank, 2, route=route)[0] for mask in masks_of(23)]


@pytest.mark.parametrize("route", ROUTES)
def test_ranks_that_share_a_device(route: str) -> None:
    """Four ranks as threads over the transport in memory, tensors and lane on one device. Ledgers hold what all of them do."""
    for results in run_threads(4, _attend_on_shared, here(), route, device="cuda"):
        for seen in results:
            check(seen._replace(syncs={}, copies=[]))


def _attend_on_shared(group: Any, rank: int, device: Device, route: str) -> list[Seen]:
    share(device)
    with stand_in():
        return [attend(mask, group, rank, 4, route=route)[0] for mask in (Mask.documents([2, 4, 2]), masks_of(23)[6])]


def test_a_call_makes_no_stream_and_leaves_nothing_in_the_pool_of_another() -> None:
    """What outlives it lies in blocks of the main stream, which the rest of the program can use again."""
    mask = masks_of(23)[7]
    layout = Layout.zigzag(23, 1)
    plan = plan_attention(layout, mask)
    with stand_in():
        for _ in range(2):
            q, k, v, dout = (x.to("cuda") for x in make_inputs(23, (4, 4), dtype=torch.bfloat16))
            with stand_in() as ledger:
                out = attention(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), plan=plan)
                kept = [x for x in out.grad_fn.saved_tensors if x is not None]
                out.backward(dout)
        assert ledger.streams_made == 0
        homes = {tuple(x.shape): memory_of(x).home.name for x in (out, q.grad, k.grad, v.grad, *kept)}
        assert set(homes.values()) == {"the main stream"}, homes


@pytest.mark.parametrize("route", ["ring", "rotate"])
def test_streams_that_do_not_wait_are_noticed(route: str) -> None:
    """Planted: no stream waits for another any more."""
    assert run_ranks(2, _attend_without_waiting, route) == ["RaceError"] * 2


def _attend_without_waiting(group: Any, rank: int, route: str) -> str:
    with stand_in(), pytest.MonkeyPatch.context() as patched:
        nccl = dist.new_group(backend="cpu:gloo,cuda:nccl")
        patched.setattr(Event, "wait", lambda event, stream=None: None)
        return raised(attend, Mask.causal(24), nccl, rank, 2, route=route)[0]


def test_streams_that_do_not_wait_are_noticed_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    with stand_in():
        monkeypatch.setattr(Event, "wait", lambda event, stream=None: None)
        with pytest.raises(RaceError, match="does not wait for"):
            attend(Mask.causal(24))


def _staged(group: Any, rank: int, device: Device) -> dict[str, int]:
    """A layer of `upipe`, 4 heads in 2 stages, forward and backward; where the host waited."""
    share(device)
    layout = Layout.zigzag(24, 2)
    plan = plan_attention(layout, Mask.causal(24), "upipe", (4, 2))
    with stand_in():
        layer = UpipeAttention(32, 4, 2, heads_per_stage=2).to(torch.bfloat16).to("cuda")
        x = torch.ones(1, 12, 32, dtype=torch.bfloat16).to("cuda").requires_grad_()
        layer(x, plan, group)  # the ranks compare the kind of call in the first one
        stack(torch.zeros(1), group)  # ledgers hold what all threads do: begin together
        with stand_in() as ledger:
            layer(x, plan, group).sum().backward()
        assert x.grad is not None
        return ledger.syncs_by_site()


def test_stages_of_heads_do_not_wait_for_the_device() -> None:
    assert run_threads(2, _staged, here(), device="cuda") == [{}, {}]
