"""A configuration is checked when it is made and cannot be changed."""

import tempfile
from pathlib import Path

import pydantic
import pytest

from longspan.data import DataConfig


def test_defaults():
    config = DataConfig(paths=["a.txt"], row_tokens=64)
    assert config.paths == ("a.txt",)
    assert config.cache_dir == Path(tempfile.gettempdir()) / "longspan"
    assert (config.tokenizer, config.heldout_fraction, config.seed, config.shuffle) == ("bytes", 0.02, 0, True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"paths": []},
        {"row_tokens": 0},
        {"row_tokens": "many"},
        {"suffixes": ["py"]},
        {"heldout_fraction": 1.0},
        {"heldout_fraction": -0.1},
        {"seed": -1},
        {"max_documents": 0},
        {"on_error": "ignore"},
        {"shufle": False},
    ],
)
def test_wrong_values_and_unknown_keys_are_refused(wrong):
    with pytest.raises(pydantic.ValidationError, match=next(iter(wrong))):
        DataConfig(**{"paths": ["a.txt"], "row_tokens": 64, **wrong})


def test_frozen():
    config = DataConfig(paths=["a.txt"], row_tokens=64)
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        config.seed = 4


def test_every_field_says_what_it_is():
    assert [name for name, field in DataConfig.model_fields.items() if not field.description] == []
