"""Choice of the route and inner degree whose slowest rank has the least estimated time.

    time = sum over stages of max(time of the stage's tiles, time of the hop sent meanwhile) + time of head exchanges

Tiles, messages and bytes are those of the plan; `Costs` gives the time of each.
"""

from collections.abc import Iterator

import numpy as np

from longspan.advise.costs import BACKWARD, Costs
from longspan.names import ROUTES
from longspan.plan import Layout, Mask, RankPlan, Step, Transfer
from longspan.plan import bands as algebra
from longspan.plan.comm_dtype import row_bytes
from longspan.plan.head_shares import HeadShare
from longspan.plan.routes import Work, degrees_of


def choose_route(
    layout: Layout,
    mask: Mask,
    heads: tuple[int, int] | None,
    tp: int,
    ranks_per_node: int | None,
    costs: Costs,
    comm_dtype: str | None = None,
) -> tuple[str, int | None, str]:
    """Return (route, inner degree, reason in one line). All ranks choose alike, because only the arguments are read.

    Only routes marked as `candidate` are tried.
    """
    best: dict[str, tuple[float, str, int | None]] = {}
    for name, inner in _candidates(layout.ranks, heads):
        degrees = degrees_of(name, layout.ranks, heads, inner, tp)
        work = Work.of(name, layout, mask, heads, degrees)
        seconds = _seconds(work, heads or (1, 1), ranks_per_node, costs, comm_dtype)
        if name not in best or seconds < best[name][0]:
            best[name] = seconds, name, inner
    # Candidates are listed from simple to complex: take the first within 2% of the least time.
    ranked = sorted(best.values(), key=lambda entry: entry[0])
    seconds, name, inner = next(entry for entry in best.values() if entry[0] <= 1.02 * ranked[0][0])
    others = ", ".join(f"{other} {_milliseconds(took)}" for took, other, _ in ranked if other != name)
    level = "" if inner is None else f" (inner {inner})"
    reason = f"{name}{level}: about {_milliseconds(seconds)} ms a layer, forward and backward"
    return name, inner, f"{reason}{f'; {others}' if others else ''} ({costs.source})"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f}" if seconds >= 1 else f"{seconds * 1e3:.3g}"


def _candidates(ranks: int, heads: tuple[int, int] | None) -> Iterator[tuple[str, int | None]]:
    """List the candidate routes, each with every inner degree that `ranks` and `heads` allow."""
    for name, route in ROUTES.items():
        if not route.candidate:
            continue
        if route.heads == "none":
            yield name, None
        elif heads is None or ranks == 1:
            continue
        elif route.heads == "all":
            if heads[0] % ranks == 0:
                yield name, None
        else:
            for inner in range(2, ranks):
                degree = inner if route.heads == "inner" else ranks // inner
                if ranks % inner == 0 and heads[0] % degree == 0:
                    yield name, inner


def _seconds(
    work: Work, heads: tuple[int, int], ranks_per_node: int | None, costs: Costs, comm_dtype: str | None
) -> float:
    """Estimate the seconds of the slowest rank among three: the first, the middle and the last."""
    ranks = work.layout.ranks
    row = 2 * row_bytes(comm_dtype, costs.head_dim, costs.itemsize)
    some = {0, ranks // 2, ranks - 1}
    return max(_rank_seconds(work.rank_plan(rank), heads, ranks_per_node, costs, row) for rank in some)


def _rank_seconds(share: RankPlan, heads: tuple[int, int], ranks_per_node: int | None, costs: Costs, row: int) -> float:
    """Estimate the seconds of one rank. `row` is the bytes in flight of one token's key and value for one KV head."""
    num_q, num_kv = (share.heads.num_query, share.heads.num_kv) if share.heads else heads

    def hop(transfers: tuple[Transfer, ...], weight: int) -> float:
        peers = [share.ranks[t.peer] for t in transfers]
        speeds = [_bandwidth(share.rank, peer, ranks_per_node, costs.message_bandwidth, costs) for peer in peers]
        moved = sum(t.rows * num_kv * weight / speed for t, speed in zip(transfers, speeds, strict=True))
        return moved + costs.message_latency * len(transfers)

    total = 0.0
    for stage in share.stages:
        compute = sum(_compute(step, num_q, costs) for step in stage.steps)
        gradients = tuple(t for step in stage.steps for t in (step.grad_send, step.home_send) if t)
        sent = hop(stage.sends, row)
        returned = hop(gradients, 2 * costs.head_dim * max(costs.itemsize, 4))
        total += max(compute, sent) + max(BACKWARD * compute, sent + returned)
    return total if share.heads is None else total + _exchange_seconds(share, share.heads, ranks_per_node, costs, row)


def _compute(step: Step, num_q: int, costs: Costs) -> float:
    if not step.tiles:
        return 0.0
    tiles = np.array(step.tiles, dtype=np.int64)
    sides = np.sqrt((tiles[:, 1] - tiles[:, 0]) * (tiles[:, 3] - tiles[:, 2])).tolist()
    areas = algebra.area(tiles).tolist()
    work = sum(area / costs.speed(side) for area, side in zip(areas, sides, strict=True))
    return 4.0 * costs.head_dim * num_q * work + costs.tile_overhead * len(sides)


def _exchange_seconds(share: RankPlan, heads: HeadShare, ranks_per_node: int | None, costs: Costs, row: int) -> float:
    """Estimate the seconds of the exchange of heads, forward (q, k, v, out) and backward (dout, dq, dk, dv)."""
    size = costs.head_dim * costs.itemsize
    there = heads.bytes_there(size, row) + heads.bytes_there(size, 0)
    sent = there + heads.bytes_back(size, 0) + heads.bytes_back(size, 2 * size)
    within = costs.all_to_all_bandwidth
    slowest = min(_bandwidth(share.rank, peer, ranks_per_node, within, costs) for peer in heads.members)
    return sent / slowest + 4 * costs.all_to_all_latency


def _bandwidth(rank: int, peer: int, ranks_per_node: int | None, within: float, costs: Costs) -> float:
    crosses = ranks_per_node is not None and rank // ranks_per_node != peer // ranks_per_node
    return min(within, costs.node_bandwidth) if crosses else within
