"""DataConfig: which documents, which tokenizer, how long a row, what is held out.
A frozen record, checked when made; `open_store` and `Loader` read it.
"""

import tempfile
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from longspan.data.fit import FitConfig
from longspan.errors import SpecError


class DataConfig(BaseModel):
    """The corpus of a run. Raises pydantic.ValidationError (a ValueError): an unknown key, a value out of range."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    paths: Annotated[
        tuple[str, ...],
        Field(min_length=1),
        BeforeValidator(lambda given: (given,) if isinstance(given, str) else given),
    ]
    """Files, folders, or "python:stdlib", one or a list: see `read_documents`."""
    suffixes: tuple[Annotated[str, Field(pattern=r"^\.")], ...] | None = None
    """Endings of the files taken from folders, such as (".py",). None: every file."""
    text_field: str = "text"
    """The field or column that holds the text, in JSON lines and Parquet."""
    on_error: Literal["raise", "skip"] = "raise"
    """What to do with a file, line or row that cannot be read."""
    tokenizer: str = "bytes"
    """"bytes", or the path of a tokenizer.json or of the folder that holds one."""
    seq_len: Annotated[int, Field(ge=1)]
    """Tokens of a row: the global sequence length S of a micro-batch of one row."""
    packing: Literal["stream", "fit"] = "stream"
    """"stream": documents end to end, cut where a row ends. "fit": whole documents in rows of up to `seq_len`."""
    fit: FitConfig | None = None
    """Options of packing "fit"; None: their defaults."""
    manifest: Path | None = None
    """What `longspan pack` wrote: train on exactly these rows, in their order, every epoch. The rest of this section has to be
    what they were packed with. None: pack."""
    heldout_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.02
    """Fraction of the documents kept for evaluation, at least one document; 0: none."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of the split and of the shuffle."""
    shuffle: bool = True
    """Shuffle the documents anew in every epoch."""
    max_documents: Annotated[int, Field(ge=1)] | None = None
    """Read at most this many documents."""
    cache_dir: Path = Field(default_factory=lambda: Path(tempfile.gettempdir()) / "longspan")
    """Folder of the tokenised corpora."""

    @property
    def fit_options(self) -> FitConfig | None:
        """What `Loader` takes as `fit`: None for packing "stream"."""
        return None if self.packing == "stream" else self.fit or FitConfig()

    @model_validator(mode="after")
    def _check(self) -> "DataConfig":
        if self.packing == "stream" and self.fit is not None:
            options = ", ".join(f"fit.{name}={getattr(self.fit, name)!r}" for name in sorted(self.fit.model_fields_set))
            raise SpecError(
                f'{options or "fit"} means nothing to packing "stream"', hint='leave it out, or set packing="fit"'
            )
        if self.fit is not None:
            self.fit.check(self.seq_len)
        return self
