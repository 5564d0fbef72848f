"""Checkpoints through torch.distributed.checkpoint: weights, moments and where the run stood, at any number of ranks.

    run_dir/checkpoints/step-00000030/    DCP's shards, and run.json: step, loader, loss scale, the model's shape

A checkpoint is written beside its place and renamed when it is whole. DCP's metadata is unpickled when read: load only
checkpoints that you trust.
"""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from longspan.errors import CheckpointError, SpecError
from longspan.model import Decoder, ModelConfig, save_pretrained
from longspan.names import with_current_names
from longspan.train.optim import LossScale
from longspan.train.parallel import gather_whole
from longspan.train.step import TrainStep

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


@dataclass(frozen=True)
class Progress:
    """Where a run stands, apart from tensors. `step` steps are done."""

    step: int
    tokens: int
    loader: dict[str, Any]


def save(run_dir: Path, step: TrainStep, progress: Progress) -> Path:
    """Write a checkpoint and return its folder. Collective."""
    folder = run_dir / "checkpoints" / f"step-{progress.step:08d}"
    scratch = folder.with_suffix(".partial")
    dcp.save(_joined(_states(step)), checkpoint_id=scratch)
    if dist.get_rank() == 0:
        record = {
            **asdict(progress),
            "loss_scale": asdict(step.scale),
            "model": step.model_config.model_dump(mode="json"),
        }
        (scratch / "run.json").write_text(json.dumps(record, indent=1))
        scratch.rename(folder)
    dist.barrier()
    return folder


def newest(run_dir: Path) -> Path | None:
    """The folder of the latest whole checkpoint, if there is one."""
    whole = [file.parent for file in run_dir.glob("checkpoints/step-*/run.json") if file.parent.suffix != ".partial"]
    return max(whole, default=None)


def load(folder: Path, step: TrainStep) -> Progress:
    """Read a checkpoint into the model and optimizer of `step`, saved at any number of ranks. Collective.

    Raises `CheckpointError` naming the values that differ if it is of another model.
    """
    record = read_record(folder)
    check_model(folder, record, step.model_config)
    states = _states(step)
    state = _joined(states)
    try:
        dcp.load(state, checkpoint_id=folder)
    except (OSError, CheckpointException) as error:
        reason = str(error.failures[0] if isinstance(error, CheckpointException) and error.failures else error)
        raise CheckpointError(
            f"{folder} cannot be read: {reason.splitlines()[0]}",
            hint="remove that folder to go on from the checkpoint before it",
        ) from error
    for stage, optimizer, own in zip(step.stages, step.optimizers, states, strict=True):
        read = {kind: {name: state[kind][name] for name in own[kind]} for kind in own}
        set_state_dict(
            stage, optimizer, model_state_dict=read["model"], optim_state_dict=read["optimizer"], options=_FLAT
        )
    step.scale = LossScale(**record["loss_scale"])
    return Progress(record["step"], record["tokens"], record["loader"])


def _states(step: TrainStep) -> list[dict[str, dict[str, Any]]]:
    """Of each of this rank's stages. Parameters have the names of the whole model, and so have their moments and settings: a
    checkpoint is read at any degrees."""
    pairs = zip(step.stages, step.optimizers, strict=True)
    return [dict(zip(("model", "optimizer"), get_state_dict(*pair, options=_FLAT), strict=True)) for pair in pairs]


def _joined(states: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    return {kind: {name: x for state in states for name, x in state[kind].items()} for kind in states[0]}


def read_record(folder: Path) -> dict[str, Any]:
    """`run.json` of a checkpoint."""
    try:
        record: dict[str, Any] = with_current_names(json.loads((folder / "run.json").read_text()))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} is not a whole checkpoint: run.json: {error}") from None
    return record


def check_model(folder: Path, record: dict[str, Any], config: ModelConfig) -> None:
    """Refuse a checkpoint whose model has another shape, naming what differs."""
    saved, here = record["model"], config.model_dump(mode="json")
    differing = [f"{key} is {saved.get(key)} there and {here[key]} here" for key in here if saved.get(key) != here[key]]
    if differing:
        raise CheckpointError(
            f"{folder} is a checkpoint of another model: {'; '.join(differing)}",
            hint="give the [model] section of the run that saved it, or another run_dir",
        )


def check_export(config: ModelConfig) -> None:
    """Refuse, before a run, a model that a Hugging Face Llama folder cannot describe."""
    if config.qk_norm or set(config.mask_names) != {"full"} or config.experts is not None:
        beyond = f"qk_norm={config.qk_norm}, windows={config.windows}"
        if config.experts is not None:
            beyond += f", {config.experts.num_experts} experts"
        raise SpecError(
            f"export=true: a Llama folder cannot describe {beyond}",
            hint="set export=false and use checkpoint_every, or a model without these",
        )


def export(run_dir: Path, step: TrainStep) -> Path:
    """Gather the weights on rank 0 and write them as a Hugging Face folder, in the place of an older one. Collective."""
    whole = gather_whole(step.stages, step.meshes)
    folder = run_dir / "model"
    if dist.get_rank() == 0:
        scratch = folder.with_suffix(".partial")
        shutil.rmtree(scratch, ignore_errors=True)
        with torch.device("meta"):
            shape = Decoder(step.model_config)
        save_pretrained(shape, scratch, state_dict=whole)
        shutil.rmtree(folder, ignore_errors=True)
        scratch.rename(folder)
    dist.barrier()
    return folder
