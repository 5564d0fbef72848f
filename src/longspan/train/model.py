"""The initial model of a run, with the same weights at every degree, for training and both sides of `verify`.

A decoder of longspan fills each rank's shards by itself. A model of transformers is built whole, on the CPU of rank 0, and its
shards are sent from there: rank 0 needs host memory for the model in at least fp32 once.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from longspan.model import Decoder, ModelConfig, TransformersConfig, load_weights
from longspan.model.regions import local_region
from longspan.model.transformers_model import build, build_empty, named_tensors, set_recompute
from longspan.names import DTYPES
from longspan.train.train_config import TrainConfig, model_config

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, dtype.torch_name) for name, dtype in DTYPES.items()}


def make_model(config: TrainConfig, device: torch.device | str = "cpu") -> Decoder:
    """Make the decoder with its initial weights on one device. Random weights depend only on the seed."""
    model = meta_model(config).to_empty(device=device)
    first_weights(model, config)
    return model


def meta_model(config: TrainConfig, part: range | None = None) -> Decoder:
    """Make the decoder on the meta device, or only a pipeline stage's layers `part`."""
    shape = model_config(config)
    assert isinstance(shape, ModelConfig), "a model of transformers is made by empty_transformers"
    with torch.device("meta"):
        model = Decoder(shape, recompute=config.recompute, dropout=config.dropout, seed=config.seed, part=part)
    return model.to(weights_dtype(config))


def make_transformers(config: TrainConfig, shape: TransformersConfig) -> nn.Module:
    """Make a model of transformers with its initial weights on the CPU. Random weights depend only on the seed."""
    model = build(shape, seed=config.seed, dtype=weights_dtype(config))
    set_recompute(model, config.recompute)
    return model


def empty_transformers(config: TrainConfig, shape: TransformersConfig) -> nn.Module:
    """Make a model of transformers on the meta device."""
    model = build_empty(shape, dtype=weights_dtype(config))
    set_recompute(model, config.recompute)
    return model


def weights_dtype(config: TrainConfig) -> torch.dtype:
    """Return the dtype of the weights that the optimizer updates."""
    return torch.promote_types(TORCH_DTYPES[config.dtype], torch.float32)


def first_weights(model: nn.Module, config: TrainConfig) -> None:
    """Fill this rank's shards with the initial weights, random or from `config.init_from`. Collective for transformers."""
    shape = model_config(config)
    if isinstance(shape, TransformersConfig):
        _scatter(model, make_transformers(config, shape) if dist.get_rank() == 0 else None)
        return
    assert isinstance(model, Decoder), "a ModelConfig makes a Decoder"
    if config.init_from is None:
        model.init_weights()
    else:
        load_weights(model, config.init_from)


@torch.no_grad()
def _scatter(model: Any, whole: nn.Module | None) -> None:
    """Fill the shards of `model` from `whole`, which rank 0 holds, one tensor at a time. Collective over the world."""
    model.tie_weights()  # allocation has untied them
    values = {} if whole is None else dict(named_tensors(whole))
    for name, tensor in named_tensors(model):
        local, region = local_region(tensor)
        value = torch.empty(tensor.shape, dtype=tensor.dtype, device=local.device)
        if name in values:
            value.copy_(values[name])
        dist.broadcast(value, 0)
        local.copy_(value[region])
