"""A training step on the device: right on two ranks, and within its budget of waits, copies and launches."""

import functools
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from longspan.comm.meshes import Meshes
from longspan.train.axes import topology_of
from longspan.train.parallel import decoder_of, make_stages
from longspan.train.step import TrainStep
from longspan.train.train_config import TrainConfig
from tests.cuda import Ledger, stand_in
from tests.ranks import run_ranks
from tests.train.test_step import error, own_batches, right, rows_of
from tests.train.tiny import make_batch, make_config, random_row

TOKENS = 45


def make_cuda_step(config: TrainConfig) -> TrainStep:
    meshes = Meshes.of(topology_of(config), "cuda")
    return TrainStep(make_stages(config, meshes), meshes, config)


class Trained(NamedTuple):
    """Of each step the loss and the gradients' norm; of the last the host's waits by place, and what it copied."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Any]
    syncs: dict[str, int]
    bytes_to_host: int
    collectives: set[str]


RUNS: dict[str, dict[str, Any]] = {
    "ring": {},
    "exchange, recomputed": {"parallel__route": "exchange", "recompute": "block"},
}
MICROS = 2


@functools.cache
def trained(name: str) -> tuple[TrainConfig, list[Trained]]:
    """Two steps on two ranks of a CP group, in fp64."""
    config = make_config(parallel__cp=2, parallel__kernel="reference", gradient_accumulation_steps=MICROS, **RUNS[name])
    with tempfile.TemporaryDirectory() as folder:
        return config, run_ranks(2, _train, f"{folder}/store", config, rows_of(MICROS))


@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_equal_plain_torch(name: str) -> None:
    """With the streams and collectives of FSDP2."""
    config, ranks = trained(name)
    want = right(MICROS, TOKENS, json.dumps(config.model.model_dump(mode="json", exclude_unset=True)))
    for done in ranks:
        assert done.losses == pytest.approx(want.losses, rel=1e-9)
        assert done.norms == pytest.approx(want.norms, rel=1e-9)
        off = {key: error(weight, want.weights[key]) for key, weight in done.weights.items()}
        assert off == pytest.approx(dict.fromkeys(want.weights, 0.0), abs=1e-9)
        assert {"_allgather_base_", "_reduce_scatter_base_", "allreduce_"} <= done.collectives


@pytest.mark.parametrize("name", RUNS)
def test_on_two_ranks_the_host_waits_once_a_micro_batch_and_twice_a_step(name: str) -> None:
    for done in trained(name)[1]:
        assert sum(done.syncs.values()) <= MICROS + 2, done.syncs
        assert done.bytes_to_host <= 8 * (MICROS + 2), done.syncs


def _train(group: Any, rank: int, store: str, config: TrainConfig, steps: list[Any]) -> Trained:
    size = dist.get_world_size()
    dist.destroy_process_group()
    with stand_in() as whole_run:
        dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=rank, world_size=size)
        step = make_cuda_step(config)
        done = []
        for index, rows in enumerate(steps):
            with stand_in() as last:
                done.append(step(own_batches(config, dist.group.WORLD, rows), index))
        weights = {key: whole(p) for key, p in decoder_of(step.stages[0]).named_parameters()}
    return Trained(
        [result.loss for result in done],
        [result.grad_norm for result in done],
        weights,
        last.syncs_by_site(),
        last.bytes_copied("to host"),
        {call.operator for call in whole_run.collectives},
    )


def whole(parameter: Any) -> Any:
    tensor = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return tensor.detach().cpu().numpy()


@contextmanager
def world_of_one() -> Iterator[None]:
    with stand_in():
        dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def tiny(num_layers: int = 2, **changes: Any) -> TrainConfig:
    """In bf16, which the flash kernel takes."""
    model = {"model__hidden_size": 32, "model__num_heads": 4, "model__num_kv_heads": 2, "model__num_layers": num_layers}
    return make_config(dtype="bf16", **model, **changes)


def second_step(micros: int) -> Ledger:
    """What the second step of so many micro-batches does; the first makes what is kept. Every row has other documents."""
    step = make_cuda_step(tiny(gradient_accumulation_steps=micros))
    for index in range(2):
        batches = [make_batch(random_row(10 * index + micro, TOKENS)) for micro in range(micros)]
        with stand_in() as ledger:
            step(batches, index)
    return ledger


@pytest.fixture(scope="module")
def ledgers() -> dict[int, Ledger]:
    """Number of micro-batches -> what a step of them does."""
    with world_of_one():
        return {micros: second_step(micros) for micros in (1, 3)}


def test_the_host_waits_once_a_micro_batch_and_twice_a_step(ledgers: dict[int, Ledger]) -> None:
    """The loss and the norm of the gradients are read; how many targets there are, and what is where, the host knows."""
    for micros, ledger in ledgers.items():
        assert len(ledger.syncs) <= micros + 2, f"a step of {micros} micro-batches: {ledger.syncs_by_site()}"


def test_nothing_but_numbers_comes_to_the_host(ledgers: dict[int, Ledger]) -> None:
    for micros, ledger in ledgers.items():
        copies = {str(copy.site): copy.nbytes for copy in ledger.copies if copy.direction == "to host"}
        assert ledger.bytes_copied("to host") <= 16 + 8 * micros, copies


def test_only_ids_labels_and_positions_go_to_the_device(ledgers: dict[int, Ledger]) -> None:
    """8 bytes a token each, and at most 256 a micro-batch for where documents begin; from pinned memory, as others wait."""
    for micros, ledger in ledgers.items():
        assert ledger.bytes_copied("to device") <= micros * (3 * 8 * TOKENS + 256)
        pageable = [copy for copy in ledger.copies if copy.direction == "to device" and not copy.pinned]
        assert pageable == [], f"a step of {micros} micro-batches"


def test_launches_of_an_update(ledgers: dict[int, Ledger]) -> None:
    """Of all 20 parameters together: 16 of AdamW for matrices and vectors, 5 of the norm, 1 to clip."""
    launches = [launch.operator for launch in ledgers[1].launches if launch.site.file == "train/optim.py"]
    assert 0 < len(launches) <= 22, launches


def test_a_step_makes_no_stream(ledgers: dict[int, Ledger]) -> None:
    assert {micros: ledger.streams_made for micros, ledger in ledgers.items()} == {1: 0, 3: 0}


FORWARD, BACKWARD = 28 + 18, 47 + 21
"""Launches of a layer, and of FSDP2 for its 9 weights on one rank.

