"""What the stand-in computes, counts and refuses, each case worked out by hand."""

import gc
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.cuda import CudaTensor, NcclError, RaceError, stand_in
from tests.oracle import raised
from tests.ranks import run_ranks


@pytest.fixture
def ledger() -> Iterator[Any]:
    with stand_in() as ledger:
        yield ledger


@pytest.fixture
def side(ledger: Any) -> Any:
    """A stream beside the main one."""
    return torch.cuda.Stream()


def test_a_module_gives_what_it_gives_on_the_cpu(ledger: Any) -> None:
    def run(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.RMSNorm(16), torch.nn.SiLU(), torch.nn.Linear(16, 4)
        )
        x = torch.randn(5, 8).to(device).requires_grad_()
        loss = F.cross_entropy(model.double().to(device)(x.double()), torch.arange(5, device=device) % 4)
        loss.backward()
        return [loss.detach(), x.grad, *(p.grad for p in model.parameters())]

    ours, theirs = run("cuda"), run("cpu")
    assert all(isinstance(x, CudaTensor) and x.device == torch.device("cuda", 0) for x in ours)
    assert all(torch.equal(x.cpu(), y) for x, y in zip(ours, theirs, strict=True))


def test_launches_are_operators_that_write_something(ledger: Any) -> None:
    x = torch.ones(4, 6, device="cuda")  # ones
    view = x.T[1:].unsqueeze(0).detach()
    torch.empty_like(x)
    x.new_empty(0).add_(1)
    view.mul_(2)  # mul_
    (x @ x.mT).sum()  # mm, sum
    assert [launch.operator for launch in ledger.launches] == ["ones", "mul_", "mm", "sum"]
    assert x.cpu()[:, 0].eq(1).all()
    assert x.cpu()[:, 1:].eq(2).all()


def test_allocations_are_new_storages_of_the_stream_that_is_current(ledger: Any, side: Any) -> None:
    x = torch.ones(4, 6, device="cuda")
    x[1:].add_(1)
    with torch.cuda.stream(side):
        torch.zeros(3, dtype=torch.float64, device="cuda")
    assert [(a.nbytes, a.stream) for a in ledger.allocations] == [(96, "the main stream"), (24, side.name)]
    before = torch.cuda.memory_allocated()
    del x
    assert torch.cuda.memory_allocated() == before - 96
    assert ledger.streams_made == 1


def test_what_nobody_has_written_holds_nan(ledger: Any) -> None:
    assert torch.empty(3, device="cuda").isnan().all()
    assert torch.ones(2, 2, device="cuda").new_empty(2).isnan().all()


SYNCS = {
    # A call, and the bytes it brings to the host.
    "item": (lambda x: x.sum().item(), 4),
    "float": (lambda x: float(x[0]), 4),
    "bool": (lambda x: bool((x > 0).all()), 1),
    "tolist": (lambda x: x.tolist(), 16),
    "cpu": (lambda x: x.cpu(), 16),
    "to": (lambda x: x.to("cpu", torch.float64), 32),
    "nonzero": (lambda x: x.nonzero(), 0),
    "mask": (lambda x: x[x > 0], 0),
    "index on the host": (lambda x: x[torch.tensor([1, 0])], 0),
    "unique": (lambda x: x.unique(), 0),
    "synchronize": (lambda x: torch.cuda.synchronize(), 0),
    "a stream": (lambda x: torch.cuda.current_stream().synchronize(), 0),
    "an event": (lambda x: torch.cuda.current_stream().record_event().synchronize(), 0),
    "from pageable memory": (lambda x: torch.ones(2).to("cuda"), 0),
    "from numbers": (lambda x: torch.tensor([1, 2], device="cuda"), 0),
    "copy_": (lambda x: x.copy_(torch.ones(4)), 0),
}


@pytest.mark.parametrize("name", SYNCS)
def test_the_host_waits_once(ledger: Any, name: str) -> None:
    call, nbytes = SYNCS[name]
    x = torch.ones(4, device="cuda")
    assert ledger.syncs == []
    call(x)
    assert len(ledger.syncs) == 1, ledger.syncs
    assert ledger.bytes_copied("to host") == nbytes
    assert ledger.syncs[0].site.file == "test_stand_in.py"


