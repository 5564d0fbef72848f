"""Measure how much of a hop is hidden by compute: attention at P=2 over a slow link against an unlimited link.

    python -m benchmarks.overlap [--routes ring,rotate,exchange] [--repeats 9] [--json out.json] [--plot out.png]

Needs root, `ip` and `tc` (benchmarks/nodes.py), and two idle cores. The link rate is set so that one KV hop, the bytes that
the busier rank sends in forward, takes 0.6 of the compute time of one of forward's two steps. A plain transfer of the same
bytes checks the rate. Repeats time both links in alternating order. Also reported: the time without overlap, when ranks first
wait for the bytes and then compute. fp32, zigzag, causal. Outputs and gradients are checked first.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist

from benchmarks.answers import HEAD_DIM, check, inputs, right
from benchmarks.harness import FOREIGN_LIMIT, Spread, Usage, foreign_share, save
from benchmarks.nodes import Link, NodesError, transfer, two_nodes
from longspan import Layout, Mask, attention, plan_attention, record, shard
from longspan.names import ROUTES

HOP_SHARE = 0.6
"""Time of the hop / compute time of a step."""
SHARE_ERROR = 0.05
"""No verdict is given if the measured share differs from `HOP_SHARE` by more than this, relatively."""
STEPS = 2
LIMITS = {"forward": 1.08, "forward + backward": 1.15}
"""Maximum of time on the slow link / time on the unlimited link."""
HEADS = (8, 8)


@click.command(help=__doc__)
@click.option("--routes", default="ring,rotate,exchange", show_default=True)
@click.option("--repeats", default=9, show_default=True, help="Repeats to keep per route.")
@click.option("--most", default=25, show_default=True, help="Repeats to try at most.")
@click.option(
    "--foreign",
    default=FOREIGN_LIMIT,
    show_default=True,
    help="Drop repeats in which other programs used a larger share of the cores.",
)
@click.option("--seq-len", default=8192, show_default=True)
@click.option("--json", "output", type=click.Path(path_type=Path))
@click.option("--plot", type=click.Path(path_type=Path))
def main(
    routes: str, repeats: int, most: int, foreign: float, seq_len: int, output: Path | None, plot: Path | None
) -> None:
    results = []
    with two_nodes() as nodes:
        for route in routes.split(","):
            if route not in ROUTES:
                click.echo(f"{route}: skipped, no such route; there are {', '.join(ROUTES)}", err=True)
                continue
            arguments = {"route": route, "seq_len": seq_len, "repeats": repeats, "most": most, "foreign": foreign}
            seen = nodes.run("benchmarks.overlap:measure", **arguments)[0]
            if not seen["kept"]:
                busy = f"other programs used more than {foreign:.0%} of the cores in each of {most} repeats"
                raise NodesError(
                    f"{route}: {busy}\n\nhint: stop these programs, or set --foreign 1 to keep such repeats"
                )
            results.append(summarise(**seen))
            click.echo(_table(results[-1]))
    save(output, results)
    if plot is not None:
        draw(results, plot)
    if not results or not all(row["holds"] for result in results for row in result["phases"].values()):
        raise SystemExit(1)


@dataclass(frozen=True)
class Turn:
    """One call over one link, in seconds of the slower rank, as [forward, backward]."""

    seconds: list[float]
    waiting: list[float]
    alone: list[float]
    """Time to transfer the bytes of each phase on this link without compute."""
    tiles: float
    """Seconds in kernels per step of forward, mean over ranks."""


def measure(link: Link, route: str, seq_len: int, repeats: int, most: int, foreign: float) -> dict[str, Any]:
    """Measure one route. Returns the same record on both ranks."""
    rank = dist.get_rank()
    layout, mask = Layout.zigzag(seq_len, 2), Mask.causal(seq_len)
    plan = plan_attention(layout, mask, route=route, heads=HEADS)
    sizes = [[plan.bytes(r, phase, HEAD_DIM, 4) for r in (rank, 1 - rank)] for phase in ("forward", "backward")]
    run = _runner(plan, rank)
    check(route, run()[0], right(mask, HEADS), layout, rank)

    for _ in range(most):
        before, began = Usage.now(), time.perf_counter()
        rate = _calibrate(link, run, sizes)
        if foreign_share(before, time.perf_counter() - began) <= foreign:
            break
    kept: list[dict[str, Turn]] = []
    dropped = 0
    while len(kept) < repeats and len(kept) + dropped < most:
        before, began = Usage.now(), time.perf_counter()
        turns = {}
        for name in ("free", "slow") if (len(kept) + dropped) % 2 == 0 else ("slow", "free"):
            link.limit(rate if name == "slow" else None)
            turns[name] = _turn(run, sizes)
        link.limit(None)
        if foreign_share(before, time.perf_counter() - began) > foreign:
            dropped += 1
        else:
            kept.append(turns)
    return {
        "case": f"{route}: B1 H{HEADS[0]}/{HEADS[1]} S{seq_len} D{HEAD_DIM} zigzag causal float32, P=2",
        "bytes_forward": [plan.bytes(r, "forward", HEAD_DIM, 4) for r in (0, 1)],
        "bytes_backward": [plan.bytes(r, "backward", HEAD_DIM, 4) for r in (0, 1)],
        "bits_per_second": rate,
        "dropped": dropped,
        "kept": kept,
    }


def summarise(kept: list[dict[str, dict]], dropped: int, **rest: Any) -> dict[str, Any]:
    """Summarise the record of `measure`."""
    turns = [{name: Turn(**turn) for name, turn in pair.items()} for pair in kept]
    share = Spread.of([pair["slow"].alone[0] / pair["free"].tiles for pair in turns])
    as_set = abs(share.median / HOP_SHARE - 1) <= SHARE_ERROR
    return {
        **rest,
        "dropped": dropped,
        "tile_seconds": Spread.of([pair["free"].tiles for pair in turns]),
        "hop_share": share,
        "as_set": as_set,
        "phases": {name: _phase(turns, until, limit, as_set) for until, (name, limit) in enumerate(LIMITS.items(), 1)},
    }


def _phase(kept: list[dict[str, Turn]], until: int, limit: float, as_set: bool) -> dict[str, Any]:
    """Summarise forward (`until` 1), or forward and backward (2)."""
    free = [sum(turns["free"].seconds[:until]) for turns in kept]
    slow = [sum(turns["slow"].seconds[:until]) for turns in kept]
    alone = [sum(turns["slow"].alone[:until]) for turns in kept]
    ratio = Spread.of([b / a for a, b in zip(free, slow, strict=True)])
    return {
        "free_seconds": Spread.of(free),
        "slow_seconds": Spread.of(slow),
        "ratio": ratio,
        "limit": limit,
        "holds": as_set and ratio.median <= limit,
        "ratio_without_overlap": Spread.of([(a + hop) / a for a, hop in zip(free, alone, strict=True)]),
        "free_waiting": Spread.of([sum(turns["free"].waiting[:until]) for turns in kept]),
        "slow_waiting": Spread.of([sum(turns["slow"].waiting[:until]) for turns in kept]),
    }


def _runner(plan: Any, rank: int) -> Callable[[], tuple[list[torch.Tensor], list[float], list[Any]]]:
    """Return a call of forward and backward, which returns (out and gradients, seconds of each phase, recorded calls)."""
    *own, dout = (shard(x, plan.layout, rank, 2) for x in inputs(plan.seq_len, HEADS))

    def run() -> tuple[list[torch.Tensor], list[float], list[Any]]:
        leaves = [x.detach().requires_grad_() for x in own]
        with record() as calls:
            began = time.perf_counter()
            out = attention(*leaves, plan=plan, group=dist.group.WORLD)
            between = time.perf_counter()
            out.backward(dout)
            ended = time.perf_counter()
        return [out.detach(), *(x.grad for x in leaves)], [between - began, ended - between], calls

    return run


def _turn(run: Callable, sizes: list[list[int]]) -> Turn:
    """Time plain transfers and one call over the current link."""
    alone = [transfer(*size) for size in sizes]
    dist.barrier()
    _, seconds, calls = run()
    assert [call.bytes_sent for call in calls] == [send for send, _ in sizes], "the plan's bytes are not those sent"
    both: list[Any] = [None, None]
    dist.all_gather_object(both, (seconds, [call.seconds_waiting for call in calls], calls[0].seconds_kernels))
    ends = [max(sum(seconds[:until]) for seconds, _, _ in both) for until in (1, 2)]
    return Turn(
        seconds=[ends[0], ends[1] - ends[0]],
        waiting=[max(waiting[phase] for _, waiting, _ in both) for phase in (0, 1)],
        alone=alone,
        tiles=statistics.mean(kernels for _, _, kernels in both) / STEPS,
    )


def _calibrate(link: Link, run: Callable, sizes: list[list[int]]) -> float:
    """Return the rate, in bits per second, at which forward's bytes take `HOP_SHARE` of a step's compute time."""
    wanted = HOP_SHARE * statistics.median(_turn(run, sizes).tiles for _ in range(3))
    rate = 8 * max(sizes[0]) / wanted
    for _ in range(4):
        link.limit(rate)
        found = statistics.median(transfer(*sizes[0]) for _ in range(3))
        if abs(found / wanted - 1) < 0.01:
            break
        rate *= found / wanted
    link.limit(None)
    return rate


def _table(result: dict[str, Any]) -> str:
    sent = " and ".join(f"{count / 1e6:.1f}" for count in result["bytes_forward"])
    rate = result["bits_per_second"] / 1e6
    lines = [
        result["case"],
        f"  tiles of a step {result['tile_seconds']} s; ranks send {sent} MB in a forward; link {rate:.0f} Mbit/s",
        f"  the hop alone takes {result['hop_share']} of a step's tiles{'' if result['as_set'] else ', NOT AS SET'};"
        f" dropped {result['dropped']} repeats",
    ]
    for name, row in result["phases"].items():
        verdict = "holds" if row["holds"] else "DOES NOT HOLD" if result["as_set"] else "not shown by this run"
        lines += [
            f"  {name}: slow / unlimited {row['ratio']}, at most {row['limit']}: {verdict}",
            f"    hop first, then compute: {row['ratio_without_overlap']}",
            f"    seconds: unlimited {row['free_seconds']}, slow {row['slow_seconds']}",
            f"    of these waiting: unlimited {row['free_waiting']}, slow {row['slow_waiting']}",
        ]
    return "\n".join(lines)


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Draw one panel per phase: the time that the slow link adds to each route, with and without overlap, and the limit."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    bars = (
        ("ratio", "longspan", "#0072b2", -0.2),
        ("ratio_without_overlap", "hop first, then compute", "#bccddc", 0.2),
    )
    height = 1.4 + 0.6 * len(results)
    figure, panels = plt.subplots(1, len(LIMITS), figsize=(9, height), sharey=True, squeeze=False, layout="constrained")
    for panel, (name, limit) in zip(panels[0], LIMITS.items(), strict=True):
        for key, label, color, offset in bars:
            rows = [result["phases"][name][key] for result in results]
            widths = [100 * (row.median - 1) for row in rows]
            spread = [[100 * (row.median - row.low) for row in rows], [100 * (row.high - row.median) for row in rows]]
            places = [index + offset for index in range(len(rows))]
            panel.barh(places, widths, 0.38, xerr=spread, color=color, ecolor="#1f2933", label=label)
        panel.axvline(100 * (limit - 1), color="#d55e00", linewidth=1.2, label="at most")
        panel.axvline(0, color="#1f2933", linewidth=0.8)
        panel.set_yticks(range(len(results)), [result["case"].split(":")[0] for result in results])
        panel.set_title(name, loc="left", fontsize=10)
        panel.set_xlabel("% of the time on an unlimited link, added by the slow one")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0][0].invert_yaxis()
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
