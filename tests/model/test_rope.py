"""Rotary tables against a value by hand, against transformers, and shard against whole."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from longspan.model import Llama3RopeScaling
from longspan.model.rope import apply_rotary, rotary_tables

from .reference import make_config

LLAMA31 = Llama3RopeScaling(factor=8, low_freq_factor=1, high_freq_factor=4, original_max_positions=8192)


def test_one_turn_by_hand():
    # D=4, theta=100: frequencies 1 and 0.1; position 2 turns (x0, x2) by 2 and (x1, x3) by 0.2.
    config = make_config(num_heads=4, hidden_size=16, rope_theta=100.0)
    cos, sin = rotary_tables(torch.tensor([[2]]), config, torch.float64)
    x = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64).reshape(1, 1, 1, 4)
    right = torch.tensor([math.cos(2), math.cos(0.2), math.sin(2), math.sin(0.2)], dtype=torch.float64)
    torch.testing.assert_close(apply_rotary(x, cos, sin).flatten(), right, rtol=0, atol=1e-15)


@pytest.mark.parametrize("scaling", [None, LLAMA31])
def test_tables_equal_hugging_faces_bit_for_bit(scaling):
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    if scaling is not None:
        rope |= {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope |= {"original_max_position_embeddings": 8192}
    theirs = LlamaRotaryEmbedding(LlamaConfig(hidden_size=256, num_attention_heads=2, rope_parameters=rope))
    positions = torch.tensor([[0, 1, 5, 8191, 131071]])
    right = theirs(torch.zeros(1), positions)
    config = make_config(hidden_size=256, num_heads=2, num_kv_heads=1, rope_theta=500000.0, rope_scaling=scaling)
    for table, expected in zip(rotary_tables(positions, config, torch.bfloat16), right, strict=True):
        assert table.dtype == torch.float32
        assert torch.equal(table[:, 0], expected)


def test_a_shard_gets_the_rows_of_its_positions():
    config, whole = make_config(), torch.arange(16)[None]
    shard = torch.tensor([[0, 1, 2, 3, 12, 13, 14, 15]])
    for full, part in zip(
        rotary_tables(whole, config, torch.float32), rotary_tables(shard, config, torch.float32), strict=True
    ):
        assert torch.equal(full[:, :, shard[0]], part)


def test_dead_slots_are_finite():
    assert all(table.isfinite().all() for table in rotary_tables(torch.full((1, 3), -1), make_config(), torch.float32))