def test_the_host_does_not_wait(ledger: Any) -> None:
    x = torch.zeros(4, device="cuda")
    y = torch.ones(4).pin_memory().to("cuda", non_blocking=True)
    index = torch.arange(2, device="cuda")
    x[index] = y[index]
    x[x > 0] = 3.0
    torch.where(x > 0, x, 0).masked_fill_(x == 0, 1)
    event = torch.cuda.Event()
    event.record()
    torch.cuda.Stream().wait_event(event)
    assert ledger.syncs == []
    assert ledger.copies == [ledger.copies[0]._replace(direction="to device", nbytes=16, pinned=True)]
    assert x.tolist() == [3, 3, 0, 0]


def test_tensors_of_two_devices_do_not_meet(ledger: Any) -> None:
    x = torch.ones(4, device="cuda")
    with pytest.raises(RuntimeError, match="at least two devices, cuda:0 and cpu"):
        x + torch.ones(4)
    with pytest.raises(TypeError, match="can't convert cuda:0"):
        x.numpy()
    assert (x + torch.tensor(2.0)).tolist() == [3.0] * 4


def test_a_stream_that_does_not_wait_is_an_error(ledger: Any, side: Any) -> None:
    x = torch.ones(4, device="cuda")
    with torch.cuda.stream(side), pytest.raises(RaceError) as error:
        x.mul(2)
    assert str(error.value).startswith(f"mul on {side.name} (test_stand_in.py:")
    assert "reads a tensor (4,) that ones on the main stream (test_stand_in.py:" in str(error.value)
    assert f"{side.name} does not wait for the main stream" in str(error.value)


@pytest.mark.parametrize("wait", ["stream", "event", "host"])
def test_a_stream_that_waits_is_none(ledger: Any, side: Any, wait: str) -> None:
    x = torch.ones(4, device="cuda")
    event = torch.cuda.Event()
    event.record()
    if wait == "stream":
        side.wait_stream(torch.cuda.current_stream())
    elif wait == "event":
        side.wait_event(event)
    else:
        torch.cuda.synchronize()
    with torch.cuda.stream(side):
        y = x * 2
    with pytest.raises(RaceError, match=r"reads a tensor \(4,\) that mul"):
        y + 1
    torch.cuda.current_stream().wait_stream(side)
    assert (y + 1).tolist() == [3.0] * 4


def test_an_event_stands_for_what_came_before_it(ledger: Any, side: Any) -> None:
    x = torch.ones(4, device="cuda")
    event = torch.cuda.current_stream().record_event()
    x.mul_(2)
    side.wait_event(event)
    with torch.cuda.stream(side), pytest.raises(RaceError, match="that mul_ on the main stream"):
        x.clone()


