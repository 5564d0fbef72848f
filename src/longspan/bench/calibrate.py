"""Measure the costs of compute and communication on the available ranks, by which `route="auto"` compares routes.

message       send to the next rank and receive from the previous rank: 1 KiB, and several MiB
all-to-all    all-to-all of the same sizes among all ranks
tile          forward of full tiles of several sizes, and of a tile of one query, which measures the overhead of a call
"""

import os
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from longspan.advise import Costs
from longspan.comm.devices import check_devices
from longspan.comm.groups import ranks_per_node
from longspan.comm.hops import Hop
from longspan.comm.launch import join_world, launch, leave_world
from longspan.comm.torchrun import local_ranks, under_torchrun
from longspan.comm.traffic import call
from longspan.comm.transport import transport_of
from longspan.errors import SpecError
from longspan.kernels.choice import choose_kernel
from longspan.plan import Shape
from longspan.topology import Topology

Tensor = torch.Tensor

_SMALL, _REPEATS = 1 << 10, 5
_TILE_ROWS = (128, 512, 2048)
_HEADS = 4


def calibrate(ranks: int, head_dim: int, dtype: torch.dtype, mebibytes: int = 16, device: str = "auto") -> Costs | None:
    """Measure in the current world under torchrun, else on `ranks` new processes. Return the costs on rank 0, None on others.

    Raises `SpecError`: more ranks on this machine than devices.
    """
    check_devices(device, local_ranks(ranks), "--device cpu")
    if under_torchrun():
        return _measure_and_leave(head_dim, dtype, mebibytes, device)
    return launch(_measure_and_leave, (head_dim, dtype, mebibytes, device), ranks)


def measure(group: dist.ProcessGroup, head_dim: int, dtype: torch.dtype, num_bytes: int) -> Costs:
    """Return, on every rank, the costs of the slowest rank of `group`. Collective. Raises `SpecError`: a group of one rank."""
    rank, ranks, device = dist.get_rank(group), dist.get_world_size(group), _device_of(group)
    if ranks == 1:
        raise SpecError("a group of 1 rank has no traffic to measure", hint="start at least 2 ranks")
    tiles = {rows: _tile_seconds(rows, head_dim, dtype, device) for rows in (1, *_TILE_ROWS)}
    tiles = {rows: _slowest(group, seconds) for rows, seconds in tiles.items()}
    overhead = tiles.pop(1)
    work = {rows: max(seconds - overhead, seconds / 2) for rows, seconds in tiles.items()}
    costs = Costs(
        head_dim=head_dim,
        itemsize=dtype.itemsize,
        tile_speed=tuple((rows, 4.0 * rows * rows * head_dim * _HEADS / seconds) for rows, seconds in work.items()),
        tile_overhead=overhead,
        source=f"measured on {ranks} ranks",
    )
    following = [(1, "message")]
    node = ranks_per_node(group)
    if node is not None and node < ranks:
        following.append((node, "node"))
    values = {}
    for shift, name in following:

        def hop(size: int, shift: int = shift) -> Callable[[], None]:
            peers = (rank + shift) % ranks, (rank - shift) % ranks
            return _hop(group, [peers[0]], [peers[1]], size, device, collective=False)

        values[f"{name}_latency"], values[f"{name}_bandwidth"] = _line(group, hop, num_bytes)
    values.pop("node_latency", None)
    values.setdefault("node_bandwidth", values["message_bandwidth"])
    others = [peer for peer in range(ranks) if peer != rank]
    values["all_to_all_latency"], values["all_to_all_bandwidth"] = _line(
        group, lambda size: _hop(group, others, others, size // len(others), device, collective=True), num_bytes
    )
    return costs.model_copy(update=values)


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """Return the GPU if the group's transport carries GPU tensors, else the CPU."""
    return transport_of(group).carries(torch.device("cuda"))


def _measure_and_leave(head_dim: int, dtype: torch.dtype, mebibytes: int, device: str) -> Costs | None:
    join_world(Topology(dp=int(os.environ["WORLD_SIZE"])), timedelta(minutes=5), device=device)
    try:
        group = dist.group.WORLD
        assert group is not None, "the world was just joined"
        costs = measure(group, head_dim, dtype, mebibytes << 20)
        return costs if dist.get_rank() == 0 else None
    finally:
        leave_world()


def _line(
    group: dist.ProcessGroup, exchange: Callable[[int], Callable[[], None]], num_bytes: int
) -> tuple[float, float]:
    """Return (latency, bandwidth) of `exchange(size)`, from a small and a large size."""
    device = _device_of(group)
    small, large = (_slowest(group, _seconds(exchange(size), group, device)) for size in (_SMALL, num_bytes))
    # At most ten times the bandwidth of the large size alone: on a busy machine the difference may be noise.
    return small, (num_bytes - _SMALL) / max(large - small, large / 10)


def _hop(
    group: dist.ProcessGroup, to: list[int], by: list[int], size: int, device: torch.device, collective: bool
) -> Callable[[], None]:
    sends = [(peer, torch.zeros(max(size, 1), dtype=torch.uint8, device=device)) for peer in to]
    receives = [(peer, torch.zeros(max(size, 1), dtype=torch.uint8, device=device)) for peer in by]

    def run() -> None:
        with call("forward", "calibrate", "", dist.get_rank(group), device) as meter:
            Hop(list(sends), list(receives)).post(group, meter, sends[0][1] if collective else None).wait(meter)

    return run


def _tile_seconds(rows: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> float:
    q, k, v = (torch.randn(1, _HEADS, rows, head_dim, device=device).to(dtype) for _ in range(3))
    kernel, shape = choose_kernel("auto", q, k, v), Shape(rows, rows, 1 - rows, rows - 1)
    return _seconds(lambda: kernel.forward(q, k, v, (shape,), 0.1), None, device)


def _seconds(run: Callable[[], object], group: dist.ProcessGroup | None, device: torch.device) -> float:
    """Return the minimum seconds of a few calls after a warm-up."""
    best = float("inf")
    run()
    for _ in range(_REPEATS):
        if group is not None:
            dist.barrier(group)
        _finish(device)
        began = time.perf_counter()
        run()
        _finish(device)
        best = min(best, time.perf_counter() - began)
    return best


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _slowest(group: dist.ProcessGroup, seconds: float) -> float:
    value = torch.tensor([seconds], dtype=torch.float64, device=_device_of(group))
    dist.all_reduce(value, dist.ReduceOp.MAX, group=group)
    return float(value)
