"""ModelConfig: what it derives, what it counts, and what its errors say."""

import pytest
import torch
from pydantic import ValidationError

from longspan.model import Decoder, ExpertsConfig, Llama3RopeScaling, MixtureOfExperts, ModelConfig

from .reference import make_config

EXPERTS = {"num_experts": 8, "top_k": 2, "intermediate_size": 12}


def test_head_dim_defaults_to_an_equal_share_of_the_width():
    assert make_config(hidden_size=48, num_heads=4).head_dim == 12
    assert make_config(hidden_size=48, num_heads=4, head_dim=16).head_dim == 16


def test_mask_names_follow_the_windows():
    assert make_config(num_layers=3).mask_names == ("full", "full", "full")
    assert make_config(num_layers=3, windows=(None, 4096, 7)).mask_names == ("full", "window-4096", "window-7")


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_embeddings": True}, {"qk_norm": True}, {"head_dim": 10}, {"num_kv_heads": 4, "num_layers": 3}],
)
def test_num_parameters_counts_the_modules_own(changes):
    config = make_config(**changes)
    with torch.device("meta"):
        model = Decoder(config)
    assert config.num_parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("shared", [0, 24])
def test_num_parameters_counts_router_experts_and_shared_expert(shared):
    experts = {"num_experts": 6, "top_k": 2, "intermediate_size": 20, "shared_intermediate_size": shared}
    config = make_config(intermediate_size=None, experts=experts)
    with torch.device("meta"):
        layer = MixtureOfExperts(config, 0, torch.nn.Linear(3 * 24, 32, bias=False) if shared else None)
    layers_apart = config.num_parameters - make_config().num_parameters + 2 * 3 * 32 * 48
    assert layers_apart == 2 * sum(parameter.numel() for parameter in layer.parameters())
    assert layers_apart == 2 * (6 * 32 + 6 * 3 * 32 * 20 + 3 * 32 * shared)


def test_num_parameters_of_smollm2_135m():
    config = ModelConfig(
        vocab_size=49152,
        hidden_size=576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        intermediate_size=1536,
        tie_embeddings=True,
    )
    assert config.num_parameters == 134_515_008


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"num_heads": 9, "num_kv_heads": 2, "hidden_size": 36},
            ["2 KV heads do not divide 9 query heads", "[1, 3, 9]"],
        ),
        ({"hidden_size": 30}, ["hidden_size 30 is not a multiple of 4 heads", "set head_dim"]),
        ({"head_dim": 7}, ["head_dim 7 is odd", "head_dim=8"]),
        ({"hidden_size": 12}, ["head_dim 3 is odd"]),
        ({"windows": (None,)}, ["windows has 1 entries for 2 layers", "None for full attention"]),
        ({"windows": (None, 0)}, ["window 0 of layer 1 is below 1", '"full" (None in Python) for full']),
        ({"num_layers": 0}, ["num_layers", "greater than 0", "input_value=0"]),
        ({"rope_scaling": {"kind": "yarn"}}, ["rope_scaling 'yarn' is not supported", "Llama3RopeScaling"]),
        ({"dropout": 0.1}, ["dropout", "Extra inputs are not permitted"]),
        ({"intermediate_size": 0}, ["intermediate_size", "greater than 0", "input_value=0"]),
        (
            {"intermediate_size": None},
            ["neither intermediate_size nor experts is given", "give intermediate_size for dense layers"],
        ),
        ({"experts": EXPERTS}, ["both intermediate_size 48 and experts are given", "its own intermediate_size"]),
    ],
)
def test_errors_name_the_values_and_the_way_out(changes, words):
    with pytest.raises(ValidationError) as caught:
        make_config(**changes)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"top_k": 9}, ["top_k 9 is more than 8 experts", "set top_k to at most 8, or num_experts to at least 9"]),
        ({"top_k": 1}, ["top_k 1 with normalise=true makes every weight 1", "set normalise=false"]),
        ({"intermediate_size": 0}, ["experts.intermediate_size", "greater than 0"]),
        ({"balance": -0.1}, ["experts.balance", "greater than or equal to 0"]),
        ({"balance_over": "token"}, ["experts.balance_over", "'batch' or 'document'"]),
        ({"capacity": 1.25}, ["experts.capacity", "Extra inputs are not permitted"]),
    ],
)
def test_errors_of_experts_name_the_values_and_the_way_out(changes, words):
    with pytest.raises(ValidationError) as caught:
        make_config(intermediate_size=None, experts=EXPERTS | changes)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_experts_are_frozen_values():
    config = make_config(intermediate_size=None, experts=EXPERTS)
    assert config.experts == ExpertsConfig(**EXPERTS)
    assert ModelConfig(**config.model_dump(mode="json")) == config
    assert hash(config) == hash(make_config(intermediate_size=None, experts=EXPERTS))
    with pytest.raises(ValidationError, match="frozen"):
        config.experts.top_k = 3


def test_llama3_scaling_needs_a_band_between_its_factors():
    with pytest.raises(ValidationError, match=r"high_freq_factor 1.0 is not above low_freq_factor 4.0"):
        Llama3RopeScaling(factor=8, low_freq_factor=4, high_freq_factor=1, original_max_positions=8192)


def test_configs_are_frozen_values():
    config = make_config(windows=[None, 3])
    with pytest.raises(ValidationError, match="frozen"):
        config.hidden_size = 64
    assert ModelConfig(**config.model_dump()) == config
    assert hash(config) == hash(make_config(windows=(None, 3)))


def test_a_file_says_full_where_python_says_none():
    assert make_config(windows=["full", 4]).windows == make_config(windows=(None, 4)).windows == (None, 4)
