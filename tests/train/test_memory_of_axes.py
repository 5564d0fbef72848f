"""No rank ever holds what its axis shards whole: weights, moments, experts, logits, KV. By the profiler's memory events, and
each check beside a run without that axis, in which it does find what it looks for."""

import functools
import gc
import math
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from benchmarks.axes import Activations, block_activations, peak_of, row_of, step_shape
from benchmarks.harness import peak_bytes
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from longspan.advise.volumes import shard_elements
from longspan.model import Decoder
from longspan.train.axes import topology_of
from longspan.train.parallel import make_stages
from longspan.train.step import TrainStep
from longspan.train.train_config import TrainConfig, model_config
from tests.ranks import run_ranks
from tests.train.tiny import make_config, make_meshes

ITEMSIZE = 4
MODEL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_layers": 8,
    "num_heads": 4,
    "num_kv_heads": 4,
    "intermediate_size": 256,
}
EXPERTS = {**MODEL, "intermediate_size": None, "experts": {"num_experts": 8, "top_k": 2, "intermediate_size": 128}}
SLACK = 1 << 18
"""Bytes of what a draw of first weights needs beside them, in chunks of 4,096 elements here."""


def make(tokens: int = 16, **changes: Any) -> TrainConfig:
    return make_config(**{"model": dict(MODEL), "dtype": "fp32", "data__seq_len": tokens, **changes})


@dataclass(frozen=True)
class Memory:
    """Bytes: the most that was held while the model was made, and the largest tensor of two steps. Elements of weights and of
    moments."""

    making: int
    largest: int
    weights: int
    moments: int


def measure(group: Any, rank: int, config: TrainConfig, chunk_bytes: int) -> Memory:
    torch.set_num_threads(1)
    meshes = make_meshes(config)
    gc.collect()  # what is freed while the profiler looks would count against what is held
    with patch("longspan.model.philox.chunk_elements", return_value=4096), profiled() as making:
        step = TrainStep(make_stages(config, meshes), meshes, config)
    place = meshes.topology.coordinates(rank)
    batches = [
        row_of(config, config.data.seq_len, 10 * place["dp"] + n) for n in range(config.gradient_accumulation_steps)
    ]
    with patch("longspan.model.chunks.logits_bytes", return_value=chunk_bytes), profiled() as steps:
        for index in range(2):
            step(batches, index)
    weights = sum(local(parameter).numel() for stage in step.stages for parameter in stage.parameters())
    states = [state for optimizer in step.optimizers for state in optimizer.state.values()]
    moments = sum(local(state[name]).numel() for state in states for name in ("exp_avg", "exp_avg_sq"))
    largest = max(event.nbytes() for event in steps.profiler.kineto_results.events() if event.name() == "[memory]")
    return Memory(peak_bytes(making), largest, weights, moments)


def profiled() -> torch.profiler.profile:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)


def local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def on_ranks(config: TrainConfig, chunk_bytes: int = 64 * 2**20) -> list[Memory]:
    return run_ranks(topology_of(config).world, measure, config, chunk_bytes)


@functools.cache
def on_one_rank(has_experts: bool) -> Memory:
    (memory,) = on_ranks(make(model=EXPERTS if has_experts else MODEL))
    return memory


def elements(config: TrainConfig) -> int:
    """Of all weights."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Decoder(model_config(config)).parameters())


RUNS: dict[str, dict[str, Any]] = {
    "dp2": {"parallel__dp": 2},
    "cp2": {"parallel__cp": 2},
    "tp2": {"parallel__tp": 2},
    "pp2": {"parallel__pp": 2, "gradient_accumulation_steps": 2},
    "tp2cp2": {"parallel__tp": 2, "parallel__cp": 2},
    "ep2": {"parallel__dp": 2, "parallel__ep": 2, "model": EXPERTS},
}


@pytest.mark.parametrize(
    "run", [pytest.param(run, marks=pytest.mark.nightly if run == "tp2cp2" else ()) for run in RUNS]
)
def test_no_rank_makes_or_steps_a_whole_model(run: str) -> None:
    """While the model is made a rank holds its own weights and one more of them, drawn but not yet copied: never as much as
    the whole. Moments are exactly those of its weights."""
    config = make(**RUNS[run])
    whole = elements(config)
    found = on_ranks(config)
    for rank, memory in enumerate(found):
        shape = step_shape(config, topology_of(config).coordinates(rank)["pp"], [16])
        shards = topology_of(config).degree("shard")
        own = sum(shard_elements(unit, shards) for unit in shape.units)
        own += sum(shard_elements(unit, topology_of(config).edp) for unit in shape.expert_units)
        assert memory.weights == own < 0.52 * whole
        assert memory.moments == 2 * own
        largest = max(math.prod(each) for unit in (*shape.units, *shape.expert_units) for each in unit)
        assert memory.making <= ITEMSIZE * (own + largest) + SLACK < ITEMSIZE * whole
    # On one rank the same sum does find the whole.
    one = on_one_rank(has_experts="model" in RUNS[run])
    assert one.making >= ITEMSIZE * whole
    assert one.moments == 2 * one.weights == 2 * whole


def measure_gathers(group: Any, rank: int, config: TrainConfig) -> tuple[int, int]:
    """The most bytes of an evaluation, and of one in which no unit gives its weights back."""
    torch.set_num_threads(1)
    meshes = make_meshes(config)
    step = TrainStep(make_stages(config, meshes), meshes, config)
    batch = row_of(config, config.data.seq_len, rank)
    # gloo's own thread may let go of a buffer a little after it is done with it: the least of several.
    usual = min(peak_of(lambda: step.evaluate([batch])) for _ in range(3))
    (root,) = step.stages
    assert isinstance(root, FSDPModule)
    root.set_reshard_after_forward(False)
    return usual, peak_of(lambda: step.evaluate([batch]))


def test_fsdp_never_has_all_weights_gathered() -> None:
    """Forward holds the root's weights, and those of two blocks, each in the buffer of its gather and copied out of it."""
    config = make(parallel__dp=2)
    *blocks, root = (ITEMSIZE * shard_elements(unit, 1) for unit in step_shape(config, 0, [16]).units)
    for usual, kept in run_ranks(2, measure_gathers, config):
        assert usual <= 2 * root + 2 * 2 * max(blocks) < ITEMSIZE * elements(config)
        assert kept >= ITEMSIZE * elements(config)


