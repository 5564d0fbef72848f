"""The inputs of longspan and its peers: masks, heads and tensors."""

import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from longspan import Mask

Kind = Literal["causal", "window", "packed"]
BYTES_PER_TOKEN = 4


@dataclass(frozen=True)
class Case:
    """One input. `lengths` are its document lengths: one document of `seq_len` unless packed."""

    kind: Kind
    heads: int
    kv_heads: int
    seq_len: int
    lengths: tuple[int, ...]
    window: int | None = None
    head_dim: int = 64
    dtype: str = "float32"

    @property
    def name(self) -> str:
        what = {"causal": "causal", "window": f"window {self.window:,}" if self.window else "", "packed": "packed"}
        return what[self.kind] + (f", GQA {self.heads}/{self.kv_heads}" if self.heads != self.kv_heads else "")

    def __str__(self) -> str:
        return f"{self.name}: B1 H{self.heads}/{self.kv_heads} S{self.seq_len} D{self.head_dim} {self.dtype}"

    @property
    def mask(self) -> Mask:
        return Mask.documents(list(self.lengths), window=self.window)


def make_cases(seq_len: int, window: int, dtype: str = "float32") -> list[Case]:
    """Return the inputs: causal, a window, packed documents, and causal with GQA."""
    whole = (seq_len,)
    return [
        Case("causal", 8, 8, seq_len, whole, dtype=dtype),
        Case("window", 8, 8, seq_len, whole, window=window, dtype=dtype),
        Case("packed", 8, 8, seq_len, tuple(document_lengths(seq_len)), dtype=dtype),
        Case("causal", 8, 2, seq_len, whole, dtype=dtype),
    ]


def document_lengths(seq_len: int, folder: Path | None = None) -> list[int]:
    """Return lengths that fill a row of `seq_len` tokens: files of the standard library, shuffled with seed 0.

    One token is four bytes, about the ratio of a BPE tokenizer on source code. Empty files and files longer than the row are
    skipped; the last file is cut at the row end. Raises ValueError: too few files in `folder`.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    found = [path.relative_to(folder) for path in folder.rglob("*.py")]
    files = sorted(path.as_posix() for path in found if not {"site-packages", "test", "tests"} & set(path.parts))
    random.Random(0).shuffle(files)
    lengths: list[int] = []
    left = seq_len
    for file in files:
        size = -(-(folder / file).stat().st_size // BYTES_PER_TOKEN)
        if 0 < size <= seq_len:
            lengths.append(min(size, left))
            left -= lengths[-1]
            if not left:
                return lengths
    raise ValueError(f"the files in {folder} hold fewer than {seq_len} tokens")


def make_inputs(case: Case) -> list[torch.Tensor]:
    """Return global q, k, v and the output's gradient, `(1, heads, S, D)`, the same on every process."""
    generator = torch.Generator().manual_seed(0)
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    return [
        torch.randn(1, num, case.seq_len, case.head_dim, generator=generator).to(getattr(torch, case.dtype))
        for num in heads
    ]