def test_what_is_read_elsewhere_is_not_overwritten(ledger: Any, side: Any) -> None:
    x = torch.ones(4, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.clone()
    x.clone()  # two may read
    with pytest.raises(
        RaceError, match=r"add_ on the main stream .* writes a tensor \(4,\) that clone on stream .* read"
    ):
        x.add_(1)


def test_two_streams_may_work_on_parts_of_one_tensor(ledger: Any, side: Any) -> None:
    x = torch.zeros(4, 6, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x[:, ::2].add_(1)
    x[:, 1::2].add_(2)  # other bytes of the same lines
    with pytest.raises(RaceError, match="add_"):
        x[:, 2:4].add_(1)


def free_in_use(side: Any, wait: bool = False, record: bool = False) -> torch.Tensor:
    """A tensor is freed on the main stream while `side` may still read it; then the main stream makes another."""
    x = torch.ones(4, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.clone()
    if record:
        x.record_stream(side)
    del x
    gc.collect()
    if wait:
        torch.cuda.current_stream().wait_stream(side)
    return torch.zeros(2, device="cuda")


def test_a_freed_buffer_in_use_on_another_stream_is_an_error(ledger: Any, side: Any) -> None:
    with pytest.raises(
        RaceError, match=r"16 bytes that .* made on the main stream were freed .* while clone on stream"
    ):
        free_in_use(side)
    assert free_in_use(side, wait=True).tolist() == [0, 0]
    assert free_in_use(side, record=True).tolist() == [0, 0]


@pytest.fixture
def world(ledger: Any) -> Iterator[Any]:
    """A world of one rank as a run has it on GPUs."""
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


REFUSED = {
    "a tensor of the host": (lambda: [torch.ones(2, device="cuda"), torch.ones(2)], "device type cpu"),
    "int16": (lambda: [torch.ones(2, dtype=torch.int16, device="cuda")] * 2, "torch.int16 .* not supported for NCCL"),
    "complex": (lambda: [torch.ones(2, dtype=torch.complex64, device="cuda")] * 2, "not supported for NCCL"),
    "strides": (lambda: [torch.ones(2, 2, device="cuda").T, torch.ones(2, 2, device="cuda")], "must be contiguous"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_nccl_refuses(world: Any, name: str) -> None:
    make, reason = REFUSED[name]
    into, given = make()
    with pytest.raises(NcclError, match=reason):
        world._allgather_base(into, given)


def test_a_group_of_nccl_alone_refuses_the_host(world: Any) -> None:
    alone = dist.new_group(backend="nccl", timeout=timedelta(seconds=7))
    both = dist.new_group(backend="cpu:gloo,cuda:nccl")
    assert dist.get_backend(alone) == "nccl"
    x = torch.ones(2)
    with pytest.raises(NcclError, match="No backend type associated with device type cpu"):
        dist.all_reduce(x, group=alone)
    dist.all_reduce(x, group=both)
    dist.all_reduce(x.to("cuda"), group=alone)


def test_waiting_for_a_collective_makes_the_stream_wait_and_not_the_host(world: Any, ledger: Any) -> None:
    x = torch.ones(4, device="cuda")
    work = dist.all_reduce(x, async_op=True)
    with pytest.raises(RaceError, match=r"add on the main stream .* that allreduce_ on the NCCL stream"):
        x + 1
    work.wait()
    assert ledger.syncs == []
    assert (x + 1).tolist() == [2.0] * 4
    assert [call.operator for call in ledger.collectives] == ["allreduce_"]


def test_a_collective_comes_after_the_stream_it_was_posted_from(world: Any, side: Any) -> None:
    x = torch.ones(4, device="cuda")
    with torch.cuda.stream(side), pytest.raises(RaceError, match="allreduce_ on the NCCL stream"):
        dist.all_reduce(x)


def test_messages_over_two_ranks() -> None:
    (first, second) = run_ranks(2, _exchange)
    assert first == ([2.0, 2.0], [], 1)
    assert second == ([1.0, 1.0], [], 1)


def _exchange(group: Any, rank: int) -> tuple[list[float], list[Any], int]:
    with stand_in() as ledger:
        nccl = dist.new_group(backend="nccl", timeout=timedelta(seconds=7))
        mine, theirs = torch.full((2,), rank + 1.0, device="cuda"), torch.empty(2, device="cuda")
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.irecv, theirs, group=nccl, group_peer=1 - rank),
                dist.P2POp(dist.isend, mine, group=nccl, group_peer=1 - rank),
            ]
        )
        kind, text = raised(theirs.add, 1)
        assert (kind, "that recv_ on the NCCL stream" in text) == ("RaceError", True)
        for work in works:
            work.wait()
        syncs = list(ledger.syncs)
        return theirs.tolist(), syncs, len(works)


def test_a_world_of_nccl(ledger: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "nccl", init_method=f"file://{folder}/store", rank=0, world_size=1, timeout=timedelta(seconds=7)
        )
        try:
            assert dist.get_backend() == "nccl"
            x = torch.ones(2, device="cuda")
            dist.all_reduce(x)
            assert x.tolist() == [1, 1]
        finally:
            dist.destroy_process_group()


def test_each_thread_has_a_gpu_of_its_own(ledger: Any) -> None:
    def work(number: int) -> tuple[float, int]:
        with stand_in() as own:
            x = torch.full((number,), 1.0, device="cuda")
            return (x + number).sum().item(), sum(a.nbytes for a in own.allocations)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, (3, 4))) == [(12.0, 12 + 12 + 4), (20.0, 16 + 16 + 4)]
    assert ledger.launches == []


def test_nothing_stays_behind() -> None:
    before = torch.cuda.Stream, torch.Tensor.to, dist.Work.wait, torch.tensor
    with stand_in():
        assert torch.cuda.is_available()
        assert torch.cuda.Stream is not before[0]
    assert before == (torch.cuda.Stream, torch.Tensor.to, dist.Work.wait, torch.tensor)
    assert not torch.cuda.is_available()
