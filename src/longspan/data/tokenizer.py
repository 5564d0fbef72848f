"""Convert text to token ids and back: by plain bytes, without files, or by a Hugging Face `tokenizer.json`.
Fingerprints identify the mapping: a cache or a run does not continue if the mapping has changed.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from longspan.errors import DataError


class Tokenizer(Protocol):
    """Interface of a tokenizer in the data pipeline."""

    @property
    def vocab_size(self) -> int:
        """Exclusive upper bound of the ids."""

    @property
    def eos_id(self) -> int:
        """Id appended to every document."""

    @property
    def fingerprint(self) -> str:
        """Hash of the mapping; equal only if the same text gives the same ids."""

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        """Return the ids of `text`, int64 (n,), without special tokens."""

    def decode(self, ids: npt.ArrayLike) -> str:
        """Return the text of `ids` (n,)."""


def load_tokenizer(name: str | os.PathLike[str]) -> Tokenizer:
    """Load `"bytes"`, or the tokenizer.json at a path or in a folder. Raises DataError: see `HuggingFaceTokenizer`."""
    return ByteTokenizer() if name == "bytes" else HuggingFaceTokenizer(name)


class ByteTokenizer:
    """Tokenizer of UTF-8 bytes. The NUL byte, which does not occur in text, ends a document."""

    vocab_size = 256
    eos_id = 0
    fingerprint = "bytes"

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)

    def decode(self, ids: npt.ArrayLike) -> str:
        """Return the text of `ids` (n,). A truncated character becomes U+FFFD. Raises DataError: an id above 255."""
        array = np.asarray(ids, dtype=np.int64)
        if array.size and (array.min() < 0 or array.max() > 255):
            raise DataError(f"ids from {array.min()} to {array.max()} are not bytes (0 to 255)")
        return array.astype(np.uint8).tobytes().decode(errors="replace")


class HuggingFaceTokenizer:
    """Tokenizer from a `tokenizer.json`, run by the `tokenizers` library without special tokens.

    The end-of-document token is `eos` (an id or a token). Default: the eos token in `tokenizer_config.json`,
    `special_tokens_map.json` or `config.json` in the same folder, in this order.

    Raises DataError: a missing or unreadable file, no end-of-document token, or a token outside the vocabulary.
    """

    def __init__(self, path: str | os.PathLike[str], *, eos: int | str | None = None) -> None:
        file = Path(path)
        file = file / "tokenizer.json" if file.is_dir() else file
        if not file.is_file():
            raise DataError(
                f"tokenizer {os.fspath(path)!r} is not a tokenizer.json or a folder with one: {file} is missing",
                hint='name such a file or folder, or "bytes"',
            )
        import tokenizers  # slow to import, and not needed for bytes

        data = file.read_bytes()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(data.decode())
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{file} cannot be read as a tokenizer: {error}") from error
        self._tokenizer.no_truncation()  # a saved limit would cut documents silently
        self._tokenizer.no_padding()
        self.vocab_size = max(self._tokenizer.get_vocab().values()) + 1
        self.eos_id = self._eos_id(_declared_eos(file.parent) if eos is None else eos, file)
        self.fingerprint = hashlib.sha256(data + f"\neos {self.eos_id}".encode()).hexdigest()

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def decode(self, ids: npt.ArrayLike) -> str:
        return str(self._tokenizer.decode(np.asarray(ids, dtype=np.int64).tolist(), skip_special_tokens=False))

    def _eos_id(self, eos: int | str | None, file: Path) -> int:
        if eos is None:
            raise DataError(
                f"{file.parent} defines no end-of-document token: eos_token is in neither tokenizer_config.json nor "
                "special_tokens_map.json, and eos_token_id is not in config.json",
                hint="set one of these keys, or pass eos",
            )
        eos_id = self._tokenizer.token_to_id(eos) if isinstance(eos, str) else eos
        if eos_id is None or not 0 <= eos_id < self.vocab_size:
            raise DataError(f"end-of-document token {eos!r} is not among the {self.vocab_size} tokens of {file}")
        return int(eos_id)


def _declared_eos(folder: Path) -> int | str | None:
    for name, key in (
        ("tokenizer_config.json", "eos_token"),
        ("special_tokens_map.json", "eos_token"),
        ("config.json", "eos_token_id"),
    ):
        eos = _read_json(folder / name).get(key)
        eos = eos.get("content") if isinstance(eos, dict) else eos  # an AddedToken, written out
        eos = eos[0] if isinstance(eos, list) and eos else eos  # several ids end a chat; the first ends a text
        if isinstance(eos, int | str):
            return eos
    return None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    return value if isinstance(value, dict) else {}
