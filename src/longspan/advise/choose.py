"""`route="auto"`: the route, and the inner degree, whose busiest rank is done first by a simple model of time.

    time = own tiles beside the first hop + tiles of the next stage beside its hop + ... + exchanges of heads, beside nothing

Bytes, messages and tiles are the plan's own. What they cost is in `Costs`: typical figures of one GPU generation, or what
`longspan bench calibrate` measured between the ranks at hand.
"""

import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np

from longspan.errors import SpecError
from longspan.plan import bands as algebra
from longspan.plan.comm_dtype import row_bytes
from longspan.plan.head_shares import HeadShare
from longspan.plan.layout import BALANCED, Layout
from longspan.plan.mask import Mask
from longspan.plan.routes import Work, degrees_of
from longspan.plan.steps import RankPlan, Step, Transfer

_BACKWARD = 2.5
"""Kernel time of backward over that of forward (five matrix products instead of two)."""


@dataclass(frozen=True)
class Costs:
    """What work and traffic cost here. Bandwidths in bytes per second and rank, latencies in seconds.

    The figures given here stand for one H100 in bf16 within NVLink, 50 GB/s to other nodes: orders of magnitude, to rank
    routes with, and no measurement of ours.
    """

    head_dim: int = 128
    itemsize: int = 2
    message_bandwidth: float = 150e9
    message_latency: float = 20e-6
    all_to_all_bandwidth: float = 150e9
    all_to_all_latency: float = 30e-6
    node_bandwidth: float = 50e9
    """Of anything that crosses nodes."""
    tile_speed: tuple[tuple[int, float], ...] = ((128, 4e13), (1024, 2.5e14), (8192, 4.5e14))
    """FLOP/s of forward on a square tile of so many rows, ascending."""
    tile_overhead: float = 10e-6
    """Seconds a kernel call takes beside its work, merging included."""
    source: str = "typical figures of one H100 node"

    def __post_init__(self) -> None:
        numbers = {name: value for name, value in vars(self).items() if name not in ("tile_speed", "source")}
        for rows, speed in self.tile_speed:
            numbers |= {"tile_speed rows": rows, f"tile_speed at {rows} rows": speed}
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise SpecError(
                    f"{name}={value!r} is not a positive number", hint="measure with longspan bench calibrate"
                )
        if not self.tile_speed:
            raise SpecError("tile_speed is empty", hint="measure with longspan bench calibrate")

    @classmethod
    def load(cls, path: Path) -> "Costs":
        """What `longspan bench calibrate` wrote. Raises `SpecError` if the file is not such a record."""
        hint = "longspan bench calibrate writes one"
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise SpecError(f"cannot read {path}: {error.strerror}", hint=hint) from None
        except ValueError as error:
            raise SpecError(f"{path} holds no measured costs: {error}", hint=hint) from None
        names = {field.name for field in fields(cls)}
        found = values.keys() if isinstance(values, dict) else set()
        if odd := sorted(names ^ found):
            missing, unknown = [n for n in odd if n in names], [n for n in odd if n not in names]
            parts = [
                f"{word} {', '.join(which)}"
                for word, which in (("without", missing), ("with unknown", unknown))
                if which
            ]
            raise SpecError(f"{path} holds no measured costs: a record {', '.join(parts)}", hint=hint)
        speeds = values["tile_speed"]
        if not isinstance(speeds, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in speeds):
            raise SpecError(f"{path} holds no measured costs: tile_speed is not a list of [rows, FLOP/s]", hint=hint)
        try:
            return cls(**{**values, "tile_speed": tuple((rows, speed) for rows, speed in speeds)})
        except SpecError as error:
            raise SpecError(f"{path} holds no measured costs: {error.message}", hint=hint) from None

    def save(self, path: Path) -> None:
        """Write the record as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    def speed(self, rows: float) -> float:
        """FLOP/s on a tile of so many rows: between two sizes in proportion, beyond the ends as there."""
        sizes = [size for size, _ in self.tile_speed]
        at = bisect_left(sizes, rows)
        if at == 0 or at == len(sizes):
            return self.tile_speed[min(at, len(sizes) - 1)][1]
        (small, slow), (large, fast) = self.tile_speed[at - 1 : at + 1]
        return slow + (fast - slow) * (rows - small) / (large - small)

    def whole_below(self, num_q: int) -> int:
        """Documents of fewer tokens stay whole: cutting one in two costs more time than its tokens take.

        A cut costs three messages (keys and values there, again in backward, gradients home) and a tile more, forward and
        backward. `n` tokens take a layer `72 (num_q D)^2 n` FLOPs in its other matrices (12 width^2 parameters, as in Llama)
        and `3.5 * 4 num_q D n^2 / 2` in attention, forward and backward; for `num_q` query heads of `head_dim` D.
        """
        width, cut = num_q * self.head_dim, 3 * self.message_latency + 2 * self.tile_overhead
        fastest = self.tile_speed[-1][1]

        def seconds(n: int) -> float:
            return 72.0 * width**2 * n / fastest + (1 + _BACKWARD) * 2.0 * width * n**2 / self.speed(n)

        return bisect_right(range(1 << 20), cut, key=seconds)


def reckon(
    measured: Path | None, layout: str, heads: tuple[int, int] | None, head_dim: int, itemsize: int
) -> tuple[Costs, int]:
    """Costs to choose by, measured or typical, for tensors of this kind, whatever those were measured on; and below how many
    tokens the layout "balanced" keeps documents whole, which measured costs alone say."""
    costs = replace(Costs() if measured is None else Costs.load(measured), head_dim=head_dim, itemsize=itemsize)
    keeps = layout == BALANCED and measured is not None and heads is not None
    return costs, costs.whole_below(heads[0]) if keeps and heads else 0


def choose_route(
    layout: Layout,
    mask: Mask,
    heads: tuple[int, int] | None,
    tp: int,
    ranks_per_node: int | None,
    costs: Costs,
    wire_dtype: str | None = None,
) -> tuple[str, int | None, str]:
    """Route, inner degree and the reason in one line. The same on all ranks: nothing but the arguments decides.

    Routes that gather everything or replace messages by collectives move no less than `exchange` and `ring`, and are not
    tried.
    """
    best: dict[str, tuple[float, str, int | None]] = {}
    for name, inner in _candidates(layout.ranks, heads):
        degrees = degrees_of(name, layout.ranks, heads, inner, tp)
        work = Work.of(name, layout, mask, heads, degrees)
        seconds = _seconds(work, heads or (1, 1), ranks_per_node, costs, wire_dtype)
        if name not in best or seconds < best[name][0]:
            best[name] = seconds, name, inner
    # The least time by a margin: of nearly equal ones the simplest, which comes first.
    ranked = sorted(best.values(), key=lambda entry: entry[0])
    seconds, name, inner = next(entry for entry in best.values() if entry[0] <= 1.02 * ranked[0][0])
    others = ", ".join(f"{other} {_milliseconds(took)}" for took, other, _ in ranked if other != name)
    level = "" if inner is None else f" (inner {inner})"
    reason = f"{name}{level}: about {_milliseconds(seconds)} ms a layer, forward and backward"
    return name, inner, f"{reason}{f'; {others}' if others else ''} ({costs.source})"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f}" if seconds >= 1 else f"{seconds * 1e3:.3g}"


def _candidates(ranks: int, heads: tuple[int, int] | None) -> Iterator[tuple[str, int | None]]:
    yield "ring", None
    yield "exchange", None
    if heads is None or ranks == 1:
        return
    if heads[0] % ranks == 0:
        yield "ulysses", None
    for inner in range(2, ranks):
        if ranks % inner == 0 and heads[0] % inner == 0:
            yield "usp", inner
            yield "exchange-ulysses", inner
        if ranks % inner == 0 and heads[0] % (ranks // inner) == 0:
            yield "ulysses-ring", inner


def _seconds(
    work: Work, heads: tuple[int, int], ranks_per_node: int | None, costs: Costs, wire_dtype: str | None
) -> float:
    """Of the slowest of a few ranks: the first, the middle, the last."""
    ranks = work.layout.ranks
    row = 2 * row_bytes(wire_dtype, costs.head_dim, costs.itemsize)
    some = {0, ranks // 2, ranks - 1}
    return max(_rank_seconds(work.rank_plan(rank), heads, ranks_per_node, costs, row) for rank in some)


def _rank_seconds(share: RankPlan, heads: tuple[int, int], ranks_per_node: int | None, costs: Costs, row: int) -> float:
    """`row` is the bytes of one KV head's keys and values of a token on the wire."""
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
        total += max(compute, sent) + max(_BACKWARD * compute, sent + returned)
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
    """q, k, v there and out back, then d out there and dq, dk, dv back."""
    size = costs.head_dim * costs.itemsize
    there = heads.bytes_there(size, row) + heads.bytes_there(size, 0)
    sent = there + heads.bytes_back(size, 0) + heads.bytes_back(size, 2 * size)
    within = costs.all_to_all_bandwidth
    slowest = min(_bandwidth(share.rank, peer, ranks_per_node, within, costs) for peer in heads.members)
    return sent / slowest + 4 * costs.all_to_all_latency


def _bandwidth(rank: int, peer: int, ranks_per_node: int | None, within: float, costs: Costs) -> float:
    crosses = ranks_per_node is not None and rank // ranks_per_node != peer // ranks_per_node
    return min(within, costs.node_bandwidth) if crosses else within
