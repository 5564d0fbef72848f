"""The numbers of a run against real ranks: the shards of every parameter, their gradients and moments, what is whole."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from longspan.advise.memory import Budget, budget_of, shard_sizes
from longspan.train.axes import run_shape, topology_of
from longspan.train.parallel import decoder_of
from longspan.train.step import TrainStep
from longspan.train.train_config import TrainConfig
from tests.ranks import run_ranks
from tests.train.tiny import make_config, make_step, numbered_batch

MODEL = {
    "vocab_size": 64, "hidden_size": 20, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6,
    "intermediate_size": 24,
    "init_std": 0.3,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "top_k": 2, "intermediate_size": 10, "shared_intermediate_size": 8, "balance": 0.1,
}  # fmt: skip
PP = {"parallel__pp": 2, "gradient_accumulation_steps": 2}


def budget_config(**changes: Any) -> TrainConfig:
    model = {**MODEL, **changes.pop("model", {})}
    if model.get("experts"):
        del model["intermediate_size"]
    return make_config(**{"model": model, "data__seq_len": 32, "dtype": "fp32", **changes})


def expect(config: TrainConfig) -> Budget:
    assert config.model is not None
    return budget_of(run_shape(config, config.model))


def run_step(config: TrainConfig, step: TrainStep, rank: int, index: int = 0) -> None:
    """One step at the full length, on rows of one document."""
    torch.set_num_threads(1)
    topology, tokens = topology_of(config), config.data.seq_len
    place = topology.coordinates(rank)["dp"]
    ids = np.random.default_rng(place).integers(0, 64, tokens).tolist()
    rows = [numbered_batch([(ids, [1] * tokens)], place * tokens) for _ in range(config.gradient_accumulation_steps)]
    step(rows, index)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# Parameters, gradients, moments.


def held_after_a_step(group: Any, rank: int, config: TrainConfig) -> tuple[dict[str, int], dict[str, int]]:
    """Elements of each parameter here, and bytes of all of them, their gradients and their moments."""
    step = make_step(config)
    run_step(config, step, rank)
    parameters = {name: p for stage in step.stages for name, p in decoder_of(stage).named_parameters()}
    states = [state for optimizer in step.optimizers for state in optimizer.state.values()]
    held = {
        "parameters": [local(p) for p in parameters.values()],
        "gradients": [local(p.grad) for p in parameters.values() if p.grad is not None],
        "moments": [local(state[key]) for state in states for key in ("exp_avg", "exp_avg_sq")],
    }
    sizes = {what: sum(x.numel() * x.element_size() for x in tensors) for what, tensors in held.items()}
    return {name: local(p).numel() for name, p in parameters.items()}, sizes


RUNS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "cp3, uneven": {"parallel__cp": 3},
    "dp3, uneven, qk-norm, bf16": {"parallel__dp": 3, "dtype": "bf16", "model": {"qk_norm": True}},
    "ddp": {"parallel__cp": 2, "parallel__wrapper": "ddp", "dtype": "fp64"},
    "hsdp": {"parallel__dp": 2, "parallel__cp": 2, "parallel__dp_replicate": 2},
    "tp2, tied": {"parallel__tp": 2, "model": {"tie_embeddings": True}},
    "pp2, tied, bf16": {**PP, "dtype": "bf16", "model": {"tie_embeddings": True}},
    "cp2pp2, interleaved": {**PP, "parallel__cp": 2, "parallel__schedule": "interleaved"},
    "pp3, uneven layers": {"parallel__pp": 3, "gradient_accumulation_steps": 3},
    "tp2dp2pp2": {**PP, "parallel__tp": 2, "parallel__dp": 2},
    "experts, cp2ep2": {"parallel__cp": 2, "parallel__ep": 2, "model": {"experts": EXPERTS}},
    "experts, tp2dp3ep2, more ranks than experts": {
        "parallel__tp": 2, "parallel__dp": 3, "parallel__ep": 2, "dtype": "bf16", "model": {"experts": EXPERTS},
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "run", [pytest.param(run, marks=pytest.mark.nightly if run == "tp2dp2pp2" else ()) for run in RUNS]
)
def test_parameters_gradients_and_moments_are_exact(run: str) -> None:
    config = budget_config(**RUNS[run])
    assert config.model is not None
    topology, budget = topology_of(config), expect(config)
    ranks = run_ranks(topology.world, held_after_a_step, config)
    for rank, (elements, _) in enumerate(ranks):
        assert shard_sizes(run_shape(config, config.model), rank) == elements, rank
    for stage in budget.stages:
        elements, sizes = ranks[stage.first_rank]
        assert stage.num_parameters == sum(elements.values())
        assert {what: getattr(stage, what) for what in sizes} == sizes
        alike = [rank for rank in range(topology.world) if topology.coordinates(rank)["pp"] == stage.pp_rank]
        assert max(sum(ranks[rank][0].values()) for rank in alike) == stage.num_parameters


def test_shards_by_hand() -> None:
    """Width 20 over 3 ranks: rows 7, 7, 6; a head of 64: 22, 22, 20; experts 2 on each ep rank, over edp 3: 1, 1, none."""
    config = budget_config(parallel__dp=3)
    assert config.model is not None
    sizes = [shard_sizes(run_shape(config, config.model), rank) for rank in range(3)]
    assert [size["norm.weight"] for size in sizes] == [7, 7, 6]
    assert [size["lm_head.weight"] for size in sizes] == [22 * 20, 22 * 20, 20 * 20]
    config = budget_config(parallel__dp=3, parallel__tp=2, parallel__ep=2, model={"experts": EXPERTS})
    assert config.model is not None
    place = [topology_of(config).coordinates(rank)["edp"] for rank in range(6)]
    sizes = [shard_sizes(run_shape(config, config.model), rank) for rank in range(6)]
    down = {edp: size["layers.0.mlp.experts.down_proj"] for edp, size in zip(place, sizes, strict=True)}
    assert down == {0: 20 * 10, 1: 20 * 10, 2: 0}


def test_all_shards_make_the_model() -> None:
    """DDP aside, every element of a stage is on exactly one of the ranks of a replica and of a TP group's cut parts."""
    config = budget_config(parallel__dp=3, parallel__cp=2)
    assert config.model is not None
    total = sum(sum(shard_sizes(run_shape(config, config.model), rank).values()) for rank in range(6))
    assert total == config.model.num_parameters


