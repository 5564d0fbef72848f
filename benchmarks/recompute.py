"""Measure memory and time of activation checkpointing at cp=1 and cp=2: "none", "block" (all but attention) and "full".

    python -m benchmarks.recompute [--seq-len 8192] [--repeats 5]

Peak is the maximum memory of one training step minus the memory at its start, by profiler memory events, on the worst rank.
Seconds per step are medians of interleaved repeats. Hops are the messages sent by attention on rank 0.
"""

import time
from datetime import timedelta
from pathlib import Path

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.harness import Spread, freed_here, peak_bytes, save
from longspan.comm.launch import join_world, launch, leave_world
from longspan.comm.traffic import record
from longspan.data import Batch
from longspan.topology import Topology
from longspan.train.parallel import make_stages
from longspan.train.step import TrainStep
from longspan.train.train_config import TrainConfig, load_config

DEMO = Path(__file__).parent.parent / "examples" / "demo.toml"
KINDS = ("none", "block", "full")


@click.command(help=__doc__)
@click.option("--seq-len", default=8192, show_default=True)
@click.option("--repeats", default=5, show_default=True)
@click.option("--config", default=DEMO, type=click.Path(path_type=Path))
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(seq_len: int, repeats: int, config: Path, output: Path | None) -> None:
    loaded = load_config(config, ["eval_every=none"])
    rows = [row for cp in (1, 2) for row in launch(measure, (loaded, cp, seq_len, repeats), cp)]
    table = Table("cp", "recompute", "peak MiB", "seconds", "hops", box=None)
    for row in rows:
        table.add_row(
            str(row["cp"]),
            row["recompute"],
            f"{row['peak'] / 2**20:.1f}",
            str(Spread.of(row["seconds"])),
            str(row["hops"]),
        )
    Console().print(table)
    save(output, {"seq_len": seq_len, "rows": rows})


def measure(config: TrainConfig, cp: int, seq_len: int, repeats: int) -> list[dict[str, object]]:
    """Measure each kind of recomputation, and return one table row per kind. Collective over `cp` ranks."""
    meshes = join_world(Topology(dp=1, cp=cp), timedelta(minutes=10), threads=2 // cp)
    try:
        generator = torch.Generator().manual_seed(0)
        batch = Batch.from_documents([torch.randint(1, 256, (seq_len,), generator=generator).numpy()])
        parallel = config.parallel.model_copy(update={"cp": cp})
        configs = [config.model_copy(update={"recompute": kind, "parallel": parallel, "steps": 99}) for kind in KINDS]
        steps = [TrainStep(make_stages(one, meshes), meshes, one) for one in configs]
        found = [_profiled(step, batch, cp) for step in steps]
        seconds: list[list[float]] = [[] for _ in steps]
        for repeat in range(repeats):
            for step, times in zip(steps, seconds, strict=True):
                dist.barrier()
                began = time.perf_counter()
                step([batch], 2 + repeat)
                times.append(time.perf_counter() - began)
        return [
            {"cp": cp, "recompute": kind, "peak": peak, "hops": hops, "seconds": times}
            for kind, (peak, hops), times in zip(KINDS, found, seconds, strict=True)
        ]
    finally:
        leave_world()


def _profiled(step: TrainStep, batch: Batch, cp: int) -> tuple[int, int]:
    """Return the peak bytes of the worst rank, and the messages sent by this rank."""
    step([batch], 0)  # allocates optimizer state and gradients
    with (
        freed_here(),
        record() as calls,
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        step([batch], 1)
    peaks: list[int] = [0] * cp
    dist.all_gather_object(peaks, peak_bytes(profiler))
    return max(peaks), sum(call.messages_sent for call in calls)


if __name__ == "__main__":
    main()
