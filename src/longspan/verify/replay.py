"""The CP=N side: the training step itself, on real ranks, with its gradients gathered for comparison."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from longspan.comm.launch import leave_world
from longspan.data import open_store
from longspan.train.config import TrainConfig
from longspan.train.loader import make_loader
from longspan.train.model import make_model
from longspan.train.optim import learning_rate, update
from longspan.train.run import join
from longspan.train.step import TrainStep
from longspan.verify.evidence import Evidence, digest_inputs, input_rows


def replay_and_leave(config: TrainConfig, steps: int, gradients: Path) -> Evidence:
    """`run_replay`, for a process that is made for it."""
    try:
        return run_replay(config, join(config), steps, gradients)
    finally:
        leave_world()


def run_replay(config: TrainConfig, mesh: DeviceMesh, steps: int, gradients: Path) -> Evidence:
    """Replay `steps` steps on this rank of `mesh`. Rank 0 writes the first step's gradients. Collective."""
    store = open_store(config.data)
    loader = make_loader(config, store, mesh["dp"].get_local_rank(), mesh["dp"].size())
    step = TrainStep(make_model(config), mesh, config)
    given: list[npt.NDArray[np.int64]] = []

    def note(module: torch.nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        ids, positions, *_ = arguments
        given.append(input_rows(ids, positions, keywords["labels"]))

    step.module.register_forward_pre_hook(note, with_kwargs=True)
    losses, norms, inputs = [], [], []
    for index in range(steps):
        loss, _, _ = step.backward([next(loader) for _ in range(config.accumulation)])
        if index == 0:
            whole = gather_gradients(step)
            if dist.get_rank() == 0:
                Evidence.write_gradients(gradients, whole)
        rate = learning_rate(config.optim, index, config.steps)
        norms.append(update(step.module, step.optimizer, step.scale, rate, config.optim.clip_norm))
        losses.append(loss)
        inputs.append(digest_inputs(_of_all_ranks(given)))
        given.clear()
    return Evidence(losses, norms, inputs, gradients)


def _of_all_ranks(rows: list[npt.NDArray[np.int64]]) -> list[npt.NDArray[np.int64]]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, np.concatenate(rows))
    return everyone


def gather_gradients(step: TrainStep) -> dict[str, torch.Tensor]:
    """The gradient of every parameter, whole and without the loss scale, before clipping. Collective."""
    whole = {}
    for name, parameter in step.module.named_parameters():
        gradient = parameter.grad
        if gradient is not None:
            gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            whole[name.removeprefix("module.")] = gradient.cpu() / step.scale.value
    return whole
