"""A configuration is checked when it is made and cannot be changed."""

import tempfile
from pathlib import Path

import pydantic
import pytest

from longspan.data import DataConfig, FitConfig


def test_defaults():
    config = DataConfig(paths=["a.txt"], seq_len=64)
    assert config.paths == ("a.txt",)
    assert config.cache_dir == Path(tempfile.gettempdir()) / "longspan"
    assert (config.tokenizer, config.heldout_fraction, config.seed, config.shuffle) == ("bytes", 0.02, 0, True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"paths": []},
        {"seq_len": 0},
        {"seq_len": "many"},
        {"suffixes": ["py"]},
        {"heldout_fraction": 1.0},
        {"heldout_fraction": -0.1},
        {"seed": -1},
        {"max_documents": 0},
        {"on_error": "ignore"},
        {"shufle": False},
        {"packing": "best"},
        {"packing": "fit", "fit": {"max_wait": 3}},
    ],
)
def test_wrong_values_and_unknown_keys_are_refused(wrong):
    with pytest.raises(pydantic.ValidationError, match=list(wrong)[-1]):
        DataConfig(**{"paths": ["a.txt"], "seq_len": 64, **wrong})


def test_options_of_fit():
    config = DataConfig(paths=["a.txt"], seq_len=64)
    assert (config.packing, config.fit, config.fit_options) == ("stream", None, None)
    assert DataConfig(paths=["a.txt"], seq_len=64, packing="fit").fit_options == FitConfig()
    config = DataConfig(paths=["a.txt"], seq_len=64, packing="fit", fit={"buckets": [8, 16]})
    assert config.fit_options == FitConfig(buckets=(8, 16))
    assert DataConfig.model_validate(config.model_dump()) == config


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        (
            {"fit": {"balance": "area", "buffer": 64}},
            "fit.balance='area', fit.buffer=64 has no effect with packing \"stream\"",
            'leave the fit options out, or set packing="fit"',
        ),
        (
            {"fit": {}},
            'fit has no effect with packing "stream"',
            'leave the fit options out, or set packing="fit"',
        ),
        (
            {"packing": "fit", "fit": {"buckets": [8, 64]}},
            "bucket 64 is not below seq_len 64",
            "leave this bucket out: documents above the last bucket",
        ),
    ],
)
def test_an_option_that_means_nothing_is_refused(options, message, hint):
    with pytest.raises(pydantic.ValidationError, match=message) as caught:
        DataConfig(paths=["a.txt"], seq_len=64, **options)
    assert hint in str(caught.value)


def test_frozen():
    config = DataConfig(paths=["a.txt"], seq_len=64)
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        config.seed = 4


def test_every_field_says_what_it_is():
    assert [name for name, field in DataConfig.model_fields.items() if not field.description] == []


def test_one_path_is_a_list_of_one():
    assert DataConfig(paths="a.txt", seq_len=64) == DataConfig(paths=["a.txt"], seq_len=64)
