"""Compare the bytes that cross the link between two nodes, by the link's counters, with those of the plan.

    python -m benchmarks.wire [--routes ring,exchange] [--json out.json]

Needs root, `ip` and `tc` (benchmarks/nodes.py). Measures every route, layout and mask at P=2, forward and backward, per
direction of the link. `payload` is the counted bytes without packet headers, including overhead of gloo and longspan. It must
be at least the plan's bytes and at most 3% more. fp32. Out and gradients are checked against plain SDPA first.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch.distributed as dist

from benchmarks.answers import HEAD_DIM, check, inputs, right
from benchmarks.harness import save
from benchmarks.nodes import HEADER_BYTES, Link, Nodes, two_nodes
from longspan import Layout, Mask, attention, names, plan_attention, shard
from longspan.errors import SpecError
from longspan.names import ROUTES
from longspan.plan import Phase, Plan

HEADS = (4, 2)
EXCESS = 1.03
SLACK = 4096
"""Bytes allowed per phase in addition to `EXCESS`: for the barriers around the phase, and gloo's header of each message."""
PHASES: tuple[Phase, ...] = ("forward", "backward")
LAYOUTS = tuple(name for name in names.LAYOUTS if name != names.BALANCED)
MASKS: dict[str, Callable[[int], Mask]] = {
    "causal": Mask.causal,
    "window": lambda S: Mask.causal(S, window=S // 16),
    "documents": lambda S: Mask.documents([S * 9 // 20, S * 3 // 10, S - S * 9 // 20 - S * 3 // 10]),
    "full": Mask.full,
}
NO_ROUTES = ("auto", "upipe")
"""Route names that `attention` does not run: "auto" selects a route, "upipe" needs a module with the projections."""


@dataclass(frozen=True)
class Case:
    route: str
    layout: str
    mask: str
    seq_len: int

    def plan(self) -> Plan:
        mask = MASKS[self.mask](self.seq_len)
        return plan_attention(Layout.named(self.layout, self.seq_len, 2), mask, route=self.route, heads=HEADS)


@dataclass(frozen=True)
class Crossing:
    """Bytes and packets that one rank sent to the other in one phase."""

    case: Case
    phase: Phase
    rank: int
    planned: int
    on_link: int
    packets: int

    @property
    def payload(self) -> int:
        return self.on_link - self.packets * HEADER_BYTES

    @property
    def holds(self) -> bool:
        return self.planned <= self.payload <= EXCESS * self.planned + SLACK


@click.command(help=__doc__)
@click.option("--routes", default="", help="Routes, separated by commas. Default: all.")
@click.option("--seq-len", default=4096, show_default=True)
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(routes: str, seq_len: int, output: Path | None) -> None:
    chosen = routes.split(",") if routes else [route for route in ROUTES if route not in NO_ROUTES]
    cases, refused = _possible([Case(*names, seq_len) for names in _product(chosen)])
    with two_nodes() as nodes:
        crossings = survey(nodes, cases)
    click.echo(f"B1 H{HEADS[0]}/{HEADS[1]} S{seq_len} D{HEAD_DIM} float32, P=2; bytes each way: rank 0 -> 1 and 1 -> 0")
    click.echo(f"{'':47} {'planned':>21} {'payload / planned':>17} {'with headers':>17} {'packets':>11}")
    for crossing in zip(crossings[::2], crossings[1::2], strict=True):
        click.echo(_line(*crossing))
    for case, reason in refused:
        click.echo(f"{case.route} {case.layout} {case.mask}: refused by the plan, {reason}")
    outside = [crossing for crossing in crossings if not crossing.holds]
    within = len(crossings) - len(outside)
    click.echo(f"{within} of {len(crossings)} within {EXCESS - 1:.0%} and {SLACK} bytes of the plan")
    save(output, [{**vars(crossing), "case": vars(crossing.case), "holds": crossing.holds} for crossing in crossings])
    if outside or not crossings:
        raise SystemExit(1)


def survey(nodes: Nodes, cases: Sequence[Case]) -> list[Crossing]:
    """Return the crossings of rank 0 and rank 1 for each case and phase."""
    by_rank = nodes.run("benchmarks.wire:measure", cases=[vars(case) for case in cases])
    return [
        Crossing(case, phase, rank, case.plan().bytes(rank, phase, HEAD_DIM, 4), *by_rank[rank][2 * n + offset])
        for n, case in enumerate(cases)
        for offset, phase in enumerate(PHASES)
        for rank in (0, 1)
    ]


def measure(link: Link, cases: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Return the bytes and packets sent by this rank: forward, then backward, of each case."""
    found = []
    for case in (Case(**values) for values in cases):
        plan, rank = case.plan(), dist.get_rank()
        *own, dout = (shard(x, plan.layout, rank, 2) for x in inputs(case.seq_len, HEADS))
        leaves = [x.detach().requires_grad_() for x in own]
        # The first call also compares the ranks' plans, which must not be counted.
        out = attention(*leaves, plan=plan, group=dist.group.WORLD)
        out.backward(dout)
        check(str(case), [out.detach(), *(x.grad for x in leaves)], right(plan.mask, HEADS), plan.layout, rank)
        before = _settled(link)
        out = attention(*leaves, plan=plan, group=dist.group.WORLD)
        between = _settled(link)
        out.backward(dout)
        after = _settled(link)
        found += [_less(between, before), _less(after, between)]
    return found


def _settled(link: Link) -> tuple[int, int]:
    """Read the counters after all bytes sent and late acknowledgements have arrived, and before any other bytes are sent."""
    dist.barrier()
    time.sleep(0.05)
    sent = link.sent()
    dist.barrier()
    return sent


def _less(after: tuple[int, int], before: tuple[int, int]) -> tuple[int, int]:
    return after[0] - before[0], after[1] - before[1]


def _product(routes: Sequence[str]) -> list[tuple[str, str, str]]:
    return [(route, layout, mask) for route in routes for layout in LAYOUTS for mask in MASKS]


def _possible(cases: Sequence[Case]) -> tuple[list[Case], list[tuple[Case, str]]]:
    """Split cases into (cases that can be planned, refused cases with the reason)."""
    possible, refused = [], []
    for case in cases:
        try:
            case.plan()
            possible.append(case)
        except SpecError as error:
            refused.append((case, error.message))
    return possible, refused


def _line(*ways: Crossing) -> str:
    case = ways[0].case
    planned = " ".join(f"{way.planned:>10,}" for way in ways)
    payload, with_headers = (
        " ".join(f"{_part(getattr(way, name), way.planned):>8}" for way in ways) for name in ("payload", "on_link")
    )
    packets = " ".join(f"{way.packets:>5}" for way in ways)
    name = f"{case.route:16} {case.layout:10} {case.mask:9} {ways[0].phase:9}"
    return f"{name} {planned} {payload} {with_headers} {packets}" + ("" if all(x.holds for x in ways) else "  OUTSIDE")


def _part(count: int, planned: int) -> str:
    """Format `count` / the plan's bytes. For small plans, where `SLACK` is the limit, format the difference in bytes."""
    return f"{count / planned:.4f}" if planned > SLACK / (EXCESS - 1) else f"+{count - planned} B"


if __name__ == "__main__":
    main()
