"""TokenStore: a corpus tokenised once into memory-mapped arrays, with documents split into training and held-out.
The cache is keyed by its inputs (files, tokenizer, options) and published atomically. When several processes open the same
corpus, one process tokenises and the other processes wait.
"""

import fcntl
import hashlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from longspan.data.data_config import DataConfig
from longspan.data.documents import Document, corpus_files, read_documents
from longspan.data.packing import tokenize
from longspan.data.tokenizer import Tokenizer, load_tokenizer
from longspan.errors import DataError

_FORMAT = 2  # version of the cache folder; part of its key
_CHUNK = 1 << 22  # tokens counted at a time
Tokens = npt.NDArray[np.unsignedinteger[Any]]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TokenStore:
    """Concatenated tokens of N documents, and their split into training and held-out documents.

    `tokens` uint16 or uint32 (num_tokens,), read-only. Document `i` is `tokens[offsets[i]:offsets[i + 1]]`; its last
    token is the tokenizer's eos. `train` and `heldout` are document numbers, ascending and disjoint, and together complete.
    `corpus` is a sha256 of tokens, offsets and source names; `tokenizer` is the tokenizer's fingerprint.
    """

    tokens: Tokens
    offsets: IntArray
    train: IntArray
    heldout: IntArray
    vocab_size: int
    tokenizer: str
    corpus: str
    heldout_fraction: float
    seed: int
    sources_file: Path | None = None

    @cached_property
    def sources(self) -> list[str]:
        """`Document.source` of each document; all "" if the store keeps no names. Raises DataError: a damaged cache."""
        if self.sources_file is None:
            return [""] * self.num_documents
        try:
            names = [json.loads(line) for line in self.sources_file.open()]
            if len(names) != self.num_documents:
                raise ValueError(f"{len(names)} names of {self.num_documents} documents")
        except (OSError, ValueError) as error:
            raise _damaged(self.sources_file.parent, error) from error
        return names

    @property
    def num_documents(self) -> int:
        return self.offsets.size - 1

    @property
    def num_tokens(self) -> int:
        return self.tokens.size

    @property
    def lengths(self) -> IntArray:
        """Tokens of each document, int64 (N,)."""
        return np.diff(self.offsets)

    def document(self, number: int, start: int = 0, stop: int | None = None) -> Tokens:
        """Return a view of tokens `start` to `stop` of one document."""
        return self.tokens[self.offsets[number] : self.offsets[number + 1]][start:stop]