def test_no_rank_has_all_experts() -> None:
    """Not even one of the two weights of all experts of a layer; FSDP alone gathers both."""
    both = ITEMSIZE * 3 * 8 * 128 * 64
    for changes in ({"parallel__dp": 2, "parallel__ep": 2}, {"parallel__dp": 4, "parallel__ep": 2}):
        assert max(memory.largest for memory in on_ranks(make(model=EXPERTS, **changes))) < 2 / 3 * both
    assert min(memory.largest for memory in on_ranks(make(model=EXPERTS, parallel__dp=2))) >= both


def test_no_rank_has_all_logits() -> None:
    """With tp a rank has those of its part of the vocabulary; without, those of a chunk of tokens where they are many."""
    tokens = 1024
    logits = ITEMSIZE * tokens * 512
    small = {**MODEL, "num_layers": 1, "intermediate_size": 64}
    for changes in ({}, {"parallel__sp": False}):
        config = make(tokens, model=small, parallel__tp=2, **changes)
        assert max(memory.largest for memory in on_ranks(config)) == logits // 2
    assert max(memory.largest for memory in on_ranks(make(tokens, model=small), chunk_bytes=2**18)) < logits // 2
    assert min(memory.largest for memory in on_ranks(make(tokens, model=small))) >= logits


def test_no_rank_has_the_keys_of_a_whole_sequence() -> None:
    """Nor the values, on the route ring; one rank has them."""
    tokens, small = 1024, {**MODEL, "vocab_size": 64, "num_layers": 1, "intermediate_size": 64}
    keys = ITEMSIZE * tokens * 64
    assert max(memory.largest for memory in on_ranks(make(tokens, model=small, parallel__cp=4))) <= keys // 2
    assert min(memory.largest for memory in on_ranks(make(tokens, model=small))) >= keys


BLOCK = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_layers": 1,
    "num_heads": 8,
    "num_kv_heads": 2,
    "intermediate_size": 448,
}
"""The proportions of Llama 3 8B."""


def measure_block(group: Any, rank: int, config: TrainConfig) -> Activations:
    torch.set_num_threads(1)
    return block_activations(config, make_meshes(config), config.data.seq_len)


def test_activations_of_a_block() -> None:
    """In units of S E, a block keeps for backward its two norms' inputs, these normalised and what is made of them (6), q and
    out (2), k and v (2 K / H), the input of o_proj (1), and 4 F / E of the MLP; and a number a token for each norm and head.

    tp2 cp2 leave a quarter, but for what every rank of tp needs of all T tokens: with SP the gathered outputs of the norms, which
    the projections keep (2); without SP all that the norms keep (6).
    """
    S, E, F, H, K = 1024, 128, 448, 8, 2
    one = 9 + 2 * K / H + 4 * F / E + (2 + H) / E
    unit = ITEMSIZE * S * E

    def largest(**changes: Any) -> Activations:
        config = make(S, model=dict(BLOCK), **changes)
        ranks = run_ranks(topology_of(config).world, measure_block, config)
        return Activations(max(rank.saved for rank in ranks), max(rank.peak for rank in ranks))

    whole, quarter = largest(), {"parallel__tp": 2, "parallel__cp": 2}
    sp, plain = largest(**quarter), largest(**quarter, parallel__sp=False)
    assert whole.saved == one * unit
    assert sp.saved == (one + 2) / 4 * unit <= 0.28 * whole.saved
    assert plain.saved == (one + 6 + 2 / E) / 4 * unit > 0.31 * whole.saved
    assert sp.peak <= 0.28 * whole.peak
    assert 0.29 * whole.peak < plain.peak <= 0.32 * whole.peak
