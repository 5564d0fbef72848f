"""The rows a run reads: the same loader for training and for both sides of `verify`."""

from longspan.data import Loader, TokenStore, read_manifest
from longspan.train.train_config import TrainConfig


def make_loader(config: TrainConfig, store: TokenStore, dp_rank: int, dp_size: int) -> Loader:
    """Rows keyed by the data-parallel rank alone: all ranks of a CP group read the same.

    The rows of a step do not depend on `dp_size` where the configuration says dp: one process can read those of all ranks.
    """
    return Loader(
        store,
        seq_len=config.data.seq_len,
        micro_batch_size=config.micro_batch_size,
        dp_rank=dp_rank,
        dp_size=dp_size,
        seed=config.data.seed,
        shuffle=config.data.shuffle,
        fit=config.data.fit_options,
        rows_per_step=config.gradient_accumulation_steps * config.micro_batch_size * (config.parallel.dp or dp_size),
        manifest=None if config.data.manifest is None else read_manifest(config.data.manifest),
    )
