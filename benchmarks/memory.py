"""Measure peak activation memory of a training step by profiler memory events: cp=4 against cp=1.

    python -m benchmarks.memory [--seq-len 16384]

Memory events cover every allocation, also inside operators. The peak is relative to the start of the step, when parameters,
gradients and optimizer state are allocated. The peak includes logits.
"""

from datetime import timedelta
from pathlib import Path

import click
import torch

from benchmarks.harness import freed_here, peak_bytes, save
from longspan.comm.launch import join_world, launch, leave_world
from longspan.data import Batch
from longspan.topology import Topology
from longspan.train.parallel import make_stages
from longspan.train.step import TrainStep
from longspan.train.train_config import TrainConfig, load_config

DEMO = Path(__file__).parent.parent / "examples" / "demo.toml"


@click.command(help=__doc__)
@click.option("--seq-len", default=16384, show_default=True)
@click.option("--cp", default=4, show_default=True)
@click.option("--config", default=DEMO, type=click.Path(path_type=Path))
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(seq_len: int, cp: int, config: Path, output: Path | None) -> None:
    loaded = load_config(config, ["parallel.cp=1"])
    one = launch(peak_of_step, (loaded, 1, seq_len), 1)
    many = launch(peak_of_step, (loaded, cp, seq_len), cp)
    worst = max(many)
    click.echo(
        f"S={seq_len:,}: cp=1 {one[0] / 2**20:.1f} MiB, cp={cp} at most {worst / 2**20:.1f} MiB: {worst / one[0]:.3f}"
    )
    save(output, {"seq_len": seq_len, "cp": cp, "one": one, "many": many, "ratio": worst / one[0]})


def peak_of_step(config: TrainConfig, cp: int, seq_len: int) -> list[int]:
    """Return every rank's peak bytes in one step, minus the bytes at the start of the step."""
    meshes = join_world(Topology(dp=1, cp=cp), timedelta(minutes=5))
    try:
        step = TrainStep(make_stages(config, meshes), meshes, config.model_copy(update={"steps": 10}))
        generator = torch.Generator().manual_seed(0)
        batch = Batch.from_documents([torch.randint(1, 256, (seq_len,), generator=generator).numpy()])
        step([batch], 0)  # allocates optimizer state and gradients
        activities = [torch.profiler.ProfilerActivity.CPU]
        with freed_here(), torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
            step([batch], 1)
        peaks = [0] * cp
        torch.distributed.all_gather_object(peaks, peak_bytes(profiler), group=meshes.data["cp"].get_group())
        return peaks
    finally:
        leave_world()


if __name__ == "__main__":
    main()
