"""DataConfig: the corpus, the tokenizer, the row length, the packing and the held-out split of a run."""

import tempfile
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from longspan.data.fit import FitConfig
from longspan.errors import SpecError


class DataConfig(BaseModel):
    """The data of a run. Raises pydantic.ValidationError (a ValueError): an unknown key, a value out of range."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    paths: Annotated[
        tuple[str, ...],
        Field(min_length=1),
        BeforeValidator(lambda given: (given,) if isinstance(given, str) else given),
    ]
    """One path or a list: files, folders, or "python:stdlib" (see `read_documents`)."""
    suffixes: tuple[Annotated[str, Field(pattern=r"^\.")], ...] | None = None
    """Endings of the files read from folders, such as (".py",). Default: every file."""
    text_field: str = "text"
    """Field (JSON lines) or column (Parquet) that holds the text."""
    on_error: Literal["raise", "skip"] = "raise"
    """Raise on a file, line or row that cannot be read, or skip it with a warning."""
    tokenizer: str = "bytes"
    """"bytes", or the path of a tokenizer.json or of a folder that holds one."""
    seq_len: Annotated[int, Field(ge=1)]
    """Tokens per row: the global sequence length S of a micro-batch of one row."""
    packing: Literal["stream", "fit"] = "stream"
    """"stream": documents concatenated and cut at row ends. "fit": complete documents in rows of up to `seq_len` tokens."""
    fit: FitConfig | None = None
    """Options of packing "fit"."""
    manifest: Path | None = None
    """Manifest written by `longspan pack`: every epoch trains on exactly the manifest's rows, in order. All other
    settings of this section must be those used to pack. Default: pack rows at start."""
    heldout_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.02
    """Fraction of the documents held out for evaluation, at least one document; 0 holds out none."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the split and of the shuffle."""
    shuffle: bool = True
    """Shuffle the documents in every epoch, each time differently."""
    max_documents: Annotated[int, Field(ge=1)] | None = None
    """Read at most this many documents."""
    cache_dir: Path = Field(default_factory=lambda: Path(tempfile.gettempdir()) / "longspan")
    """Folder for tokenised corpora."""

    @property
    def fit_options(self) -> FitConfig | None:
        """The `fit` argument of `Loader`: None for packing "stream"."""
        return None if self.packing == "stream" else self.fit or FitConfig()

    @model_validator(mode="after")
    def _check(self) -> "DataConfig":
        if self.packing == "stream" and self.fit is not None:
            options = ", ".join(f"fit.{name}={getattr(self.fit, name)!r}" for name in sorted(self.fit.model_fields_set))
            raise SpecError(
                f'{options or "fit"} has no effect with packing "stream"',
                hint='leave the fit options out, or set packing="fit"',
            )
        if self.fit is not None:
            self.fit.check(self.seq_len)
        return self
