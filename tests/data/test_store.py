"""A corpus is tokenised once, its cache appears whole, and its split depends on names and seed alone."""

import errno
import json
import math
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest

from longspan.data import DataConfig, open_store, unigram_entropy
from longspan.data import store as store_module
from longspan.data.store import source_key, split_documents
from longspan.errors import DataError


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(50)))
    return DataConfig(paths=(str(path),), seq_len=8, cache_dir=tmp_path / "cache", heldout_fraction=0.1)


def with_(config, **changes):
    return config.model_copy(update=changes)


def test_documents_are_stored_end_to_end(corpus):
    store = open_store(corpus)
    assert (store.num_documents, store.vocab_size, store.tokenizer) == (50, 256, "bytes")
    assert store.tokens.dtype == np.uint16
    assert not store.tokens.flags.writeable
    assert bytes(store.document(7).astype(np.uint8)) == b"document 7\0"
    assert bytes(store.document(12, 2, 5).astype(np.uint8)) == b"cum"
    assert store.lengths.tolist() == [11] * 10 + [12] * 40
    assert store.num_tokens == 10 * 11 + 40 * 12


def test_the_split_is_of_documents(corpus):
    store = open_store(corpus)
    assert store.heldout.size == 5
    assert sorted([*store.train, *store.heldout]) == list(range(50))
    assert open_store(corpus).heldout.tolist() == store.heldout.tolist()
    assert open_store(with_(corpus, seed=1)).heldout.tolist() != store.heldout.tolist()
    assert open_store(with_(corpus, heldout_fraction=0)).heldout.size == 0


def test_the_split_follows_names_not_places():
    keys = np.array([source_key(f"corpus.jsonl:{i}") for i in range(1000)])
    _, heldout = split_documents(keys, 0.1, 3)
    reversed_heldout = split_documents(keys[::-1], 0.1, 3)[1]
    assert sorted(keys[heldout]) == sorted(keys[::-1][reversed_heldout])
    assert heldout.size == 100
    assert 350 < heldout.mean() < 650  # spread over the corpus
    counts = sum(np.isin(np.arange(1000), split_documents(keys, 0.1, seed)[1]) for seed in range(200))
    assert counts.min() > 3  # every document is held out under some seeds
    assert counts.max() < 50  # and by none of them always


@pytest.mark.parametrize(("documents", "fraction", "expected"), [(2, 0.001, 1), (2, 0.999, 1), (3, 0.5, 2), (1, 0, 0)])
def test_at_least_one_document_on_each_side(documents, fraction, expected):
    keys = np.arange(documents, dtype=np.uint64)
    train, heldout = split_documents(keys, fraction, 0)
    assert (train.size, heldout.size) == (documents - expected, expected)


def test_one_document_cannot_be_split(tmp_path, corpus):
    with pytest.raises(DataError, match="1 document cannot be split") as caught:
        open_store(with_(corpus, max_documents=1))
    assert caught.value.hint == "set heldout_fraction=0, or give more documents"


def test_the_cache_is_used_until_something_changes(corpus):
    seen = []
    first = open_store(corpus, seen.append)
    assert seen == list(range(1, 51))
    second = open_store(with_(corpus, seed=5, seq_len=99, heldout_fraction=0.5), seen.append)
    assert len(seen) == 50
    assert second.corpus == first.corpus
    path = corpus.paths[0]
    os.utime(path, ns=(0, 0))
    assert open_store(corpus, seen.append).corpus == first.corpus
    assert len(seen) == 100  # read again, found the same
    with open(path, "a") as file:
        file.write('{"text": "new"}\n')
    assert open_store(corpus, seen.append).corpus != first.corpus
    assert open_store(with_(corpus, max_documents=4), seen.append).num_documents == 4


