"""Run one rank's share of any plan, forward and backward. Tiles are computed while the next stage's rows are in flight.

    B batch, H query heads, K KV heads, T slots of this rank, D head dim

    local shards -> (head exchange: all rows of some heads) -> stages of rows -> tiles -> sums -> (back) -> local shards

Partial results are merged in the plan's order, in at least fp32.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from longspan.comm.traffic import Call, call
from longspan.comm.upload import upload
from longspan.cp.engine.head_exchange import GroupedKernel, HeadExchange
from longspan.cp.engine.merge import sink_gradient
from longspan.cp.engine.row_transport import Group, KVGradient, Lane, ReturningGradients, Rows, arriving_rows
from longspan.cp.engine.sums import Gradient, Output
from longspan.kernels.choice import choose_kernel
from longspan.kernels.masked import are_regular
from longspan.kernels.protocol import BackwardInputs, Kernel, Launch, launches
from longspan.kernels.scores import ScoreChange
from longspan.names import ROUTES
from longspan.plan import HeadShare, Layout, Plan, RankPlan, Stage, Step

Tensor = torch.Tensor


@dataclass(frozen=True)
class Share:
    """One rank's part of a plan, with its group and kernel. Holds no reference to the plan, which may be freed."""

    work: RankPlan
    route: str
    seq_len: int
    heads: tuple[int, int] | None
    comm_dtype: str | None
    row_layout: Layout
    digest: bytes
    group: Group
    kernel: str
    name: str = ""
    """Name of the mask in its sequence, the same in every batch."""
    kept: dict[object, Any] = field(default_factory=dict, compare=False, repr=False)
    """Cache of launches, kernels and token positions, for all layers and batches that run this plan."""

    @property
    def whole_heads(self) -> HeadShare:
        """This rank's part in the head exchange, for routes that have one."""
        assert self.work.heads is not None, "the route exchanges heads"
        return self.work.heads

    def launches(self, kernel: Kernel, step: Step, q: Tensor, backward: bool = False) -> list[Launch]:
        """Kernel calls that compute a step's tiles. Cached."""
        key = (id(step), kernel.name, q.device, q.dtype, q.shape[0] == 1, backward)
        if key not in self.kept:
            self.kept[key] = launches(kernel, step.tiles, q, backward)
        made: list[Launch] = self.kept[key]
        return made

    @property
    def staged(self) -> bool:
        """Whether attention projects and computes a few heads at a time: route "upipe"."""
        return ROUTES[self.route].staged

    def kernel_for(self, q: Tensor, k: Tensor, v: Tensor, change: ScoreChange | None = None) -> Kernel:
        """Kernel for these tensors. Cached."""
        changed = None if change is None else (change.softcap is None, change.slopes is None)
        deterministic = torch.are_deterministic_algorithms_enabled()
        key = ("kernel", q.device, q.dtype, k.shape[3], v.shape[3], changed, deterministic)
        if key not in self.kept:
            self.kept[key] = choose_kernel(
                self.kernel, q, k, v, change, regular=q.device.type == "cuda" and self.regular
            )
        kernel: Kernel = self.kept[key]
        return kernel

    @property
    def regular(self) -> bool:
        """Whether cuDNN can compute all tiles unsplit, at most two per step, in shapes that recur in every batch."""
        if "regular" not in self.kept:
            steps = [step.tiles for stage in self.work.stages for step in stage.steps]
            self.kept["regular"] = all(len(tiles) <= 2 and are_regular(tiles) for tiles in steps)
        return bool(self.kept["regular"])

    def at(self, change: ScoreChange | None, step: Step, launch: Launch, device: torch.device) -> ScoreChange | None:
        """Return the change to the scores of one call, with its rows' and keys' places on the token axis."""
        if change is None or change.slopes is None:
            return change
        own: Step = self.work.stages[0].steps[0]
        rows, keys = self._places(own, device), self._places(step, device)
        return replace(change, rows=rows[launch.q0 : launch.q1], keys=keys[launch.k0 : launch.k1])

    def _places(self, step: Step, device: torch.device) -> Tensor:
        key = ("places", id(step), device)
        if key not in self.kept:
            slots = self.row_layout.positions(step.source)
            self.kept[key] = upload(torch.from_numpy(np.concatenate([slots[a:b] for a, b in step.held])), device)
        places: Tensor = self.kept[key]
        return places

    @classmethod
    def of(cls, plan: Plan, rank: int, group: Group, kernel: str, name: str = "") -> "Share":
        return cls(
            plan.rank_plan(rank),
            plan.route,
            plan.seq_len,
            plan.heads,
            plan.comm_dtype,
            plan.row_layout,
            plan.digest,
            group,
            kernel,
            name,
        )


