"""Read text files, folders, JSON lines, Parquet and Python's own sources as one stream of documents.
The order is the same on every machine. An unreadable file, line or Parquet row is reported by name, never ignored silently.
"""

import json
import os
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from longspan.errors import DataError

STDLIB = "python:stdlib"
_STDLIB_EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
_PARQUET_ROWS = (
    256  # Parquet rows decoded at a time: enough to amortise the call, few enough to hold long documents in memory
)


@dataclass(frozen=True)
class Document:
    """One text and its source, such as `notes.txt` or `corpus.jsonl:17` (lines and rows count from 1)."""

    text: str
    source: str


def read_documents(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    text_field: str = "text",
    suffixes: Sequence[str] | None = None,
    on_error: Literal["raise", "skip"] = "raise",
) -> Iterator[Document]:
    """Yield the documents of `paths` in order. Empty and blank documents are left out.

    A path is a text file (one document), a `.jsonl` or `.json` file (one object per line), a `.parquet` file, a folder of
    these, or `python:stdlib`: the `.py` files of Python's standard library, without tests and installed packages.
    Folders are read recursively in sorted order, without hidden entries. If `suffixes` are given, other files in folders are
    ignored.

    With `on_error="skip"`, unreadable items are skipped, and one warning gives their number and the first name.

    Raises DataError: a missing path, a folder without a matching file, bytes that are not UTF-8, a line that is not
    a JSON object with the string `text_field`, a Parquet file without that column, a corpus without any text.
    """
    if on_error not in ("raise", "skip"):
        raise DataError(f"on_error={on_error!r} is unknown", hint='use "raise" or "skip"')
    return _documents(corpus_files(paths, suffixes), text_field, on_error == "skip")


@dataclass(frozen=True)
class SourceFile:
    """A file to read. `name` is its name in sources and errors, as the user would write the path."""

    name: str
    path: Path


def corpus_files(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], suffixes: Sequence[str] | None = None
) -> list[SourceFile]:
    """Return the files that `read_documents` reads, in order. Raises DataError: see `read_documents`."""
    if isinstance(suffixes, str) or any(not suffix.startswith(".") for suffix in suffixes or ()):
        raise DataError(f"suffixes={suffixes!r} is not a sequence of file endings", hint='write (".py", ".md")')
    listed = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not listed:
        raise DataError("no paths were given", hint=f'name a file, a folder or "{STDLIB}"')
    return [file for path in listed for file in _files_of(os.fspath(path), suffixes)]


def _files_of(path: str, suffixes: Sequence[str] | None) -> list[SourceFile]:
    if path == STDLIB:
        return _walk(Path(sysconfig.get_path("stdlib")), STDLIB, (".py",), _STDLIB_EXCLUDED)
    if os.path.isdir(path):
        files = _walk(Path(path), path, suffixes, set())
        if not files:
            ending = f" that ends in {', '.join(suffixes)}" if suffixes else ""
            raise DataError(f"folder {path} has no file{ending}", hint="name another folder, or set suffixes")
        return files
    if not os.path.exists(path):
        raise DataError(f"path {path} does not exist", hint=f'name a file, a folder or "{STDLIB}"')
    return [SourceFile(path, Path(path))]


def _walk(root: Path, name: str, suffixes: Sequence[str] | None, excluded: set[str]) -> list[SourceFile]:
    found: list[str] = []
    for folder, folders, names in os.walk(root, onerror=_cannot_list):
        folders[:] = [f for f in folders if not f.startswith(".") and f not in excluded]
        for entry in names:
            path = Path(folder, entry)
            wanted = not entry.startswith(".") and (suffixes is None or entry.endswith(tuple(suffixes)))
            # Keep a dangling link: reading it raises an error with its name. Leave out pipes and sockets: reading would hang.
            if wanted and (path.is_file() or not path.exists()):
                found.append(path.relative_to(root).as_posix())
    return [SourceFile((PurePosixPath(name) / relative).as_posix(), root / relative) for relative in sorted(found)]


def _cannot_list(error: OSError) -> None:
    raise DataError(f"cannot list folder {error.filename}: {error.strerror}") from error


def _documents(files: list[SourceFile], text_field: str, skip: bool) -> Iterator[Document]:
    skipped: list[str] = []

    def reject(source: str, error: DataError) -> None:
        if not skip:
            raise error
        skipped.append(source)

    empty = True
    try:
        for file in files:
            for document in _read_file(file, text_field, reject):
                if document.text and not document.text.isspace():
                    empty = False
                    yield document
        if empty:
            names = ", ".join(file.name for file in files[:3]) + (", ..." if len(files) > 3 else "")
            raise DataError(
                f"no document with text in {len(files)} file(s), {len(skipped)} item(s) skipped: {names}",
                hint="name other paths, or another text_field",
            )
    finally:  # also when the caller stops early
        if skipped:
            warnings.warn(f"skipped {len(skipped)} item(s) that cannot be read, first {skipped[0]}", stacklevel=2)


