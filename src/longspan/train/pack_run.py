"""Pack the rows of a run into a manifest, for `longspan pack`. No torch, unless `init_from` is set."""

from collections.abc import Callable
from pathlib import Path

from longspan.data import open_store
from longspan.data.pack_corpus import pack
from longspan.errors import SpecError
from longspan.report import PackReport
from longspan.train.axes import planner_of, topology_of
from longspan.train.run_loader import make_loader
from longspan.train.train_config import PackConfig, model_config


def pack_run(
    config: PackConfig,
    output: Path,
    *,
    epochs: int = 1,
    tokenised: Callable[[int], None] | None = None,
    packed: Callable[[int, int], None] | None = None,
) -> PackReport:
    """Write the rows that a run of this configuration would read to a manifest, and return the manifest's report.

    `tokenised` is called with the number of tokenised documents, and `packed` as by `longspan.data.pack_corpus.pack`. Raises
    `SpecError` if the configuration cannot run, `DataError` if the corpus is invalid.
    """
    if config.data.manifest is not None:
        raise SpecError(
            f"data.manifest={config.data.manifest}: the rows of this configuration are already packed",
            hint="remove the manifest: --set data.manifest=none",
        )
    model = None if config.model is None and config.init_from is None else model_config(config)
    planner = planner_of(config, model, topology_of(config))
    planner.check()
    store = open_store(config.data, tokenised)
    loader = make_loader(config, store, dp_rank=0, dp_size=1)
    return pack(loader, store, planner, output, epochs=epochs, packed=packed)
