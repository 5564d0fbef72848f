"""Documents are read in one order everywhere, and what cannot be read is named."""

import json
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longspan.data import Document, read_documents
from longspan.errors import DataError


def lines(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def failure(paths, **options):
    with pytest.raises(DataError) as caught:
        list(read_documents(paths, **options))
    return caught.value


def test_a_text_file_is_one_document_without_its_byte_order_mark(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_bytes("\ufeffone\r\ntwo ä".encode())
    assert list(read_documents(path)) == [Document("one\r\ntwo ä", str(path))]


def test_a_folder_is_read_sorted_and_recursively_without_hidden_entries(tmp_path):
    for name in ("b.py", "a/z.py", "a.py", "c.md", ".git/x.py", ".hidden.py", "a/deep/er.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    found = list(read_documents([tmp_path], suffixes=(".py",)))
    assert [document.text for document in found] == ["a.py", "a/deep/er.py", "a/z.py", "b.py"]
    assert [document.source for document in found] == [f"{tmp_path}/{document.text}" for document in found]
    assert [document.text for document in read_documents(tmp_path)][-1] == "c.md"


@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.json"])
def test_json_lines_name_file_and_line_and_skip_blank_ones(tmp_path, name):
    path = tmp_path / name
    path.write_text('{"text": "one"}\n\n{"text": ""}\n{"text": " \\n"}\n{"id": 5, "text": "five"}')
    assert list(read_documents(path)) == [Document("one", f"{path}:1"), Document("five", f"{path}:5")]


def test_parquet_is_read_by_row_batches(tmp_path):
    path = tmp_path / "corpus.parquet"
    pq.write_table(pa.table({"id": range(600), "body": [f"text {i}" for i in range(600)]}), path, row_group_size=100)
    found = list(read_documents(path, text_field="body"))
    assert len(found) == 600
    assert found[599] == Document("text 599", f"{path}:600")


def test_paths_are_read_in_the_order_given(tmp_path):
    second = lines(tmp_path / "a.jsonl", {"text": "second"})
    first = lines(tmp_path / "b.jsonl", {"text": "first"})
    assert [document.text for document in read_documents([first, second])] == ["first", "second"]


def test_the_standard_library_is_a_corpus():
    found = list(read_documents("python:stdlib"))
    sources = [document.source for document in found]
    assert sources == sorted(sources)
    assert {"python:stdlib/json/decoder.py", "python:stdlib/os.py"} <= set(sources)
    assert not [source for source in sources if "site-packages" in source or "/test" in source]
    assert sum(len(document.text) for document in found) > 5_000_000


def test_a_missing_path_fails_before_the_first_document(tmp_path):
    with pytest.raises(DataError, match=f"path {tmp_path}/none does not exist") as caught:
        read_documents(tmp_path / "none")
    assert caught.value.hint == 'name a file, a folder or "python:stdlib"'


def test_text_that_is_not_utf8_names_line_and_byte_offset(tmp_path):
    (tmp_path / "ok.py").write_text("fine")
    (tmp_path / "z.py").write_bytes(b"first\nsecond \xe9t\xe9\n")
    assert failure(tmp_path).message == f"{tmp_path}/z.py is not UTF-8: byte 0xe9 at offset 13, line 2"


def test_json_that_is_not_utf8_counts_the_offset_from_the_start_of_the_file(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_bytes(b'{"text": "one"}\n{"text": "\xff"}\n')
    assert failure(path).message == f"{path} is not UTF-8: byte 0xff at offset 26, line 2"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": ', ":2 is not JSON: Expecting value"),
        ("[1]", ":2 holds a list, not an object"),
        ('{"body": "x", "id": 3}', ":2 has no field 'text'; its fields are 'body', 'id'"),
        ("{}", ":2 has no field 'text'; its fields are none"),
        ('{"id": 3, "text": null}', ":2: field 'text' is a NoneType, not a string; its fields are 'id', 'text'"),
        ('{"text": "a\\ud800"}', ":2: field 'text' has a lone surrogate at character 1"),
        ('{"text": %s}' % ("9" * 5000), ":2 is not JSON: Exceeds the limit"),
    ],
)
def test_a_bad_json_line_is_named(tmp_path, line, message):
    path = tmp_path / "c.jsonl"
    path.write_text('{"text": "one"}\n' + line + "\n")
    assert failure(path).message.startswith(f"{path}{message}")


def test_parquet_without_the_column_lists_those_it_has(tmp_path):
    path = tmp_path / "c.parquet"
    pq.write_table(pa.table({"body": ["x"], "id": [1]}), path)
    assert failure(path).message == f"{path} has no column 'text'; its columns are 'body', 'id'"
    assert failure(path, text_field="id").message == f"{path}: column 'id' is int64, not string"


def test_parquet_rows_that_are_null_or_not_utf8_are_named(tmp_path):
    path = tmp_path / "c.parquet"
    broken = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff"], pa.binary()).buffers())
    pq.write_table(pa.table({"text": pa.chunked_array([["one", None, "three"], broken])}), path)
    assert failure(path).message == f"{path}:2: column 'text' is null"
    with pytest.warns(UserWarning, match=rf"skipped 2 item\(s\) that cannot be read, first {path}:2"):
        assert [d.text for d in read_documents(path, on_error="skip")] == ["one", "three"]


def test_a_file_that_is_no_parquet_is_named(tmp_path):
    path = tmp_path / "c.parquet"
    path.write_text("not one at all")
    assert failure(path).message.startswith(f"{path} cannot be read as Parquet: ")


def test_an_empty_corpus_is_an_error(tmp_path):
    path = tmp_path / "empty.txt"
    path.write_text(" \n")
    assert failure(path).message == f"no document with text in 1 file(s), 0 item(s) skipped: {path}"


def test_a_folder_without_a_match_is_an_error(tmp_path):
    (tmp_path / "a.md").write_text("x")
    assert (
        failure(tmp_path, suffixes=(".py", ".pyi")).message == f"folder {tmp_path} has no file that ends in .py, .pyi"
    )
    assert failure([]).message == "no paths were given"


def test_skipping_warns_once_with_count_and_first_name(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_bytes(b'{"text": "one"}\nnot json\n\xff\n{"text": 4}\n{"text": "five"}\n')
    (tmp_path / "d.txt").write_bytes(b"\xff")
    with pytest.warns(UserWarning, match="skipped") as caught:
        found = list(read_documents(tmp_path, on_error="skip"))
    assert [document.text for document in found] == ["one", "five"]
    assert [str(w.message) for w in caught] == [f"skipped 4 item(s) that cannot be read, first {path}:2"]


def test_skipping_is_told_even_if_the_reader_stops_early(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text('not json\n{"text": "two"}\n{"text": "three"}\n')
    documents = read_documents(path, on_error="skip")
    assert next(documents).text == "two"
    with pytest.warns(UserWarning, match="skipped 1"):
        documents.close()


def test_a_dangling_link_is_named_and_a_pipe_is_no_document(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    os.mkfifo(tmp_path / "b.txt")
    assert [document.text for document in read_documents(tmp_path)] == ["x"]
    (tmp_path / "c.txt").symlink_to(tmp_path / "gone")
    assert failure(tmp_path).message == f"cannot read {tmp_path}/c.txt: No such file or directory"


def test_options_are_checked(tmp_path):
    (tmp_path / "a.py").write_text("x")
    assert "on_error='ignore' is unknown" in failure(tmp_path, on_error="ignore").message
    assert "suffixes='.py' is not a sequence" in failure(tmp_path, suffixes=".py").message
    assert "suffixes=('py',) is not a sequence" in failure(tmp_path, suffixes=("py",)).message


def test_reading_needs_no_torch():
    code = "import sys, longspan.data; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
