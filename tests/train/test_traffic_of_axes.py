"""What a step really sends over each axis, by the groups' own records, is what the formulas of docs/reference/traffic.md say."""

from fractions import Fraction
from typing import Any

import pytest
import torch
from benchmarks.axes import step_shape
from benchmarks.census import census

from longspan.advise.volumes import expert_rows, hidden_elements, layer_pass, step_volumes, ulysses
from longspan.comm.traffic import record
from longspan.data import Batch
from longspan.model.experts import Experts
from longspan.train.axes import topology_of
from longspan.train.micro import masks_of
from longspan.train.train_config import TrainConfig
from tests.ranks import run_ranks
from tests.train.test_axes import EXPERTS, batches_of
from tests.train.tiny import Document, make_config, make_step, random_row

TOKENS, WIDTH, LAYERS, ITEMSIZE = 48, 16, 2, 8
MODEL = {
    "vocab_size": 64, "hidden_size": WIDTH, "num_layers": LAYERS, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 24,
    "init_std": 0.3,
}  # fmt: skip
RUNS: dict[str, dict[str, Any]] = {
    "tp2": {"parallel__tp": 2},
    "tp2, no sp": {"parallel__tp": 2, "parallel__sp": False},
    "tp2, qk-norm": {"parallel__tp": 2, "parallel__sp": False, "model__qk_norm": True},
    "cp2, ring": {"parallel__cp": 2},
    "cp2, ulysses": {"parallel__cp": 2, "parallel__route": "ulysses"},
    "dp2": {"parallel__dp": 2, "gradient_accumulation_steps": 1},
    "dp2, accumulation": {"parallel__dp": 2},
    "tp2dp2, each micro-batch": {"parallel__tp": 2, "parallel__dp": 2, "parallel__defer_reduction": False},
    "cp2dp2, hsdp": {"parallel__cp": 2, "parallel__dp": 2, "parallel__dp_replicate": 2},
    "ep2": {"parallel__dp": 2, "parallel__ep": 2, **EXPERTS},
    "cp2ep2": {"parallel__cp": 2, "parallel__ep": 2, **EXPERTS},
    "dp2, experts": {"parallel__dp": 2, **EXPERTS},
    "dp4ep2": {"parallel__dp": 4, "parallel__ep": 2, **EXPERTS},
    "pp2": {"parallel__pp": 2},
    "pp2dp2, tied": {
        "parallel__pp": 2,
        "parallel__dp": 2,
        "gradient_accumulation_steps": 4,
        "model__tie_embeddings": True,
    },
    "tp2cp2": {"parallel__tp": 2, "parallel__cp": 2},
}


def run_config(**changes: Any) -> TrainConfig:
    if "model__experts" in changes:
        changes["model__experts"] = {**changes["model__experts"], "shared_intermediate_size": 0}
    return make_config(**{"model": dict(MODEL), "gradient_accumulation_steps": 2, "data__seq_len": TOKENS, **changes})


def rows_of(num: int) -> list[list[Document]]:
    """One row of one document, and some of several and of other lengths."""
    whole: list[Document] = [([1 + n % 60 for n in range(TOKENS)], [1] * TOKENS)]
    return [whole, *(random_row(row, (31, TOKENS, 9)[row % 3], vocab_size=64) for row in range(num - 1))]


def send_in_a_step(group: Any, rank: int, config: TrainConfig, rows: list[list[Document]]) -> dict[str, Any]:
    """What the rank's second step sends, and what the formulas leave to a plan, to a router and to a schedule."""
    torch.set_num_threads(1)
    step = make_step(config)
    place = step.meshes.topology.coordinates(rank)
    batches = batches_of(config, place["dp"], step.meshes.topology.dp, 0, rows)
    step(batches, 0)
    routed: list[list[int]] = []
    for stage in step.stages:
        for module in stage.modules():
            if isinstance(module, Experts):
                module.register_forward_pre_hook(lambda _, given: routed.append(given[1].tolist()))
    with census(step.meshes) as traffic, record() as calls:
        step(batches, 1)
    return {
        "sent": {key: counts.elements_sent for key, counts in traffic.by_kind.items()},
        "calls": {key: counts.calls for key, counts in traffic.by_kind.items()},
        "bytes": {key: counts.bytes_sent for key, counts in traffic.by_issuer.items()},
        "own record": sum(call.bytes_sent for call in calls),
        "planned": planned_bytes(step, batches),
        "slots": [step.micro(batch).input_ids.shape[1] for batch in batches],
        "routed": routed,
    }


def planned_bytes(step: Any, batches: list[Batch]) -> int:
    """What the plans of all layers and micro-batches say that this rank sends."""
    total, model = 0, step.model_config
    for batch in batches:
        _, plans = step.cp.plans(masks_of(batch, tuple(dict.fromkeys(step.model_config.mask_names))))
        names = [model.mask_names[layer] for stage in step.stages for layer in stage.part]
        total += sum(
            plans[name].bytes(step.cp.rank, phase, model.head_dim, ITEMSIZE)
            for name in names
            for phase in ("forward", "backward")
        )
    return total