# Weights gathered and gradients that wait.


class Gathered:
    """Of FSDP2's units: the most elements of weights gathered at once, and the most bytes of gradients not reduced yet."""

    def __init__(self, step: TrainStep) -> None:
        self.groups = groups_of(step)
        self.open: dict[int, int] = {}
        self.elements = self.waiting = 0

    def opened(self, group: Any) -> None:
        self.open[id(group)] = sum(local(p._unsharded_param).numel() for p in group.fsdp_params)
        self.elements = max(self.elements, sum(self.open.values()))

    def closed(self, group: Any) -> None:
        self.open.pop(id(group), None)

    def after_backward(self, group: Any) -> None:
        parameters = [p for group in self.groups for p in group.fsdp_params if hasattr(p, "_unsharded_param")]
        summed = [p.unsharded_accumulated_grad for p in parameters]
        gradients = [p._unsharded_param.grad if g is None else g for p, g in zip(parameters, summed, strict=True)]
        sizes = [local(g).numel() * g.element_size() for g in gradients if g is not None]
        self.waiting = max(self.waiting, sum(sizes))


def groups_of(step: TrainStep) -> list[Any]:
    """FSDP2's units, those of a stage's ends left out where it has none."""
    units = [unit for stage in step.stages for unit in stage.modules() if isinstance(unit, FSDPModule)]
    return [group for unit in units if (group := unit._get_fsdp_state()._fsdp_param_group) is not None]


def spy(patch: pytest.MonkeyPatch, name: str, *, before: Any = None, after: Any = None) -> None:
    original = getattr(FSDPParamGroup, name)

    def spied(group: Any, *args: Any) -> None:
        if before is not None:
            before(group)
        original(group, *args)
        if after is not None:
            after(group)

    patch.setattr(FSDPParamGroup, name, spied)


def gathered_in_a_step(group: Any, rank: int, config: TrainConfig) -> tuple[int, int]:
    step = make_step(config)
    run_step(config, step, rank)
    seen = Gathered(step)
    with pytest.MonkeyPatch.context() as patch:
        spy(patch, "_to_unsharded", after=seen.opened)
        spy(patch, "_to_sharded", after=seen.closed)
        spy(patch, "post_backward", before=seen.after_backward, after=seen.after_backward)
        run_step(config, step, rank, 1)
    return seen.elements, seen.waiting


def test_a_pipeline_and_several_micro_batches_hold_whole_weights_and_gradients() -> None:
    """Exactly those of the rank's stages; without either, no more than ends and two blocks, and of gradients one."""
    for changes in ({"dtype": "bf16"}, {"parallel__schedule": "interleaved"}):
        config = budget_config(parallel__pp=2, gradient_accumulation_steps=4, **changes)
        itemsize = 2 if config.dtype == "bf16" else 4
        ranks = run_ranks(2, gathered_in_a_step, config)
        told = [(stage.gathered, stage.unreduced) for stage in expect(config).stages]
        assert [(elements * itemsize, waiting) for elements, waiting in ranks] == told
    config = budget_config(parallel__dp=2, gradient_accumulation_steps=2, dtype="bf16")
    (stage,) = expect(config).stages
    for elements, waiting in run_ranks(2, gathered_in_a_step, config):
        assert waiting == stage.unreduced
        assert elements * 2 <= stage.gathered
    for changes in ({}, {"gradient_accumulation_steps": 2, "parallel__defer_reduction": False}):
        config = budget_config(parallel__dp=2, **changes)
        (stage,) = expect(config).stages
        for elements, waiting in run_ranks(2, gathered_in_a_step, config):
            assert 0.5 * stage.gathered < elements * 4 <= stage.gathered
            assert 0.5 * stage.unreduced < waiting <= stage.unreduced


# The rest.


def test_counts_of_a_step() -> None:
    config = budget_config(
        parallel__tp=2, parallel__cp=2, parallel__dp=2, parallel__pp=2, gradient_accumulation_steps=2, micro_batch_size=3,
        data__seq_len=33,
    )  # fmt: skip
    budget = expect(config)
    assert (budget.global_batch, budget.micro_batches, budget.seq_len) == (12, 2, 33)
    assert (budget.slots, budget.tokens) == (50, 50)  # 99 tokens over 2 ranks: 50 and 49, in slots that tp divides
    assert [(stage.pp_rank, stage.first_rank, stage.layers) for stage in budget.stages] == [
        (0, 0, (0, 1)),
        (1, 8, (2, 3)),
    ]
    assert [stage.in_flight for stage in budget.stages] == [2, 1]
    assert budget.stages[0].head == 0 < budget.stages[1].head
    for stage in budget.stages:
        parts = (
            stage.parameters, stage.gradients, stage.moments, stage.gathered, stage.unreduced, stage.activations,
            stage.head,
        )  # fmt: skip
        assert stage.total == sum(parts)


def test_no_torch() -> None:
    code = "import sys, longspan.advise.memory; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
