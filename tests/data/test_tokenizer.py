"""Bytes and Hugging Face tokenizers: round trips, end-of-document ids, and errors that say what is missing."""

import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from longspan.data import ByteTokenizer, HuggingFaceTokenizer, load_tokenizer
from longspan.errors import DataError


@pytest.fixture
def folder(tmp_path):
    vocab = {"<unk>": 0, "hello": 1, "world": 2}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<end> $A <end>", special_tokens=[("<end>", 3)]
    )
    tokenizer.enable_truncation(2)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@given(st.text())
def test_bytes_round_trip(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int64
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_bytes_decode_a_cut_character_and_refuse_other_ids():
    assert ByteTokenizer().decode([0x61, 0xC3]) == "a\ufffd"
    with pytest.raises(DataError, match="ids from 1 to 256 are not bytes"):
        ByteTokenizer().decode([1, 256])


def test_bytes_end_documents_with_nul():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.fingerprint) == (256, 0, "bytes")


def test_hugging_face_adds_nothing_and_cuts_nothing(folder):
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    for path in (folder, folder / "tokenizer.json", str(folder)):
        tokenizer = load_tokenizer(path)
        assert (tokenizer.vocab_size, tokenizer.eos_id) == (4, 3)
        ids = tokenizer.encode("hello world hello there")
        assert ids.dtype == np.int64
        assert ids.tolist() == [1, 2, 1, 0]
        assert tokenizer.decode([1, 3, 2]) == "hello <end> world"


@pytest.mark.parametrize(
    ("name", "content", "eos_id"),
    [
        ("tokenizer_config.json", {"eos_token": {"content": "<end>", "lstrip": False}}, 3),
        ("special_tokens_map.json", {"eos_token": "world"}, 2),
        ("config.json", {"eos_token_id": 1}, 1),
        ("config.json", {"eos_token_id": [2, 3]}, 2),
    ],
)
def test_eos_is_found_beside_the_file(folder, name, content, eos_id):
    (folder / name).write_text(json.dumps(content))
    assert HuggingFaceTokenizer(folder).eos_id == eos_id


def test_eos_given_comes_first_and_is_part_of_the_fingerprint(folder):
    (folder / "config.json").write_text('{"eos_token_id": 1}')
    assert HuggingFaceTokenizer(folder, eos="<end>").eos_id == HuggingFaceTokenizer(folder, eos=3).eos_id == 3
    assert HuggingFaceTokenizer(folder).fingerprint != HuggingFaceTokenizer(folder, eos=3).fingerprint


def test_errors_name_what_is_missing(folder, tmp_path):
    with pytest.raises(DataError, match="defines no end-of-document token: eos_token is in neither") as caught:
        HuggingFaceTokenizer(folder)
    assert caught.value.hint == "set one of these keys, or pass eos"
    with pytest.raises(DataError, match="token '<eos>' is not among the 4 tokens"):
        HuggingFaceTokenizer(folder, eos="<eos>")
    with pytest.raises(DataError, match="token 4 is not among the 4 tokens"):
        HuggingFaceTokenizer(folder, eos=4)
    with pytest.raises(DataError, match=r"tokenizer 'gpt2' is not a tokenizer\.json"):
        load_tokenizer("gpt2")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DataError, match=r"config\.json is not JSON"):
        HuggingFaceTokenizer(folder)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json cannot be read as a tokenizer"):
        HuggingFaceTokenizer(folder)
