"""Runs one rank's share of any plan, forward and backward: tiles on this rank's queries while the next hop is in flight.

    B batch, H query heads, K KV heads, T slots of this rank, D head dim, R rows of a buffer

Keys and values travel head by head, `(B, K, R, D)`, as kernels read them fastest. Gradients are summed and travel rows first,
`(R, B, K, D)`, as kernels write them: any run of rows is contiguous. Partial results are merged in the plan's order, in at
least fp32.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from longspan.attention.kernel import Kernel, choose_kernel
from longspan.attention.merge import sink_gradient
from longspan.attention.sums import Gradient, Output
from longspan.comm.hops import Flight, Hop
from longspan.comm.traffic import Call, call
from longspan.plan import Plan, RankPlan, Runs, Step, Tile, Transfer
from longspan.plan import bands as algebra

Tensor = torch.Tensor
Rows = tuple[Tensor, Tensor]
"""Keys and values of a buffer: `(B, K, R, D)` and `(B, K, R, Dv)`."""
KVGradient = tuple[Gradient, Gradient]


@dataclass(frozen=True)
class Share:
    """What one rank runs of a plan (without the plan, which may then be freed), in which group, by which kernel."""

    work: RankPlan
    route: str
    seq_len: int
    heads: tuple[int, int] | None
    digest: bytes
    group: torch.distributed.ProcessGroup | None
    kernel: str

    @classmethod
    def of(cls, plan: Plan, rank: int, group: torch.distributed.ProcessGroup | None, kernel: str) -> "Share":
        return cls(plan.rank_plan(rank), plan.route, plan.seq_len, plan.heads, plan.digest, group, kernel)


def run_forward(
    share: Share, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Local shards `(B, H, T, D), (B, K, T, D), (B, K, T, Dv)` -> out `(B, H, T, Dv)` like q, lse `(B, H, T)`."""
    q, k, v = map(_dense_rows, (q, k, v))
    kernel = choose_kernel(share.kernel, q, k, v)
    with call("forward", share.route, kernel.name, share.work.rank, timed=q.device.type == "cpu") as meter:
        result = Output(q, v)
        for step, _, (keys, values) in _relay(share, (k, v), meter):
            for tile in _pieces(kernel, step.tiles, q.device):
                with meter.spend("kernels"):
                    out, lse = kernel.forward(
                        _queries(q, tile), _keys(keys, tile), _keys(values, tile), tile.shape, scale
                    )
                _count(meter, tile)
                with meter.spend("merging"):
                    result.add(tile, out, lse)
                del out, lse
        return result.finish(sink)


