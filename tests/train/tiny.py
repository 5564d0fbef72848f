"""A run small enough for a test: a corpus of random documents, a decoder of a few thousand parameters, and rows by hand."""

import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from longspan.comm.meshes import Meshes
from longspan.data import Batch
from longspan.train.axes import topology_of
from longspan.train.parallel import make_stages
from longspan.train.step import TrainStep
from longspan.train.train_config import TrainConfig

Document = tuple[list[int], list[int]]
"""Token ids, and for each whether it is to be predicted."""

MODEL = {
    "vocab_size": 256,
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "intermediate_size": 32,
    "init_std": 0.3,
}


def write_corpus(folder: Path, documents: int = 40, seed: int = 0) -> Path:
    """Text files of 5 to 90 characters."""
    draw = random.Random(seed)
    corpus = folder / "corpus"
    corpus.mkdir(parents=True)
    for number in range(documents):
        text = "".join(draw.choices("abcdefgh \n", k=draw.randint(5, 90)))
        (corpus / f"{number:03}.txt").write_text(text + "x")
    return corpus


def make_config(folder: Path | None = None, **changes: Any) -> TrainConfig:
    """A tiny run in `folder`, whose corpus is at `folder/corpus`; `parallel__cp=2` changes a field of a section."""
    folder = Path("/nowhere") if folder is None else folder
    values: dict[str, Any] = {
        "data": {"paths": [str(folder / "corpus")], "seq_len": 48, "cache_dir": str(folder / "cache")},
        "model": dict(MODEL),
        "parallel": {},
        "optim": {"lr": 0.01, "warmup_steps": 1},
        "run_dir": str(folder / "run"),
        "steps": 6,
        "dtype": "fp64",
    }
    for name, value in changes.items():
        section, nested, key = name.partition("__")
        if nested:
            values[section][key] = value
        else:
            values[section] = value
    return TrainConfig.model_validate(values)


def to_toml(config: TrainConfig) -> str:
    """The configuration as a TOML file: sections of plain values."""

    def line(key: str, value: Any) -> str:
        value = ["full" if item is None else item for item in value] if isinstance(value, list) else value
        text = str(value).lower() if isinstance(value, bool) else repr(value)
        return f"{key} = {text}\n"

    values = config.model_dump(mode="json", exclude_none=True, exclude_unset=True)
    top = "".join(line(key, value) for key, value in values.items() if not isinstance(value, dict))
    sections = (
        f"[{name}]\n" + "".join(line(key, value) for key, value in section.items())
        for name, section in values.items()
        if isinstance(section, dict)
    )
    return top + "".join(sections)


def make_meshes(config: TrainConfig) -> Meshes:
    """The ranks of a test as the run's axes."""
    return Meshes.of(topology_of(config), "cpu")


BACKEND = "aot_eager"
"""What compiles the blocks of a step: not inductor, which runs the C++ compiler for minutes."""


def make_step(config: TrainConfig) -> TrainStep:
    """A step over the ranks of a test."""
    meshes = make_meshes(config)
    with patch.object(torch, "compile", partial(torch.compile, backend=BACKEND)):
        return TrainStep(make_stages(config, meshes), meshes, config)


def random_row(seed: int, tokens: int = 45, vocab_size: int = 256) -> list[Document]:
    """Documents of uneven lengths that make `tokens` tokens; some have a prompt that is not to be predicted."""
    draw = random.Random(seed)
    row: list[Document] = []
    while tokens:
        length = min(tokens, draw.choice((1, 5, 11, 20)))
        prompt = draw.randrange(length) if draw.random() < 0.5 else 0
        row.append((draw.choices(range(vocab_size), k=length), [0] * prompt + [1] * (length - prompt)))
        tokens -= length
    return row


def make_batch(row: list[Document]) -> Batch:
    """The row as the loader would give it, but without its place in the run."""
    return Batch.from_documents([ids for ids, _ in row], [wanted for _, wanted in row])


def numbered_batch(row: list[Document], first: int) -> Batch:
    """The row whose first token is number `first` of the run."""
    batch = make_batch(row)
    return replace(batch, numbers=np.arange(first, first + batch.seq_len))
