"""The rows of a step are those of the configuration, on one process and on the ranks of any world."""

from pathlib import Path

import pytest

from longspan.data import open_store
from longspan.errors import DataError
from longspan.train.run import prepare
from longspan.train.run_loader import make_loader
from longspan.train.train_config import TrainConfig
from tests.train.tiny import make_config, write_corpus

EVEN = {"data__packing": "fit", "data__fit": {"balance": "area", "buffer": 8}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_corpus(tmp_path)
    return tmp_path


def read(config: TrainConfig, dp_size: int, steps: int = 6) -> list[bytes]:
    """The rows of a few steps of all ranks, in the order of the stream."""
    store = open_store(config.data)
    loaders = [make_loader(config, store, rank, dp_size) for rank in range(dp_size)]
    batches = config.gradient_accumulation_steps * (config.parallel.dp or dp_size) // dp_size
    return [next(loader).digest() for _ in range(steps * batches) for loader in loaders]


def test_the_rows_of_a_step_do_not_depend_on_how_they_are_shared(folder: Path) -> None:
    ways = [
        {"gradient_accumulation_steps": 4},
        {"gradient_accumulation_steps": 2, "parallel__dp": 2},
        {"parallel__dp": 4, "parallel__cp": 2},
    ]
    configs = [make_config(folder, **EVEN, **way) for way in ways]
    rows = [read(config, config.parallel.dp or 1) for config in configs]
    assert rows[0] == rows[1] == rows[2]
    assert [read(config, 1) for config in configs] == rows  # as the CP=1 side of verify reads them
    assert read(make_config(folder, parallel__cp=2, **EVEN), 4) == rows[0]  # dp of the world
    assert read(make_config(folder, **EVEN), 1, 24) != rows[0]


def test_the_packing_of_the_configuration_is_read(folder: Path) -> None:
    fitted = make_config(folder, data__packing="fit", data__seq_len=100)
    store = open_store(fitted.data)
    lengths = set(store.lengths.tolist())
    loader = make_loader(fitted, store, 0, 1)
    assert all(set(next(loader).lengths) <= lengths for _ in range(loader.rows_per_epoch))
    refusing = make_config(folder, data__packing="fit", data__fit={"long_documents": "refuse"})
    with pytest.raises(DataError, match="tokens, more than seq_len 48"):
        make_loader(refusing, store, 0, 1)


@pytest.mark.parametrize(("world", "raises"), [("8", False), ("4", True)])
def test_a_resumed_world_is_prepared_with_its_own_degree(
    folder: Path, monkeypatch: pytest.MonkeyPatch, world: str, raises: bool
) -> None:
    """Saved with 4 rows a step: torchrun's world of 8 at cp 2 reads 4 rows a step, a world of 4 two."""
    config = make_config(folder, resume=True, parallel__cp=2, **EVEN)
    state = make_loader(
        make_config(folder, gradient_accumulation_steps=4, **EVEN), open_store(config.data), 0, 1
    ).state_dict()
    monkeypatch.setattr("longspan.train.run.checkpoint.newest", lambda run_dir: run_dir)
    monkeypatch.setattr("longspan.train.run.checkpoint.read_record", lambda _: {"step": 1, "loader": state})
    monkeypatch.setattr("longspan.train.run.checkpoint.check_model", lambda *_: None)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", world)
    if raises:
        with pytest.raises(DataError, match="rows_per_step is 4 in the state, 2 here"):
            prepare(config)
    else:
        prepare(config)
