"""Training on the rows of a manifest: the same losses at every CP degree, its documents and no others, and at the degree it was
packed for its counts."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from longspan.data import open_store
from longspan.data.store import TokenStore
from longspan.errors import DataError
from longspan.train.pack_run import pack_run
from longspan.train.run import prepare
from longspan.train.run_loader import make_loader
from longspan.train.train_config import PackConfig, TrainConfig
from tests.ranks import run_ranks
from tests.train.test_checkpoint import metrics, run_on_ranks
from tests.train.tiny import make_config, write_corpus

ROWS = {"data__seq_len": 320, "data__packing": "fit", "data__fit": {"buffer": 8}, "dtype": "fp32"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("manifest")
    write_corpus(folder, documents=64)
    packed(folder, "rows.parquet")
    return folder


def packed(folder: Path, name: str, **changes: Any) -> TrainConfig:
    """Write a manifest, and the configuration that trains on it."""
    config = make_config(folder, **(ROWS | changes))
    if not (folder / name).exists():
        pack_run(PackConfig.model_validate(config.model_dump(exclude_unset=True)), folder / name)
    return make_config(folder, **(ROWS | changes | {"data__manifest": str(folder / name)}))


def reading(group: Any, rank: int, config: TrainConfig) -> list[list[Any]]:
    """Run, and return the documents (start in the corpus, length) of each row this rank read to train on."""
    seen: list[list[Any]] = []
    document = TokenStore.document

    def read(store: TokenStore, number: int, start: int = 0, stop: int | None = None) -> Any:
        seen.append([int(number), int(start), stop])
        return document(store, number, start, stop)

    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(TokenStore, "document", read)
        run_on_ranks(group, rank, config)
    return seen


def train(config: TrainConfig) -> list[list[list[Any]]]:
    return run_ranks(config.parallel.cp * (config.parallel.dp or 1), reading, config)


def documents_of(path: Path) -> list[list[list[int]]]:
    rows = pq.read_table(path).column("documents").to_pylist()
    return [[[d["document"], d["start"], d["stop"]] for d in row] for row in rows]


def test_the_same_losses_and_documents_at_every_degree(folder: Path) -> None:
    rows = documents_of(folder / "rows.parquet")
    steps = len(rows) + 2  # into the second epoch, which has the same rows
    expected = [document for row in (rows + rows)[:steps] for document in row]
    losses = {}
    for cp, layout in ((1, "zigzag"), (2, "zigzag"), (2, "balanced"), (4, "zigzag"), (4, "balanced")):
        changes = {"parallel__cp": cp, "parallel__layout": layout, "steps": steps}
        config = packed(folder, "rows.parquet", **changes, run_dir=str(folder / f"{cp}-{layout}"))
        assert train(config) == [expected] * cp
        losses[cp, layout] = list(metrics(config).values())
    assert len(losses[1, "zigzag"]) == steps
    for key, values in losses.items():
        assert values == pytest.approx(losses[1, "zigzag"], rel=1e-5), key


def test_rows_are_those_that_a_run_packs_itself(folder: Path) -> None:
    config, own = packed(folder, "rows.parquet"), make_config(folder, **ROWS)
    store = open_store(config.data)
    told, expected = (make_loader(of, store, 0, 1) for of in (config, own))
    assert [next(told).digest() for _ in range(told.rows_per_epoch)] == [
        next(expected).digest() for _ in range(expected.rows_per_epoch)
    ]


def test_stopped_within_an_epoch_it_goes_on_at_other_degrees(folder: Path) -> None:
    """Four of an epoch's rows at cp 2, the rest at cp 1 and dp 2: every document is read once an epoch."""
    rows = documents_of(folder / "rows.parquet")
    assert len(rows) == 10
    first = packed(folder, "rows.parquet", run_dir=str(folder / "stop"), parallel__cp=2, steps=4, checkpoint_every=4)
    before, same = train(first)
    assert before == same == [document for row in rows[:4] for document in row]
    later = {"parallel__cp": 1, "parallel__dp": 2, "resume": True, "steps": 4 + (len(rows) - 4) // 2}
    again = packed(folder, "rows.parquet", run_dir=str(folder / "go"), **later)
    shutil.copytree(first.run_dir / "checkpoints", again.run_dir / "checkpoints")
    prepare(again)
    after = train(again)
    assert after[0] == [document for row in rows[4::2] for document in row]
    assert after[1] == [document for row in rows[5::2] for document in row]
    read = Counter(map(tuple, before + after[0] + after[1]))
    assert read == Counter(tuple(document) for row in rows for document in row)
    assert set(read.values()) == {1}
    assert {number for number, _, _ in read} == set(open_store(first.data).train.tolist())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"parallel__layout": "balanced", "parallel__route": "exchange", "parallel__pad_to_multiple_of": 16},
        {"parallel__route": "ulysses", "model__windows": [24, "full"]},
        {"parallel__layout": "balanced", "model__windows": [24, "full"], "parallel__comm_dtype": "bf16"},
    ],
)
def test_the_counts_are_those_of_the_run(folder: Path, changes: dict[str, Any]) -> None:
    """A step of one row counts what the manifest says, forward and backward: pairs, blocks and bytes of every rank."""
    name = f"counts-{'-'.join(map(str, changes.values()))}".replace("/", "")
    config = packed(
        folder, f"{name}.parquet", **({"parallel__cp": 2, "steps": 3, "run_dir": str(folder / name)} | changes)
    )
    run_ranks(2, run_on_ranks, config)
    lines = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    rows = pq.read_table(folder / f"{name}.parquet").slice(0, 3).to_pylist()
    for row, line in zip(rows, lines, strict=True):
        assert row["tokens"] == line["tokens"] == sum(row["rank_tokens"])
        assert [rank["pairs"] for rank in line["ranks"]] == [2 * pairs for pairs in row["rank_pairs"]]
        assert [rank["blocks"] for rank in line["ranks"]] == [2 * blocks for blocks in row["rank_blocks"]]
        assert [rank["bytes_sent"] for rank in line["ranks"]] == row["rank_bytes"]
        assert sum(row["rank_pairs"]) == row["pairs"]


def test_another_configuration_is_refused_before_there_are_ranks(folder: Path) -> None:
    config = packed(folder, "rows.parquet", run_dir=str(folder / "refused"))
    data = config.data.model_copy(update={"seq_len": 640})
    with pytest.raises(DataError, match="seq_len is 320 in the manifest, 640 here"):
        prepare(config.model_copy(update={"data": data}))
    missing = config.data.model_copy(update={"manifest": folder / "none.parquet"})
    with pytest.raises(DataError, match=r"none\.parquet cannot be read: No such file or directory"):
        prepare(config.model_copy(update={"data": missing}))
