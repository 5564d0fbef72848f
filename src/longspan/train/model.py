"""The decoder a run starts from: the same first weights at every degree, for training and for both sides of `verify`."""

import torch

from longspan.model import Decoder, ModelConfig, load_pretrained, read_config
from longspan.train.config import TrainConfig

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def model_config(config: TrainConfig) -> ModelConfig:
    """The decoder's shape, from the configuration or the folder it starts from."""
    if config.model is not None:
        return config.model
    assert config.init_from is not None, "the configuration checks that one of the two is given"
    return read_config(config.init_from)


def make_model(config: TrainConfig) -> Decoder:
    """The decoder with its first weights, which depend on the seed alone: the same at every degree."""
    dtype = torch.promote_types(DTYPES[config.dtype], torch.float32)
    if config.init_from is not None:
        return load_pretrained(config.init_from, dtype=dtype, recompute=config.recompute)
    torch.manual_seed(config.seed)
    return Decoder(model_config(config), recompute=config.recompute).to(dtype)