def expected(config: TrainConfig, rank: int, found: list[dict[str, Any]]) -> dict[tuple[str, str], Fraction]:
    topology = topology_of(config)
    place = topology.coordinates(rank)
    shape = step_shape(config, place["pp"], found[rank]["slots"])
    volumes = step_volumes(shape)
    attention = "all-to-all" if config.parallel.route == "ulysses" else "send"
    if topology.cp > 1:
        volumes["cp", attention] = Fraction(found[rank]["planned"], ITEMSIZE)
    if topology.pp > 1:
        volumes["pp", "send"] = Fraction(sum(hidden_elements(shape, slots) for slots in shape.slots))
    if topology.ep > 1:
        ranks = next(group for group in topology.groups("ep") if rank in group)
        each_layer = zip(*(found[other]["routed"] for other in ranks), strict=True)
        rows = sum(expert_rows(counts, ranks.index(rank)) for counts in each_layer)
        volumes["ep", "all-to-all"] += 2 * shape.hidden_size * rows  # forward and backward
    return volumes


@pytest.mark.parametrize(
    "run", [pytest.param(run, marks=pytest.mark.nightly if run in ("tp2, no sp", "tp2cp2") else ()) for run in RUNS]
)
def test_elements_per_axis_are_those_of_the_formulas(run: str) -> None:
    config = run_config(**RUNS[run])
    topology = topology_of(config)
    found = run_ranks(topology.world, send_in_a_step, config, rows_of(config.gradient_accumulation_steps * topology.dp))
    for rank, of_rank in enumerate(found):
        assert of_rank["sent"] == expected(config, rank, found)
        if topology.cp > 1:
            assert of_rank["planned"] == of_rank["own record"] > 0
            assert of_rank["bytes"]["cp", "longspan.comm.hops"] == of_rank["own record"]


def one_row(config: TrainConfig) -> list[dict[str, Any]]:
    return run_ranks(topology_of(config).world, send_in_a_step, config, rows_of(1))


def test_tensor_parallelism_by_hand() -> None:
    """48 slots, width 16, 2 layers, tp 2: `4 T E / 2` = 1,536 elements a layer pass, of which there are four; embedding and head
    make one half of a pass each way, of a gather and a scatter; and the loss gathers 2 numbers a token."""
    assert layer_pass(48, 16, 2) == 1536
    half, loss, scalars = 48 * 16 // 2, 2 * 48, 2
    norms = 5 * WIDTH
    (first, second) = one_row(run_config(parallel__tp=2, gradient_accumulation_steps=1))
    assert (
        first["sent"]
        == second["sent"]
        == {
            ("tp", "all-gather"): 2 * 1536 + 2 * half + loss,
            ("tp", "reduce-scatter"): 2 * 1536 + 2 * half,
            ("tp", "all-reduce"): norms + scalars,
        }
    )
    assert first["calls"] == {
        ("tp", "all-gather"): 2 * 4 + 2 + 1,
        ("tp", "reduce-scatter"): 2 * 4 + 2,
        ("tp", "all-reduce"): 5 + 2,
    }
    (first, second) = one_row(run_config(parallel__tp=2, parallel__sp=False, gradient_accumulation_steps=1))
    assert (
        first["sent"]
        == second["sent"]
        == {
            ("tp", "all-gather"): loss,
            ("tp", "all-reduce"): 4 * 1536 + 4 * half + scalars,
        }
    )


def test_recomputation_repeats_what_comes_before_the_last_projection() -> None:
    """Of a layer pass, both gathers and the scatter behind attention: 3 / 4. Hops and gathers of weights are not repeated."""
    changes = {"parallel__tp": 2, "parallel__cp": 2, "gradient_accumulation_steps": 1}
    usual, again = (one_row(run_config(**changes, recompute=recompute))[0]["sent"] for recompute in ("none", "block"))
    more = {key: again[key] - usual[key] for key in again if again[key] != usual[key]}
    half = LAYERS * layer_pass(24, WIDTH, 2) / 2
    assert more == {("tp", "all-gather"): half, ("tp", "reduce-scatter"): half / 2}


def test_ulysses_by_hand() -> None:
    """`2 S (d + d_kv) (P - 1) / P^2` = 2 x 48 x (16 + 8) / 4 = 576 elements, in each of 2 layers, forward and backward."""
    assert ulysses(TOKENS, 4 * 4, 2 * 4, 2) == 576
    for of_rank in one_row(run_config(parallel__cp=2, parallel__route="ulysses", gradient_accumulation_steps=1)):
        assert of_rank["sent"]["cp", "all-to-all"] == 2 * LAYERS * 576


def test_gathers_of_weights_by_hand() -> None:
    """A block has 16 x (16 + 8 + 8 + 16 + 3 x 24 + 2) = 1,952 elements, the root 2 x 64 x 16 + 16 = 2,064. A rank has half, and
    sends it once for each gather: of blocks twice a micro-batch, of the root once; and of gradients half, once a step."""
    block, root = 1952 // 2, 2064 // 2
    for gradient_accumulation_steps in (1, 2):
        config = run_config(parallel__dp=2, gradient_accumulation_steps=gradient_accumulation_steps)
        for of_rank in run_ranks(2, send_in_a_step, config, rows_of(2 * gradient_accumulation_steps)):
            assert of_rank["sent"]["shard", "all-gather"] == gradient_accumulation_steps * (2 * LAYERS * block + root)
            assert of_rank["sent"]["shard", "reduce-scatter"] == LAYERS * block + root
