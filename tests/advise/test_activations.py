"""What a rank keeps of activations, by formula, against what autograd keeps on real ranks; schedules against torch's own."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.pipelining.schedules import (
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    _ComputationType,
)

from longspan.advise.activations import activations_of, in_flight
from longspan.train.axes import run_shape, topology_of
from longspan.train.step import TrainStep
from longspan.train.train_config import TrainConfig
from tests.advise.test_memory import EXPERTS, budget_config, expect, groups_of, local, run_step
from tests.ranks import run_ranks
from tests.train.tiny import make_step, numbered_batch


class Saved:
    """Bytes of storages that autograd keeps, the weights' apart: now, and at the most."""

    def __init__(self, step: TrainStep) -> None:
        self.groups = groups_of(step)
        self.users: dict[int, int] = {}
        self.now = self.most = 0

    def weights(self) -> set[int]:
        parameters = (p for group in self.groups for p in group.fsdp_params)
        whole = (local(p._unsharded_param) for p in parameters if hasattr(p, "_unsharded_param"))
        return {x.untyped_storage().data_ptr() for x in whole}

    @contextmanager
    def counting(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(
            self._pack, lambda kept: kept.x if isinstance(kept, _Kept) else kept
        ):
            yield

    def _pack(self, x: torch.Tensor) -> Any:
        here = local(x)
        while hasattr(here, "elem"):  # a collective's result that nobody has waited for
            here = here.wait() if hasattr(here, "wait") else here.elem
        return x if here.untyped_storage().data_ptr() in self.weights() else _Kept(self, x.detach(), here.detach())


class _Kept:
    def __init__(self, saved: Saved, x: torch.Tensor, here: torch.Tensor) -> None:
        storage = here.untyped_storage()
        self.saved, self.x, self.here = saved, x, here
        self.place, self.size = storage.data_ptr(), storage.nbytes()
        count = saved.users.get(self.place, 0)
        saved.users[self.place] = count + 1
        saved.now += self.size * (not count)
        saved.most = max(saved.most, saved.now)

    def __del__(self) -> None:
        self.saved.users[self.place] -= 1
        self.saved.now -= self.size * (not self.saved.users[self.place])


def kept_in_a_step(group: Any, rank: int, config: TrainConfig) -> int:
    step = make_step(config)
    run_step(config, step, rank)
    saved = Saved(step)
    with saved.counting():
        run_step(config, step, rank, 1)
    return saved.most


WIDE = {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "intermediate_size": 96, "head_dim": 8}
DEEP = {**WIDE, "num_layers": 4}
KEPT: dict[str, dict[str, Any]] = {
    "one rank": {},
    "bf16, qk-norm, dropout": {"dtype": "bf16", "dropout": 0.1, "model": {**WIDE, "qk_norm": True}},
    "cp2, uneven": {"parallel__cp": 2, "data__seq_len": 1021, "dtype": "fp64"},
    "cp2, ulysses": {"parallel__cp": 2, "parallel__route": "ulysses"},
    "cp4, ulysses, KV heads replicated": {"parallel__cp": 4, "parallel__route": "ulysses"},
    "cp2, upipe": {"parallel__cp": 2, "parallel__route": "upipe"},
    "tp2": {"parallel__tp": 2},
    "tp2, no sp, bf16": {"parallel__tp": 2, "parallel__sp": False, "dtype": "bf16"},
    "tp2cp2, uneven": {"parallel__tp": 2, "parallel__cp": 2, "data__seq_len": 1021},
    "pp2": {"parallel__pp": 2, "gradient_accumulation_steps": 4},
    "pp2, interleaved": {"parallel__pp": 2, "gradient_accumulation_steps": 4, "parallel__schedule": "interleaved", "model": DEEP},
    "pp2, zero-bubble": {"parallel__pp": 2, "gradient_accumulation_steps": 4, "parallel__schedule": "zero-bubble"},
    "experts, cp2ep2, bf16": {
        "parallel__cp": 2, "parallel__ep": 2, "dtype": "bf16", "model": {**WIDE, "experts": {**EXPERTS, "intermediate_size": 24}},
    },
    "experts, tp2": {"parallel__tp": 2, "model": {**WIDE, "experts": {**EXPERTS, "intermediate_size": 24}}},
}  # fmt: skip
EXACT = 0.02
UNEVEN = 0.1
"""Of experts: rows are reckoned as spread evenly, and a router is not."""


HANDED = {"pp2": (6, 4), "pp2, interleaved": (17, 14), "pp2, zero-bubble": (6, 4)}
"""Hidden states that the stages of a rank hold for each other: by hand, 4 buffers a neighbour, and outputs in flight."""


@pytest.mark.parametrize(
    "run", [pytest.param(run, marks=pytest.mark.nightly if run == "tp2cp2, uneven" else ()) for run in KEPT]
)
def test_activations_are_those_that_autograd_keeps(run: str) -> None:
    config = budget_config(**{"model": WIDE, "data__seq_len": 1024, **KEPT[run]})
    assert config.model is not None
    topology, stages = topology_of(config), expect(config).stages
    ranks = run_ranks(topology.world, kept_in_a_step, config)
    if config.model.experts:
        assert np.mean(ranks) == pytest.approx(stages[0].activations, rel=UNEVEN)
        return
    hidden = activations_of(run_shape(config, config.model)).hidden
    for stage, handed in zip(stages, HANDED.get(run, (0,)), strict=True):
        alike = [kept for rank, kept in enumerate(ranks) if topology.coordinates(rank)["pp"] == stage.pp_rank]
        assert max(alike) == pytest.approx(stage.activations - handed * hidden, rel=EXACT)


def held_after_forward(group: Any, rank: int, config: TrainConfig) -> int:
    """Bytes that a forward of training leaves behind."""
    torch.set_num_threads(1)
    step = make_step(config)
    run_step(config, step, rank)
    tokens = config.data.seq_len
    micro = step.micro(numbered_batch([([n % 64 for n in range(tokens)], [1] * tokens)], 0))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss = step.stages[0](micro.input_ids, **micro.keywords)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    loss.backward()  # until here it is kept
    return sum(event.nbytes() for event in events)


@pytest.mark.parametrize("recompute", ["none", "block", "full"])
def test_what_recomputation_keeps(recompute: str) -> None:
    """By the allocator, since a checkpoint keeps its input without autograd's knowledge."""
    config = budget_config(model={**WIDE, "num_layers": 6}, data__seq_len=2048, recompute=recompute)
    assert config.model is not None
    (held,) = run_ranks(1, held_after_forward, config)
    kept = activations_of(run_shape(config, config.model))
    assert held == pytest.approx(kept.stage(6, first=True, last=True), rel=EXACT)
    (stage,) = expect(config).stages
    assert stage.activations == kept.stage(6, first=True, last=True) + kept.recomputed
    whole = activations_of(run_shape(config.model_copy(update={"recompute": "none"}), config.model)).block
    assert kept.block + kept.recomputed == whole


def test_a_block_by_hand() -> None:
    """T 1,024, E 32, 4 query and 2 KV heads of 8, F 96, fp32; RMSNorm on CPU keeps input, result and a number a token."""
    config = budget_config(model=WIDE, data__seq_len=1024)
    assert config.model is not None
    norms = 2 * 4 * (32 + 32 + 1)
    attention = 4 * (32 + 2 * (32 + 16) + 4 + 32)
    feed_forward = 4 * (32 + 4 * 96)
    on_cpu = activations_of(run_shape(config, config.model))
    assert on_cpu.block == 1024 * (norms + attention + feed_forward)
    assert (on_cpu.slots, on_cpu.hidden, on_cpu.head) == (1024, 1024 * 32 * 4, 4 * 64 * (1024 + 32))
    on_cuda = activations_of(run_shape(config, config.model, "cuda"))
    assert on_cuda.block == on_cpu.block - 1024 * 2 * 4 * 32


@pytest.mark.parametrize(("device_type", "tokens"), [("cpu", 128), ("cuda", 2048)])
def test_the_chunk_of_logits_is_that_of_the_device(device_type: str, tokens: int) -> None:
    """Of a vocabulary of 128k a token's logits are 512 KiB: 128 of them are 64 MiB, and 2,048 are 1 GiB."""
    config = budget_config(model=WIDE | {"vocab_size": 2**17}, data__seq_len=4096)
    assert config.model is not None
    assert activations_of(run_shape(config, config.model, device_type)).head == (tokens + 32) * 2**17 * 4


# Micro-batches in flight.


@pytest.mark.parametrize(
    ("schedule", "pp", "stages", "micros"),
    [
        *(
            (name, *size)
            for name in ("interleaved", "zero-bubble")
            for size in [(2, 2, 2), (2, 2, 8), (4, 3, 4), (3, 2, 9)]
        ),
        ("zero-bubble", 2, 1, 4),
        ("zero-bubble", 4, 1, 8),
    ],
)
def test_in_flight_is_what_torch_schedules(schedule: str, pp: int, stages: int, micros: int) -> None:
    config = budget_config(
        parallel__pp=pp, parallel__stages_per_rank=stages, gradient_accumulation_steps=micros, parallel__schedule=schedule,
        model={"num_layers": pp * stages},
    )  # fmt: skip
    kind = ScheduleInterleaved1F1B if schedule == "interleaved" else ScheduleInterleavedZeroBubble
    theirs = SimpleNamespace(
        n_local_stages=stages, pp_group_size=pp, _n_microbatches=micros,
        microbatches_per_round=micros // max(1, micros // pp),
    )  # fmt: skip
    last = _ComputationType.FULL_BACKWARD if schedule == "interleaved" else _ComputationType.BACKWARD_WEIGHT
    for rank in range(pp):
        held, history = [0] * stages, []
        for action in kind._calculate_single_rank_operations(theirs, rank):
            if action is not None and action.computation_type == _ComputationType.FORWARD:
                held[action.stage_index // pp] += 1
                history.append(list(held))
            elif action is not None and action.computation_type == last:
                held[action.stage_index // pp] -= 1
        assert in_flight(run_shape(config, config.model), rank) == history


@pytest.mark.parametrize(("pp", "micros"), [(4, 8), (4, 4)])
def test_in_flight_of_1f1b(pp: int, micros: int) -> None:
    config = budget_config(parallel__pp=pp, gradient_accumulation_steps=micros)
    assert [max(now[0] for now in in_flight(run_shape(config, config.model), rank)) for rank in range(pp)] == [
        4,
        3,
        2,
        1,
    ]