def run_forward(
    share: Share,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    scale: float,
    change: ScoreChange | None = None,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Local shards `(B, H, T, D), (B, K, T, D), (B, K, T, Dv)` -> (out, lse, exchanged).

    out `(B, H, T, Dv)` is in q's dtype; lse is that of the rows computed here. If heads are exchanged, `exchanged` is the
    exchanged q, k, v and out that backward takes.
    """
    q, k, v = map(_dense_rows, (q, k, v))
    kernel = share.kernel_for(q, k, v, change)
    with call("forward", share.route, kernel.name, share.work.rank, q.device) as meter:
        exchange = HeadExchange.of(share.work, share.group, meter)
        if exchange is None:
            out, lse = attend_rows(share, kernel, (q, k, v), sink, scale, meter, change)
            return out, lse, []
        kernel = GroupedKernel.of(kernel, exchange.share)
        together = exchange.gather(q, k, v, share.comm_dtype)
        out, lse = attend_rows(
            share, kernel, together, exchange.own_heads(sink), scale, meter, exchange.own_change(change)
        )
        (local_out,) = exchange.back([out], [], q.dtype)
        return local_out, lse, [*together, out]


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
    change: ScoreChange | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv, dsink) of the local shards. dsink `(H,)` covers the rows and heads computed here (`(0,)` without a
    sink). If heads are exchanged, pass the exchanged q, k, v and out that forward returned."""
    dout, q, k, v = map(_dense_rows, (dout, q, k, v))
    kernel = share.kernel_for(q, k, v, change)
    with call("backward", share.route, kernel.name, share.work.rank, q.device) as meter:
        exchange = HeadExchange.of(share.work, share.group, meter)
        if exchange is None:
            return differentiate_rows(share, kernel, dout, (q, k, v), out, lse, sink, scale, meter, change)
        kernel = GroupedKernel.of(kernel, exchange.share)
        (dout,) = exchange.there([dout])
        own_sink, partial = exchange.own_heads(sink), exchange.share.replicates
        dq, dk, dv, dsink = differentiate_rows(
            share, kernel, dout, (q, k, v), out, lse, own_sink, scale, meter, exchange.own_change(change), partial
        )
        del dout
        dq, dk, dv = exchange.back([dq], [dk, dv], q.dtype)
        return dq, dk, dv, dsink if sink is None else exchange.all_heads(dsink)


def attend_rows(
    share: Share,
    kernel: Kernel,
    qkv: tuple[Tensor, Tensor, Tensor],
    sink: Tensor | None,
    scale: float,
    meter: Call,
    change: ScoreChange | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of the given queries over this rank's own rows and the rows that arrive."""
    q, k, v = qkv
    lane = Lane.on(q.device)
    result = Output(q, v, lane.home)

    def compute(step: Step, rows: Rows) -> None:
        meter.blocks_computed += step.blocks
        for launch in share.launches(kernel, step, q):
            with meter.spend("kernels"):
                out, lse = kernel.forward(
                    _queries(q, launch), _keys(rows[0], launch), _keys(rows[1], launch), launch.shapes, scale,
                    share.at(change, step, launch, q.device),
                )  # fmt: skip
            _count(meter, launch)
            with lane.after(out, lse, *result.tensors), meter.spend("merging"):
                result.add(launch.q0, launch.q1, out, lse)
            del out, lse

    for _, _, steps in arriving_rows(share.work, (k, v), share.comm_dtype, share.group, meter):
        while steps:  # pop: frees rows after use, before the rows of the stage after the next arrive
            compute(*steps.pop(0))
    lane.join()
    return result.finish(sink)


def differentiate_rows(
    share: Share,
    kernel: Kernel,
    dout: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
    sink: Tensor | None,
    scale: float,
    meter: Call,
    change: ScoreChange | None = None,
    partial: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv, dsink) for the given q, k, v. `partial` keeps dk and dv in the accumulation dtype, as terms of a
    further sum.

    The own shard is computed last, while partial gradients of its keys return from other ranks.
    """
    q, k, v = qkv
    work, lane = share.work, Lane.on(q.device)
    dq, returning = Gradient(q, q.shape[2], lane.home), ReturningGradients(work, (k, v), share.group, meter, lane)

    def compute(step: Step, rows: Rows, gradients: KVGradient, arrived: Callable[[], None]) -> None:
        meter.blocks_computed += step.blocks
        for launch in share.launches(kernel, step, q, backward=True):
            with meter.spend("kernels"):
                saved = BackwardInputs(
                    _queries(dout, launch), _queries(q, launch), _keys(rows[0], launch), _keys(rows[1], launch),
                    _queries(out, launch), _queries(lse, launch),
                )  # fmt: skip
                dq_tile, dk_tile, dv_tile = kernel.backward(
                    saved, launch.shapes, scale, share.at(change, step, launch, q.device)
                )
                del saved
            _count(meter, launch)
            with lane.after(dq_tile, dk_tile, dv_tile):
                arrived()  # the partial gradients to add to were in flight during the kernel
                with meter.spend("merging"):
                    dq.add(launch.q0, launch.q1, dq_tile)
                    gradients[0].add(launch.k0, launch.k1, dk_tile)
                    gradients[1].add(launch.k0, launch.k1, dv_tile)
            del dq_tile, dk_tile, dv_tile

    own: Stage = work.stages[0]
    for stage, following, steps in arriving_rows(work, (k, v), share.comm_dtype, share.group, meter):
        if stage is own:
            with lane.after():
                returning.expect(following)
            continue
        for index in range(len(steps)):  # by index, because a loop variable would keep sent gradients alive
            compute(*steps.pop(0), returning.here[index], returning.arrive)
        with lane.after():
            returning.arrive()
            returning.hand_over(stage, following)
    compute(own.steps[0], (k, v), returning.home, lambda: None)
    with lane.after():
        returning.bring_home()
    lane.join()
    if sink is None:
        dsink = q.new_empty(0)
    else:
        live = slice(0, work.live_rows)
        dsink = sink_gradient(dout[:, :, live], out[:, :, live], lse[:, :, live], sink)
    dk, dv = (gradient.finish(partial) for gradient in returning.home)
    return dq.finish(), dk, dv, dsink


def _count(meter: Call, launch: Launch) -> None:
    meter.kernel_calls += 1
    meter.pairs_computed += launch.pairs


def _queries(x: Tensor, launch: Launch) -> Tensor:
    return x[:, :, launch.q0 : launch.q1]


def _keys(x: Tensor, launch: Launch) -> Tensor:
    return x[:, :, launch.k0 : launch.k1]


def _dense_rows(x: Tensor) -> Tensor:
    """Return `x` with stride 1 in its last dim, which flash kernels assume without a check."""
    return x if x.stride(-1) == 1 else x.contiguous()