def open_at_once(corpus, ranks=8):
    """What each of several ranks gets or raises, and how many documents they tokenised, slowly."""
    seen, start = [], Barrier(ranks)

    def tokenised(documents):
        seen.append(documents)
        time.sleep(0.004)

    def open_one(_):
        start.wait()
        try:
            return open_store(corpus, tokenised).corpus
        except DataError as error:
            return error.message, error.hint

    with ThreadPoolExecutor(ranks) as pool:
        return set(pool.map(open_one, range(ranks))), len(seen)


def test_one_rank_tokenises_for_all(corpus):
    found, tokenised = open_at_once(corpus)
    assert (found, tokenised) == ({open_store(corpus).corpus}, 50)
    assert len(list(corpus.cache_dir.iterdir())) == 1


def test_ranks_that_waited_raise_what_made_the_one_fail(corpus):
    with open(corpus.paths[0], "a") as file:
        file.write("not json\n")
    with pytest.raises(DataError) as caught:
        open_store(corpus)
    assert open_at_once(corpus) == ({(caught.value.message, caught.value.hint)}, 50)
    assert list(corpus.cache_dir.iterdir()) == []


def test_ranks_may_race_where_files_cannot_be_locked(corpus, monkeypatch):
    def no_locks(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(store_module.fcntl, "flock", no_locks)
    found, _ = open_at_once(corpus)
    assert found == {open_store(corpus).corpus}
    assert len(list(corpus.cache_dir.iterdir())) == 1


def test_a_rank_that_is_killed_leaves_its_place_to_one_that_waits(corpus):
    open_store(corpus)
    (folder,) = corpus.cache_dir.iterdir()
    shutil.rmtree(folder)
    hold = f"import fcntl, time; f = open('{folder}.lock', 'a'); fcntl.flock(f, 2); print(flush=True); time.sleep(60)"
    with (
        subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE) as holder,
        ThreadPoolExecutor(1) as pool,
    ):
        holder.stdout.readline()
        waiting = pool.submit(open_store, corpus)
        with pytest.raises(TimeoutError):
            waiting.result(0.3)
        holder.kill()
        assert waiting.result(30).num_documents == 50
    assert list(corpus.cache_dir.iterdir()) == [folder]


def test_a_failure_leaves_no_cache(corpus):
    with open(corpus.paths[0], "a") as file:
        file.write("not json\n")
    with pytest.raises(DataError, match=":51 is not JSON"):
        open_store(corpus)
    assert list(corpus.cache_dir.iterdir()) == []


def test_a_damaged_cache_is_named(corpus):
    open_store(corpus)
    (folder,) = corpus.cache_dir.iterdir()
    with (folder / "tokens.bin").open("r+b") as file:
        file.truncate(20)
    with pytest.raises(
        DataError, match=f"token cache {folder} is damaged: 10 tokens, 50 documents; offsets imply 590, 50"
    ):
        open_store(corpus)


def test_a_cache_that_cannot_be_written_is_named(corpus, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write the token cache") as caught:
        open_store(with_(corpus, cache_dir=tmp_path / "file"))
    assert caught.value.hint == "set cache_dir to a writable folder"


def test_large_vocabularies_are_stored_in_four_bytes(corpus, monkeypatch):
    class Wide:
        vocab_size, eos_id, fingerprint = 70_000, 69_999, "wide"

        def encode(self, text):
            return np.array([65_536, 3], np.int64)

    monkeypatch.setattr(store_module, "load_tokenizer", lambda name: Wide())
    store = open_store(corpus)
    assert store.tokens.dtype == np.uint32
    assert store.document(0).tolist() == [65_536, 3, 69_999]


def test_unigram_entropy(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("aab")
    config = DataConfig(paths=(str(tmp_path / "a.txt"),), seq_len=8, heldout_fraction=0, cache_dir=tmp_path / "c")
    monkeypatch.setattr(store_module, "_CHUNK", 3)
    expected = -(0.5 * math.log(0.5) + 2 * 0.25 * math.log(0.25))  # a a b NUL
    assert unigram_entropy(open_store(config)) == pytest.approx(expected, rel=1e-12)