def open_store(config: DataConfig, progress: Callable[[int], None] | None = None) -> TokenStore:
    """Open the tokenised corpus of `config` from its cache, or tokenise it.

    `progress`, if given, is called after each tokenised document with the number of documents done. If another process is
    tokenising the same corpus, wait for it without a timeout and raise its error if it fails.

    Raises DataError: see `read_documents` and `load_tokenizer`; a corpus of one document with `heldout_fraction` above 0; a
    cache folder that cannot be written or is damaged.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    folder = config.cache_dir / _cache_key(config, tokenizer)
    if not folder.is_dir():
        documents = read_documents(
            config.paths, text_field=config.text_field, suffixes=config.suffixes, on_error=config.on_error
        )
        _write(folder, itertools.islice(documents, config.max_documents), tokenizer, progress)
    return _read(folder, config.heldout_fraction, config.seed)


def unigram_entropy(store: TokenStore) -> float:
    """Return the entropy of the token frequencies, in nats per token: the best loss of a model that ignores context."""
    counts = np.zeros(store.vocab_size, np.int64)
    for start in range(0, store.num_tokens, _CHUNK):
        counts += np.bincount(store.tokens[start : start + _CHUNK], minlength=store.vocab_size)
    frequencies = counts[counts > 0] / store.num_tokens
    return float(-(frequencies * np.log(frequencies)).sum()) + 0.0  # turns -0.0, for a single token, into 0.0


def split_documents(source_keys: npt.NDArray[np.uint64], fraction: float, seed: int) -> tuple[IntArray, IntArray]:
    """Return document numbers (train, held-out), ascending. The documents nearest to the seed's key by XOR are held out.

    The choice depends only on source names and the seed. `round(fraction * N)` documents are held out, at least 1 and at most
    N - 1; none if `fraction` is 0. Raises DataError: a single document with `fraction` above 0.
    """
    num_documents = source_keys.size
    count = min(max(round(fraction * num_documents), 1), num_documents - 1) if fraction > 0 else 0
    if fraction > 0 and count == 0:
        raise DataError(
            f"{num_documents} document cannot be split into training and held-out documents",
            hint="set heldout_fraction=0, or give more documents",
        )
    order = np.argsort(source_keys ^ source_key(f"seed {seed}"), kind="stable")
    return np.sort(order[count:]), np.sort(order[:count])


def source_key(source: str) -> np.uint64:
    """Return a 64-bit hash of a source name, the same on every machine."""
    return np.uint64(int.from_bytes(hashlib.blake2b(source.encode(errors="surrogateescape"), digest_size=8).digest()))


def _cache_key(config: DataConfig, tokenizer: Tokenizer) -> str:
    """Return a hash of all inputs that determine tokens, offsets and sources; split, seed and row length do not."""
    files = []
    for file in corpus_files(config.paths, config.suffixes):
        try:
            stat = file.path.stat()
        except OSError as error:
            stat = None
            if config.on_error == "raise":
                raise DataError(f"cannot read {file.name}: {error.strerror}") from error
        files.append([file.name, str(file.path.resolve()), stat and [stat.st_size, stat.st_mtime_ns]])
    made_of = [_FORMAT, files, tokenizer.fingerprint, config.text_field, config.on_error, config.max_documents]
    return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:32]


def _write(
    folder: Path, documents: Iterable[Document], tokenizer: Tokenizer, progress: Callable[[int], None] | None
) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(folder.with_suffix(".lock")):
            if folder.is_dir():
                return
            scratch = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
            try:
                _write_arrays(scratch, documents, tokenizer, progress)
                _publish(scratch, folder)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"cannot write the token cache {folder}: {error}", hint="set cache_dir to a writable folder"
        ) from error


@contextmanager
def _one_at_a_time(lock: Path) -> Iterator[None]:
    """Hold a file lock inside the block. If the holder dies, the system frees the lock for the next process.

    The first holder unlinks the file. Waiting processes keep the file open. If the holder failed, every waiting process reads
    the holder's error from the file and raises the same DataError.
    """
    with lock.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            if failure := file.read():
                raise DataError(*json.loads(failure)) from None
        except OSError:
            pass  # a file system without locks: processes race, and the first published folder stays
        file.truncate(0)
        try:
            yield
        except DataError as error:
            file.write(json.dumps([error.message, error.hint]))
            raise
        finally:
            lock.unlink(missing_ok=True)


def _write_arrays(
    scratch: Path, documents: Iterable[Document], tokenizer: Tokenizer, progress: Callable[[int], None] | None
) -> None:
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    offsets, keys = [0], []
    digest = hashlib.sha256()
    with (scratch / "tokens.bin").open("wb") as file, (scratch / "sources.jsonl").open("w") as sources:
        for document in documents:
            (ids,) = tokenize([document], tokenizer)
            data = ids.astype(dtype).tobytes()
            file.write(data)
            digest.update(data)
            offsets.append(offsets[-1] + ids.size)
            keys.append(source_key(document.source))
            sources.write(json.dumps(document.source) + "\n")
            if progress is not None:
                progress(len(keys))
    for name, values in (("offsets", np.array(offsets, "<i8")), ("source_keys", np.array(keys, "<u8"))):
        np.save(scratch / f"{name}.npy", values)
        digest.update(values.tobytes())
    meta = {
        "dtype": dtype.str,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer.fingerprint,
        "corpus": digest.hexdigest(),
    }
    (scratch / "meta.json").write_text(json.dumps(meta))


def _publish(scratch: Path, folder: Path) -> None:
    try:
        os.replace(scratch, folder)
    except OSError:
        if not folder.is_dir():  # an existing folder comes from another process: same key, same contents
            raise


def _read(folder: Path, heldout_fraction: float, seed: int) -> TokenStore:
    try:
        meta = json.loads((folder / "meta.json").read_text())
        offsets = np.load(folder / "offsets.npy")
        tokens = np.memmap(folder / "tokens.bin", dtype=meta["dtype"], mode="r")
        keys = np.load(folder / "source_keys.npy")
        if tokens.size != offsets[-1] or keys.size != offsets.size - 1:
            raise ValueError(
                f"{tokens.size} tokens, {keys.size} documents; offsets imply {offsets[-1]}, {offsets.size - 1}"
            )
    except (OSError, ValueError, KeyError) as error:
        raise _damaged(folder, error) from error
    train, heldout = split_documents(keys, heldout_fraction, seed)
    return TokenStore(
        tokens=tokens,
        offsets=offsets,
        train=train,
        heldout=heldout,
        vocab_size=meta["vocab_size"],
        tokenizer=meta["tokenizer"],
        corpus=meta["corpus"],
        heldout_fraction=heldout_fraction,
        seed=seed,
        sources_file=folder / "sources.jsonl",
    )


def _damaged(folder: Path, error: Exception) -> DataError:
    return DataError(f"token cache {folder} is damaged: {error}", hint="delete this folder; the next run rebuilds it")
