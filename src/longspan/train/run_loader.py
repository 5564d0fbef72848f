"""The data loader of a run, shared by training and both sides of `verify`."""

from longspan.data import Loader, TokenStore, read_manifest
from longspan.train.train_config import TrainConfig


def make_loader(config: TrainConfig, store: TokenStore, dp_rank: int, dp_size: int) -> Loader:
    """Make the loader of a data-parallel rank. All ranks of a CP, TP or PP group read the same rows.

    If `parallel.dp` is set, the rows of a step do not depend on `dp_size`, so that one process can read the rows of all
    ranks.
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