def run_backward(
    share: Share,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sink: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, shaped and typed like them, and of the sink `(H,)` from this rank's rows (`(0,)` without one).

    The own shard comes last: what others found for it comes home meanwhile, and is added to what it found itself.
    """
    dout, q, k, v = map(_dense_rows, (dout, q, k, v))
    kernel = choose_kernel(share.kernel, q, k, v)
    with call("backward", share.route, kernel.name, share.work.rank, timed=q.device.type == "cpu") as meter:
        dq = Gradient(q, q.shape[2])
        home = (Gradient(k, k.shape[2]), Gradient(v, v.shape[2]))

        def compute(step: Step, rows: Rows, gradients: KVGradient, arrived: Callable[[], None]) -> None:
            for tile in _pieces(kernel, step.tiles, q.device):
                with meter.spend("kernels"):
                    dq_tile, dk_tile, dv_tile = kernel.backward(
                        _queries(dout, tile), _queries(q, tile), _keys(rows[0], tile), _keys(rows[1], tile),
                        _queries(out, tile), _queries(lse, tile), tile.shape, scale,
                    )  # fmt: skip
                _count(meter, tile)
                arrived()  # what is added to came over the wire while the tile was computed
                with meter.spend("merging"):
                    dq.add(tile.q0, tile.q1, dq_tile)
                    gradients[0].add(tile.k0, tile.k1, dk_tile)
                    gradients[1].add(tile.k0, tile.k1, dv_tile)
                del dq_tile, dk_tile, dv_tile
            arrived()

        travelling = _Travelling(share, home, meter)
        for step, following, rows in _relay(share, (k, v), meter):
            if step is share.work.steps[0]:
                travelling.expect(following, rows)
            else:
                compute(step, rows, travelling.here, travelling.arrive)
                travelling.hand_over(step, following, rows)
        compute(share.work.steps[0], (k, v), home, lambda: None)
        travelling.bring_home()
        if sink is None:
            dsink = q.new_empty(0)
        else:
            live = slice(0, share.work.tokens)
            dsink = sink_gradient(dout[:, :, live], out[:, :, live], lse[:, :, live], sink)
        return dq.finish(), home[0].finish(), home[1].finish(), dsink


def _relay(share: Share, own: Rows, meter: Call) -> Iterator[tuple[Step, Step | None, Rows]]:
    """Each step, the step after it, and its keys and values. While the caller computes, these go on and the next arrive.

    One buffer is in use and one in flight. A rank waits only for the rank before it, at an earlier distance: no cycle.
    """
    rows: Rows = own
    for step, following in zip(share.work.steps, [*share.work.steps[1:], None], strict=True):
        hop = Hop()
        arriving = rows
        if step.send is not None:
            hop.sends += [(step.send.peer, part) for x in rows for part in _messages(x, step.send)]
        if following is not None:
            arriving = _buffers(following.rows, rows)
            if following.recv is not None:
                meter.rows_received += following.rows
                hop.receives += [(following.recv.peer, part) for x in arriving for part in _messages(x, following.recv)]
        flight = hop.post(share.group, meter)
        del hop
        yield step, following, rows
        flight.wait(meter)
        rows = arriving


@dataclass
class _Incoming:
    """Messages under way; what arrives packed is added to rows of its target once it is here."""

    flight: Flight
    packed: list[tuple[Tensor, Gradient, Runs]] = field(default_factory=list)

    def wait(self, meter: Call) -> None:
        self.flight.wait(meter)
        for rows, gradient, runs in self.packed:
            with meter.spend("merging"):
                gradient.add_runs(runs, rows)
        self.packed = []


class _Travelling:
    """Partial dK, dV on their way: from the rank before, onwards to the next, and home from the farthest rank.

    Beside the buffer in use and the one that arrives, what came home waits packed, as few rows as did.
    """

    def __init__(self, share: Share, home: KVGradient, meter: Call) -> None:
        self._share, self._home, self._meter = share, home, meter
        self._arriving = self._homing = _Incoming(Flight([], Hop()))
        self._returned: list[_Incoming] = []
        self.here: KVGradient = home

    def expect(self, step: Step | None, like: Rows) -> None:
        """Before any gradient has been computed: make room for those of the first step that is not our own."""
        self._arriving = self._next(Hop(), step, like)

    def arrive(self) -> None:
        """Wait until the partial gradients of the current step are here (and those of the step before have left)."""
        self._arriving.wait(self._meter)

    def hand_over(self, step: Step, following: Step | None, like: Rows) -> None:
        """Send the finished gradients of `step` on and home, and make room for those of the `following` step."""
        self._homing.flight.wait(self._meter)
        done = [gradient.rows() for gradient in self.here]
        onwards, homewards = Hop(), Hop()
        if step.grad_send is not None:
            onwards.sends += [(step.grad_send.peer, _pick(x, step.grad_send.runs, dim=0)) for x in done]
        if step.home_send is not None:
            homewards.sends += [(step.home_send.peer, _pick(x, step.home_send.runs, dim=0)) for x in done]
        del done
        self._arriving = self._next(onwards, following, like)
        self._homing = self._receive(homewards, step.home_recv, self._home, in_place=False)
        self._returned.append(self._homing)

    def bring_home(self) -> None:
        """Wait for everything that is still under way, and add what came home, in the plan's order."""
        self.arrive()
        for incoming in self._returned:
            incoming.wait(self._meter)

    def _next(self, onwards: Hop, following: Step | None, like: Rows) -> _Incoming:
        if following is None:
            return self._receive(onwards, None, self.here)
        self.here = (Gradient(like[0], following.rows), Gradient(like[1], following.rows))
        return self._receive(onwards, following.grad_recv, self.here)

    def _receive(self, hop: Hop, transfer: Transfer | None, gradients: KVGradient, in_place: bool = True) -> _Incoming:
        """Post `hop`, with rows that arrive for `gradients`: straight into place if they are one run, else packed."""
        packed = []
        if transfer is not None:
            for gradient in gradients:
                if in_place and len(transfer.runs) == 1:
                    start, stop = transfer.runs[0]
                    rows = gradient.rows()[start:stop]
                else:
                    rows = gradient.buffer(transfer.rows)
                    packed.append((rows, gradient, transfer.runs))
                hop.receives.append((transfer.peer, rows))
        return _Incoming(hop.post(self._share.group, self._meter), packed)


def _pieces(kernel: Kernel, tiles: Sequence[Tile], device: torch.device) -> Iterator[Tile]:
    for tile in tiles:
        yield from kernel.split(tile, device)


def _count(meter: Call, tile: Tile) -> None:
    meter.kernel_calls += 1
    meter.pairs += algebra.tile_area(tile)


def _queries(x: Tensor, tile: Tile) -> Tensor:
    return x[:, :, tile.q0 : tile.q1]


def _keys(x: Tensor, tile: Tile) -> Tensor:
    return x[:, :, tile.k0 : tile.k1]


def _dense_rows(x: Tensor) -> Tensor:
    """`x` with neighbouring elements in its last dim, which flash kernels take for granted without looking."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _buffers(rows: int, like: Rows) -> Rows:
    keys, values = (x.new_empty(*x.shape[:2], rows, x.shape[3]) for x in like)
    return keys, values


def _messages(x: Tensor, transfer: Transfer) -> list[Tensor]:
    """Rows of `x (B, K, R, D)` as contiguous messages: all of them or, head by head, a run of them without a copy; else packed.

    For a transfer that arrives, the same messages as places to fill.
    """
    if transfer.by_head:
        start, stop = transfer.runs[0]
        return [head[start:stop] for head in x.flatten(0, 1)]
    return [_pick(x, transfer.runs, dim=2)]


def _pick(x: Tensor, runs: Runs, dim: int) -> Tensor:
    """The rows of `runs`, contiguous: as they are if they are one contiguous run, else packed."""
    parts = [x.narrow(dim, start, stop - start) for start, stop in runs]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim)