forward     7 products, 2 norms, 2 rotations of 6, attention 1, its rows and then its heads side by side 2, silu and product 2,
            2 sums; a cast and a copy of each weight
backward    14 products, 2 norms, 2 rotations of 8, attention 1, its gradients wide and back 6, silu and products 3, 5 sums;
            a cast and a copy of each weight, and 3 for their gradients together
"""


def test_launches_of_a_layer() -> None:
    with world_of_one():
        two, three = _launches(2), _launches(3)
    for phase, fewer, most, bound in zip(("forward", "backward"), two, three, (FORWARD, BACKWARD), strict=True):
        launches = len(most.launches) - len(fewer.launches)
        assert 0 < launches <= bound, (
            f"a layer more makes {launches} launches in {phase}: {most.launches_by_function()} with it, "
            f"{fewer.launches_by_function()} without"
        )
        assert most.syncs == [], f"{phase}: {most.syncs_by_site()}"


def _launches(num_layers: int) -> tuple[Ledger, Ledger]:
    """Forward and backward of a micro-batch."""
    step = make_cuda_step(tiny(num_layers))
    micro = step.micro(make_batch(random_row(3, TOKENS)))
    with stand_in() as forward:
        loss = step.stages[0](micro.input_ids, **micro.keywords)
    with stand_in() as backward:
        loss.backward()
    return forward, backward
