"""Checkpoints through torch.distributed.checkpoint (DCP): weights, moments and loader state, loadable at any parallel degrees.

    run_dir/checkpoints/step-00000030/    DCP shards, and run.json: step, loader, loss scale, model configuration

A checkpoint is written to a `.partial` folder and renamed when complete. DCP unpickles its metadata: load only trusted
checkpoints.
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
from longspan.model import Decoder, FolderChanges, ModelConfig, TransformersConfig, save_pretrained
from longspan.model.transformers_config import max_positions, read_entries
from longspan.model.transformers_model import copy_beside, save_transformers
from longspan.names import with_current_names
from longspan.train.optim import LossScale
from longspan.train.parallel import gather_whole
from longspan.train.step import TrainStep
from longspan.train.train_config import TrainConfig

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


@dataclass(frozen=True)
class Progress:
    """Position of a run: completed optimizer steps, tokens read, loader state."""

    step: int
    tokens: int
    loader: dict[str, Any]


def save(run_dir: Path, step: TrainStep, progress: Progress) -> Path:
    """Write a checkpoint and return its folder. Collective over the world."""
    folder = run_dir / "checkpoints" / f"step-{progress.step:08d}"
    scratch = folder.with_suffix(".partial")
    dcp.save(_joined(_states(step)), checkpoint_id=scratch)
    if dist.get_rank() == 0:
        record = {
            **asdict(progress),
            "loss_scale": asdict(step.scale),
            "model": _described(step.model_config),
        }
        (scratch / "run.json").write_text(json.dumps(record, indent=1))
        scratch.rename(folder)
    dist.barrier()
    return folder


def newest(run_dir: Path) -> Path | None:
    """Return the folder of the latest complete checkpoint, or None."""
    whole = [file.parent for file in run_dir.glob("checkpoints/step-*/run.json") if file.parent.suffix != ".partial"]
    return max(whole, default=None)


def load(folder: Path, step: TrainStep) -> Progress:
    """Load a checkpoint, saved at any parallel degrees, into the model and optimizers of `step`. Collective over the world.

    Raises `CheckpointError` if the folder cannot be read or the model configuration differs.
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
            hint="remove the folder to resume from the previous checkpoint",
        ) from error
    for stage, optimizer, own in zip(step.stages, step.optimizers, states, strict=True):
        read = {kind: {name: state[kind][name] for name in own[kind]} for kind in own}
        set_state_dict(
            stage, optimizer, model_state_dict=read["model"], optim_state_dict=read["optimizer"], options=_FLAT
        )
    step.scale = LossScale(**record["loss_scale"])
    return Progress(record["step"], record["tokens"], record["loader"])


def _states(step: TrainStep) -> list[dict[str, dict[str, Any]]]:
    """State dicts of the model and optimizer of each stage on this rank.

    Names are those of the complete model, so that a checkpoint can be loaded at any parallel degrees.
    """
    pairs = zip(step.stages, step.optimizers, strict=True)
    return [dict(zip(("model", "optimizer"), get_state_dict(*pair, options=_FLAT), strict=True)) for pair in pairs]


def _joined(states: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    return {kind: {name: x for state in states for name, x in state[kind].items()} for kind in states[0]}


def read_record(folder: Path) -> dict[str, Any]:
    """Read `run.json` of a checkpoint. Raises `CheckpointError` if the file is missing or invalid."""
    try:
        record: dict[str, Any] = with_current_names(json.loads((folder / "run.json").read_text()))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} is not a complete checkpoint: run.json: {error}") from None
    return record


def check_model(folder: Path, record: dict[str, Any], config: ModelConfig | TransformersConfig) -> None:
    """Raise `CheckpointError` naming the values in which the saved model configuration differs from `config`."""
    saved, here = record["model"], _described(config)
    # Another version of transformers may have entries that the saved configuration lacks.
    compared = [key for key in here if isinstance(config, ModelConfig) or key in saved or key == "model_type"]
    differing = [
        f"{key} is {saved.get(key)} in the checkpoint, {here[key]} here"
        for key in compared
        if saved.get(key) != here[key]
    ]
    if differing:
        raise CheckpointError(
            f"{folder} is a checkpoint of another model: {'; '.join(differing)}",
            hint="use the [model] section of the run that saved the checkpoint, or choose another run_dir",
        )


def _described(model: ModelConfig | TransformersConfig) -> dict[str, Any]:
    """Return the values that determine a model, for the record of a checkpoint."""
    return model.model_dump(mode="json") if isinstance(model, ModelConfig) else model.entries()


def check_export(config: ModelConfig | TransformersConfig) -> None:
    """Raise `SpecError` for a decoder that a Hugging Face Llama folder cannot represent."""
    if isinstance(config, TransformersConfig):
        return
    if config.qk_norm or set(config.mask_names) != {"full"} or config.experts is not None:
        beyond = f"qk_norm={config.qk_norm}, windows={config.windows}"
        if config.experts is not None:
            beyond += f", {config.experts.num_experts} experts"
        raise SpecError(
            f"export=true: a Hugging Face Llama folder cannot represent {beyond}",
            hint="set export=false and use checkpoint_every, or remove these options of the model",
        )


def export(run_dir: Path, step: TrainStep) -> Path:
    """Gather the weights on rank 0 and write a Hugging Face folder, which replaces an older folder. Collective.

    Special tokens, tokenizer, chat template and defaults of generation are those of `init_from`; a tokenizer given by
    `data.tokenizer` replaces that of the folder.
    """
    whole = gather_whole(step.stages, step.meshes)
    folder, model, config = run_dir / "model", step.model_config, step.config
    if dist.get_rank() == 0:
        scratch = folder.with_suffix(".partial")
        shutil.rmtree(scratch, ignore_errors=True)
        if isinstance(model, TransformersConfig):
            save_transformers(model, whole, scratch, longest=config.data.seq_len)
        else:
            with torch.device("meta"):
                shape = Decoder(model)
            save_pretrained(shape, scratch, state_dict=whole, extra=_carried(config))
        for source in (config.init_from, None if config.data.tokenizer == "bytes" else Path(config.data.tokenizer)):
            copy_beside(source, scratch)
        shutil.rmtree(folder, ignore_errors=True)
        scratch.rename(folder)
    dist.barrier()
    return folder


def _carried(config: TrainConfig) -> dict[str, Any]:
    """Return the entries of an exported config.json that a `ModelConfig` lacks: special tokens and maximal positions."""
    source = {} if config.init_from is None else read_entries(config.init_from)
    tokens = {key: source[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in source}
    changes = config.model if isinstance(config.model, FolderChanges) else FolderChanges()
    longest = max_positions(source.get("max_position_embeddings") or 0, changes, config.data.seq_len)
    return tokens | {"max_position_embeddings": longest}
