"""The decoder a run starts from: the same first weights at every degree, for training and for both sides of `verify`."""

import torch

from longspan.model import Decoder, load_weights
from longspan.names import DTYPES
from longspan.train.train_config import TrainConfig, model_config

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, dtype.torch_name) for name, dtype in DTYPES.items()}


def make_model(config: TrainConfig, device: torch.device | str = "cpu") -> Decoder:
    """The decoder with its first weights, which depend on the seed alone: the same at every degree."""
    model = meta_model(config).to_empty(device=device)
    first_weights(model, config)
    return model


def meta_model(config: TrainConfig, part: range | None = None) -> Decoder:
    """The decoder, or a pipeline stage of it, on the meta device: to be cut before it takes memory."""
    with torch.device("meta"):
        model = Decoder(
            model_config(config), recompute=config.recompute, dropout=config.dropout, seed=config.seed, part=part
        )
    return model.to(torch.promote_types(TORCH_DTYPES[config.dtype], torch.float32))


def first_weights(model: Decoder, config: TrainConfig) -> None:
    """Draw or read this rank's part of the weights a run starts from."""
    if config.init_from is None:
        model.init_weights()
    else:
        load_weights(model, config.init_from)
