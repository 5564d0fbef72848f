"""A manifest holds rows whole or not at all, says what they are, and gives a loader exactly these."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longspan.data import DataConfig, FitConfig, Loader, TokenStore, open_store, read_manifest, write_manifest
from longspan.data.manifest import Counted, Counts, Pack, flat, read_table
from longspan.data.packing import Piece
from longspan.errors import DataError
from longspan.names import RENAMED

COUNTED = Counted(
    cp=2, layout="zigzag", route="ring", inner=None, ranks_per_node=None, comm_dtype=None, pad_to_multiple_of=None,
    masks={"full": 1}, heads=None, head_dim=8, itemsize=4,
)  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    """Documents `aa...`, `bb...` of 3 to 12 characters and an end token, two of them held out."""
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": chr(97 + i) * (3 + i)}) + "\n" for i in range(10)))
    return open_store(DataConfig(paths=(str(path),), seq_len=8, cache_dir=tmp_path / "cache", heldout_fraction=0.2))


def loader_of(store: TokenStore, dp_rank: int = 0, dp_size: int = 1, **options: Any) -> Loader:
    return Loader(store, **{"seq_len": 20, "dp_rank": dp_rank, "dp_size": dp_size, "seed": 3, **options})


def no_counts(pieces: list[Piece]) -> Counts:
    tokens = sum(piece.stop - piece.start for piece in pieces)
    return Counts(tokens, [tokens, 0], [0.5, 1.5], [1.0, 1.0], [7, 8])


def write(path: Path, store: TokenStore, epochs: int = 1, **options: Any) -> Loader:
    loader = loader_of(store, **options)
    packs = (Pack(epoch, pieces, no_counts(pieces)) for epoch, pieces in loader.packs(epochs))
    write_manifest(path, packs, store, loader.stream, epochs, COUNTED)
    return loader


def change(path: Path, **columns: list[Any]) -> None:
    """Write the file again with other values in its first rows."""
    table = pq.read_table(path)
    for name, values in columns.items():
        every = values + table.column(name).to_pylist()[len(values) :]
        at = table.schema.get_field_index(name)
        table = table.set_column(at, table.schema.field(at), pa.array(every, table.schema.field(at).type))
    pq.write_table(table, path)


OPTIONS = [{}, {"fit": FitConfig(buffer=4)}, {"fit": FitConfig(balance="area"), "rows_per_step": 2}, {"shuffle": False}]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_loader_reads_exactly_the_rows_that_were_packed(
    store: TokenStore, tmp_path: Path, options: dict[str, Any]
) -> None:
    packing = write(tmp_path / "rows.parquet", store, **options)
    rows = [next(packing).digest() for _ in range(packing.rows_per_epoch)]
    again = loader_of(store, **options, manifest=read_manifest(tmp_path / "rows.parquet"))
    assert again.rows_per_epoch == len(rows) >= 3  # which two documents are held out, the path of the corpus decides
    assert [next(again).digest() for _ in range(2 * len(rows))] == rows + rows  # every epoch the same
    assert again.epoch == 2


def test_several_epochs_are_one_of_the_manifest(store: TokenStore, tmp_path: Path) -> None:
    packing = write(tmp_path / "rows.parquet", store, epochs=2)
    again = loader_of(store, manifest=read_manifest(tmp_path / "rows.parquet"))
    assert again.rows_per_epoch == 2 * packing.rows_per_epoch
    for _ in range(again.rows_per_epoch):
        assert next(again).digest() == next(packing).digest()
    assert (again.epoch, packing.epoch) == (1, 2)


def test_what_the_file_says(store: TokenStore, tmp_path: Path) -> None:
    write(tmp_path / "rows.parquet", store)
    rows = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    assert [row["row"] for row in rows] == list(range(len(rows)))
    for row in rows:
        held = [d["stop"] - d["start"] for d in row["documents"]]
        assert (row["lengths"], row["tokens"], row["padding"]) == (held, sum(held), 20 - sum(held))
        assert (row["rank_tokens"], row["rank_pairs"], row["rank_bytes"]) == ([row["tokens"], 0], [0.5, 1.5], [7, 8])
        for d in row["documents"]:
            assert d["source"].endswith(f"corpus.jsonl:{d['document'] + 1}")
    read = sorted((d["document"], d["start"], d["stop"]) for row in rows for d in row["documents"])
    whole = {number: [] for number in store.train.tolist()}
    for number, start, stop in read:
        whole[number] += range(start, stop)
    assert whole == {number: list(range(store.lengths[number])) for number in store.train.tolist()}
    schema = pq.read_schema(tmp_path / "rows.parquet")
    about = json.loads(schema.metadata[b"longspan"])
    assert about["stream"] == loader_of(store).stream
    assert about["stream"]["corpus"] == store.corpus
    assert (about["format"], about["epochs"], about["counted"]["masks"]) == (1, 1, {"full": 1})
    assert b"forward and backward" in schema.field("rank_bytes").metadata[b"what"]


def test_columns_come_back(store: TokenStore, tmp_path: Path) -> None:
    write(tmp_path / "rows.parquet", store)
    table, about = read_table(tmp_path / "rows.parquet", ["lengths", "documents", "rank_bytes"])
    edges, lengths = flat(table, "lengths")
    _, documents = flat(table, "documents")
    assert (documents["stop"] - documents["start"]).tolist() == lengths.tolist()
    assert edges[-1] == lengths.size
    assert flat(table, "rank_bytes")[1].tolist() == [7, 8] * table.num_rows
    assert about["counted"]["layout"] == "zigzag"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 24}, "seq_len is 20 in the manifest, 24 here"),
        ({"seed": 4}, "seed is 3 in the manifest, 4 here"),
        ({"shuffle": False}, "shuffle is True in the manifest, False here"),
        (
            {"fit": FitConfig(buffer=9)},
            "packing is 'stream' in the manifest, 'fit' here; buffer is None in the manifest, 9",
        ),
    ],
)
def test_other_options_are_refused_with_the_values(
    store: TokenStore, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    write(tmp_path / "rows.parquet", store)
    with pytest.raises(DataError) as caught:
        loader_of(store, manifest=read_manifest(tmp_path / "rows.parquet"), **options)
    assert caught.value.message.startswith(f"{tmp_path}/rows.parquet holds rows of another stream: {message}")
    assert caught.value.hint == "set the [data] values used to pack it, or pack again: longspan pack"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"corpus": "d" * 64}, r"corpus is \w{12}\.\.\. in the manifest, dddddddddddd\.\.\. here"),
        ({"tokenizer": "words"}, "tokenizer is 'bytes' in the manifest, 'words' here"),
        ({"heldout_fraction": 0.5}, r"heldout_fraction is 0\.2 in the manifest, 0\.5 here"),
        ({"seed": 1}, "split_seed is 0 in the manifest, 1 here"),
    ],
)
def test_another_corpus_is_refused_with_the_values(
    store: TokenStore, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write(tmp_path / "rows.parquet", store)
    other = TokenStore(**{**vars_of(store), **changes})
    with pytest.raises(DataError, match=message):
        loader_of(other, manifest=read_manifest(tmp_path / "rows.parquet"))


def test_rows_of_a_step_and_dp_are_free(store: TokenStore, tmp_path: Path) -> None:
    """Rows that were evened for steps of two are read at any number a step."""
    fit = FitConfig(balance="area")
    write(tmp_path / "rows.parquet", store, fit=fit, rows_per_step=2)
    manifest = read_manifest(tmp_path / "rows.parquet")
    alone = loader_of(store, fit=fit, rows_per_step=4, manifest=manifest)
    three = [loader_of(store, rank, 3, fit=fit, manifest=manifest) for rank in range(3)]
    three[0].load_state_dict(alone.state_dict())
    expected = [next(alone).digest() for _ in range(6)]
    assert [next(loader).digest() for _ in range(2) for loader in three] == expected


def test_a_state_knows_its_manifest(store: TokenStore, tmp_path: Path) -> None:
    write(tmp_path / "rows.parquet", store)
    plain, manifest = loader_of(store), read_manifest(tmp_path / "rows.parquet")
    packed = loader_of(store, manifest=manifest)
    next(packed)
    state = json.loads(json.dumps(packed.state_dict()))
    assert state["manifest"] == manifest.digest
    with pytest.raises(
        DataError, match=f"another stream: manifest is {manifest.digest[:12]}... in the state, None here"
    ):
        plain.load_state_dict(state)
    rows = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    change(tmp_path / "rows.parquet", documents=[rows[1]["documents"], rows[0]["documents"]])
    swapped = loader_of(store, manifest=read_manifest(tmp_path / "rows.parquet"))
    with pytest.raises(DataError, match=r"another stream: manifest is \w{12}... in the state, \w{12}... here"):
        swapped.load_state_dict(state)
    assert next(swapped).digest() == next(packed).digest()


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        ((0, 0, 99), "row 0 of {path} has 99 tokens, more than seq_len 20"),
        ((0, 0, 9), "row 0 of {path} holds tokens 0 to 9 of document 0, which has 4 tokens"),
        ((0, 2, 2), "row 0 of {path} holds tokens 2 to 2 of document 0, which has 4 tokens"),
        ((77, 0, 2), "row 0 of {path} holds document 77, which is not in the training split"),
        ((None, 0, 2), "row 0 of {path} holds document {heldout}, which is not in the training split"),
    ],
)
def test_rows_that_nobody_can_read_are_named(
    store: TokenStore, tmp_path: Path, piece: tuple[int | None, int, int], message: str
) -> None:
    path, heldout = tmp_path / "rows.parquet", int(store.heldout[0])
    write(path, store)
    number, start, stop = piece
    if number == 0:
        number = int(store.train[0])
        message = message.replace("document 0", f"document {number}").replace("has 4", f"has {store.lengths[number]}")
    held = {"document": heldout if number is None else number, "source": "", "start": start, "stop": stop}
    change(path, documents=[[held]])
    with pytest.raises(DataError) as caught:
        loader_of(store, manifest=read_manifest(path))
    assert caught.value.message == message.format(path=path, heldout=heldout)


def test_a_file_that_is_none(store: TokenStore, tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    with pytest.raises(DataError, match="cannot be read: No such file or directory"):
        read_manifest(path)
    path.write_text("rows")
    with pytest.raises(DataError, match="cannot be read: "):
        read_manifest(path)
    pq.write_table(pa.table({"text": ["a"]}), path)
    with pytest.raises(DataError, match="is not a manifest of this version") as caught:
        read_manifest(path)
    assert caught.value.hint == "write one with: longspan pack"
    loader = loader_of(store)
    write_manifest(path, [], store, loader.stream, 1, COUNTED)
    with pytest.raises(DataError, match="has no row"):
        read_manifest(path)


def test_whole_or_not_at_all(store: TokenStore, tmp_path: Path) -> None:
    path = tmp_path / "out" / "rows.parquet"
    loader = loader_of(store)

    def packs() -> Any:
        yield Pack(0, loader.packs(1).__next__()[1], no_counts([]))
        raise DataError("stop")

    with pytest.raises(DataError, match=r"cannot be written: .*No such file") as caught:
        write_manifest(path, packs(), store, loader.stream, 1, COUNTED)
    assert caught.value.hint == "name a file in an existing folder"
    path.parent.mkdir()
    path.write_text("before")
    with pytest.raises(DataError, match="stop"):
        write_manifest(path, packs(), store, loader.stream, 1, COUNTED)
    assert [file.name for file in path.parent.iterdir()] == ["rows.parquet"]
    assert path.read_text() == "before"


def test_the_store_keeps_the_names_of_sources(store: TokenStore) -> None:
    assert [name.rpartition("/")[2] for name in store.sources] == [f"corpus.jsonl:{i + 1}" for i in range(10)]
    assert TokenStore(**{**vars_of(store), "sources_file": None}).sources == [""] * 10
    assert store.sources_file is not None
    store.sources_file.write_text('"one"\n')
    with pytest.raises(DataError, match="is damaged: 1 names of 10 documents"):
        _ = TokenStore(**vars_of(store)).sources


def vars_of(store: TokenStore) -> dict[str, Any]:
    return {name: value for name, value in vars(store).items() if name != "sources"}


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    """A file's name may be any bytes."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "na\udcefve.txt").write_text("one text")
    store = open_store(DataConfig(paths=(str(folder),), seq_len=8, cache_dir=tmp_path / "cache", heldout_fraction=0))
    assert store.sources[0].endswith("na\udcefve.txt")
    write(tmp_path / "rows.parquet", store)
    (row,) = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    assert row["documents"][0]["source"].endswith("na\\udcefve.txt")
    assert np.array_equal(next(loader_of(store, manifest=read_manifest(tmp_path / "rows.parquet"))).lengths, [9])


def test_a_manifest_with_the_keys_of_before_is_read(store: TokenStore, tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    write(path, store)
    table = pq.read_table(path)
    text = table.schema.metadata[b"longspan"].decode()
    for old in ("row_tokens", "wire_dtype", "slots_multiple_of"):
        assert f'"{RENAMED[old]}"' in text
        text = text.replace(f'"{RENAMED[old]}"', f'"{old}"')
    pq.write_table(table.replace_schema_metadata({b"longspan": text.encode()}), path)
    _, about = read_table(path, ["tokens"])
    assert about["stream"]["seq_len"] == 20
    assert about["counted"]["comm_dtype"] is None
    again = loader_of(store, manifest=read_manifest(path))
    assert [next(again).digest() for _ in range(3)] == [
        next(loader).digest() for loader in [loader_of(store)] for _ in range(3)
    ]