# Raises the error, or records the source as skipped.
_Reject = Callable[[str, DataError], None]


def _read_file(file: SourceFile, text_field: str, reject: _Reject) -> Iterator[Document]:
    readers = {".jsonl": _read_json_lines, ".json": _read_json_lines, ".parquet": _read_parquet}
    try:
        yield from readers.get(file.path.suffix, _read_text)(file, text_field, reject)
    except OSError as error:
        reject(file.name, DataError(f"cannot read {file.name}: {error.strerror or error}"))


def _read_text(file: SourceFile, text_field: str, reject: _Reject) -> Iterator[Document]:
    data = file.path.read_bytes()
    try:
        yield Document(data.decode().removeprefix("\ufeff"), file.name)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        reject(file.name, _not_utf8(file, line, error.start, data[error.start]))


def _read_json_lines(file: SourceFile, text_field: str, reject: _Reject) -> Iterator[Document]:
    offset = 0
    with file.path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            source = f"{file.name}:{number}"
            try:
                text = line.decode().removeprefix("\ufeff")
                if text.strip():
                    yield Document(_json_text(text, source, text_field), source)
            except UnicodeDecodeError as error:
                reject(source, _not_utf8(file, number, offset + error.start, line[error.start]))
            except DataError as error:
                reject(source, error)
            offset += len(line)


def _json_text(line: str, source: str, text_field: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{source} is not JSON: {error}", hint="write one JSON object per line") from error
    if not isinstance(record, dict):
        raise DataError(
            f"{source} holds a {type(record).__name__}, not an object",
            hint="write one JSON object per line; `jq -c '.[]'` turns an array into lines",
        )
    fields = f"its fields are {', '.join(map(repr, record)) or 'none'}"
    if text_field not in record:
        raise DataError(f"{source} has no field {text_field!r}; {fields}", hint="set text_field")
    text = record[text_field]
    if not isinstance(text, str):
        kind = type(text).__name__
        raise DataError(f"{source}: field {text_field!r} is a {kind}, not a string; {fields}", hint="set text_field")
    try:
        text.encode()  # an escaped lone surrogate is valid JSON, but no tokenizer accepts it
    except UnicodeEncodeError as error:
        raise DataError(f"{source}: field {text_field!r} has a lone surrogate at character {error.start}") from error
    return text


def _read_parquet(file: SourceFile, text_field: str, reject: _Reject) -> Iterator[Document]:
    import pyarrow as pa  # slow to import, and most corpora do not need it
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file.path) as table:
            _check_column(file, {field.name: str(field.type) for field in table.schema_arrow}, text_field)
            batches = table.iter_batches(batch_size=_PARQUET_ROWS, columns=[text_field])
            values = (value for batch in batches for value in batch.column(0))
            for row, value in enumerate(values, start=1):
                source = f"{file.name}:{row}"
                try:
                    text = value.as_py()
                except UnicodeDecodeError as error:
                    reject(source, DataError(f"{source} is not UTF-8: {error}", hint='fix it, or set on_error="skip"'))
                    continue
                if text is None:
                    reject(
                        source,
                        DataError(f"{source}: column {text_field!r} is null", hint='fix it, or set on_error="skip"'),
                    )
                else:
                    yield Document(text, source)
    except pa.ArrowException as error:
        reject(file.name, DataError(f"{file.name} cannot be read as Parquet: {error}"))


def _check_column(file: SourceFile, columns: dict[str, str], text_field: str) -> None:
    if text_field not in columns:
        raise DataError(
            f"{file.name} has no column {text_field!r}; its columns are {', '.join(map(repr, columns)) or 'none'}",
            hint="set text_field",
        )
    if columns[text_field] not in ("string", "large_string", "string_view"):
        raise DataError(
            f"{file.name}: column {text_field!r} is {columns[text_field]}, not string", hint="set text_field"
        )


def _not_utf8(file: SourceFile, line: int, offset: int, byte: int) -> DataError:
    return DataError(
        f"{file.name} is not UTF-8: byte {byte:#04x} at offset {offset}, line {line}",
        hint='convert it, narrow suffixes, or set on_error="skip"',
    )
