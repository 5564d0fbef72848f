"""The CP=N side: the training step itself, on real ranks, with gradients gathered for comparison."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from longspan.comm.launch import leave_world
from longspan.comm.meshes import Meshes
from longspan.data import open_store
from longspan.train.optim import learning_rate
from longspan.train.parallel import gather_whole, make_stages
from longspan.train.run import join
from longspan.train.run_loader import make_loader
from longspan.train.step import TrainStep
from longspan.train.train_config import TrainConfig
from longspan.verify.evidence import Evidence, digest_inputs, input_rows


def replay_and_leave(config: TrainConfig, steps: int, gradients: Path) -> Evidence:
    """Join a new world, call `run_replay`, and leave the world."""
    try:
        return run_replay(config, join(config), steps, gradients)
    finally:
        leave_world()


def run_replay(config: TrainConfig, meshes: Meshes, steps: int, gradients: Path) -> Evidence:
    """Replay `steps` steps on this rank of `meshes`. Rank 0 writes the first step's gradients. Collective."""
    store = open_store(config.data)
    loader = make_loader(config, store, meshes.data["dp"].get_local_rank(), meshes.topology.dp)
    step = TrainStep(make_stages(config, meshes), meshes, config)
    given: list[npt.NDArray[np.int64]] = []

    def note(module: torch.nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        (ids,) = arguments or (keywords["input_ids"],)
        positions = keywords["position_ids"]
        if "attention_mask" in keywords:  # transformers: 0 in padding slots
            positions = positions.masked_fill(keywords["attention_mask"] == 0, -1)
        given.append(input_rows(ids, positions, keywords["labels"]))

    place = meshes.topology.coordinates(dist.get_rank())
    if place["tp"] == place["pp"] == 0:  # all ranks of a TP or PP group get the same inputs
        step.stages[0].register_forward_pre_hook(note, with_kwargs=True)
    losses, norms, inputs = [], [], []
    for index in range(steps):
        loss, *_ = step.backward([next(loader) for _ in range(config.gradient_accumulation_steps)])
        if index == 0:
            whole = gather_whole(step.stages, meshes, gradients=True)
            if dist.get_rank() == 0:
                Evidence.write_gradients(gradients, {name: x / step.scale.value for name, x in whole.items()})
        norms.append(step.update(learning_rate(config.optim, index, config.steps)))
        losses.append(loss)
        inputs.append(digest_inputs(_of_all_ranks(given)))
        given.clear()
    return Evidence(losses, norms, inputs, gradients)


def _of_all_ranks(rows: list[npt.NDArray[np.int64]]) -> list[npt.NDArray[np.int64]]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, np.concatenate([np.empty((0, 3), dtype=np.int64), *rows]))
    return everyone
