"""The initial decoder of a run, with the same weights at every degree, for training and both sides of `verify`."""

import torch

from longspan.model import Decoder, load_weights
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
    with torch.device("meta"):
        model = Decoder(
            model_config(config), recompute=config.recompute, dropout=config.dropout, seed=config.seed, part=part
        )
    return model.to(torch.promote_types(TORCH_DTYPES[config.dtype], torch.float32))


def first_weights(model: Decoder, config: TrainConfig) -> None:
    """Fill this rank's shards with the initial weights, random or from `config.init_from`."""
    if config.init_from is None:
        model.init_weights()
    else:
        load_weights(model, config.init_from)
