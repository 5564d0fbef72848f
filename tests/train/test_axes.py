"""Runs on every axis and their products equal plain torch on one process: losses, gradient norms and all weights."""

import functools
import json
from collections.abc import Callable, Iterable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from benchmarks.census import census
from torch.distributed.distributed_c10d import _world

from longspan.data import Batch
from longspan.errors import SpecError
from longspan.train.axes import topology_of
from longspan.train.parallel import gather_whole
from longspan.train.step import check_plan
from longspan.train.train_config import TrainConfig, model_config
from tests.oracle import raised
from tests.ranks import COLD_COMPILE, TIMEOUT, run_ranks
from tests.train import reference, tiny
from tests.train.tiny import Document, make_batch, make_config, make_step, numbered_batch, random_row

STEPS = 2
TOKENS = 48
MODEL = {
    "vocab_size": 64, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 24,
    "init_std": 0.3,
}  # fmt: skip


def rows_of(num: int) -> list[list[list[Document]]]:
    """For each step `num` rows of uneven lengths, so that micro-batches have very different numbers of targets."""
    lengths = [TOKENS, 9, 31, TOKENS - 1]
    return [
        [random_row(100 * step + row, lengths[row % 4], vocab_size=64) for row in range(num)] for step in range(STEPS)
    ]


def axes_config(**changes: Any) -> TrainConfig:
    """`optim.eps` is well above the rounding of gradients, which Adam would otherwise magnify where they are tiny."""
    usual = {"gradient_accumulation_steps": 2, "dropout": 0.25, "data__seq_len": TOKENS, "optim__eps": 1e-5}
    return make_config(**{"model": dict(MODEL), **usual, **changes})


def batches_of(config: TrainConfig, dp_rank: int, dp: int, step: int, rows: list[list[Document]]) -> list[Batch]:
    """This dp rank's micro-batches: rows are dealt to dp ranks in turn, and numbered as the loader does."""
    count = len(rows)
    return [
        numbered_batch(rows[index], (step * count + index) * config.data.seq_len) for index in range(dp_rank, count, dp)
    ]


def train_on_ranks(group: Any, rank: int, config: TrainConfig, steps: list[list[list[Document]]]) -> dict[str, Any]:
    torch.set_num_threads(1)
    topology = topology_of(config)
    step = make_step(config)
    place = topology.coordinates(rank)
    done = [step(batches_of(config, place["dp"], topology.dp, index, rows), index) for index, rows in enumerate(steps)]
    evaluated = step.evaluate(batches_of(config, place["dp"], topology.dp, 0, steps[0]))
    with census(step.meshes) as traffic:
        weights = {name: x.numpy() for name, x in gather_whole(step.stages, step.meshes).items()}
    return {
        "losses": [result.loss for result in done],
        "norms": [result.grad_norm for result in done],
        "balance": [result.balance_loss for result in done],
        "targets": [result.targets for result in done],
        "evaluated": evaluated,
        "weights": weights,
        "gathered by": {sent.kind for sent in traffic},
        "timeouts": {
            group._get_backend(device).options._timeout.total_seconds()
            for group in _world.pg_map
            for device in group._device_types
        },
    }


def train_through_inductor(group: Any, rank: int, *arguments: Any) -> dict[str, Any]:
    with patch.object(tiny, "BACKEND", "inductor"):
        return train_on_ranks(group, rank, *arguments)


@functools.cache
def right(num_rows: int, changes: str) -> reference.History:
    return reference.train(axes_config(**json.loads(changes)), rows_of(num_rows), dropout=True)


def check(train: Callable[..., dict[str, Any]] = train_on_ranks, **changes: Any) -> None:
    """A run with these changes on as many ranks as it asks for, against plain torch."""
    config = axes_config(**changes)
    topology = topology_of(config)
    num_rows = config.gradient_accumulation_steps * topology.dp
    timeout = COLD_COMPILE if config.compile else TIMEOUT
    first, *others = run_ranks(topology.world, train, config, rows_of(num_rows), timeout=timeout)
    assert first["timeouts"] == {60.0}, "the world's, of whatever group FSDP2, DTensor and pipelining use"
    assert first["gathered by"] <= {"all-gather", "broadcast"}, "no messages, which NCCL wants in batches"
    of_model = {key: value for key, value in changes.items() if key.startswith(("model", "dropout"))}
    want = right(num_rows, json.dumps(of_model, sort_keys=True))
    assert first["losses"] == pytest.approx(want.losses, rel=1e-9)
    assert first["norms"] == pytest.approx(want.norms, rel=1e-9)
    assert [b is None for b in first["balance"]] == [b is None for b in want.balance]
    assert [b or 0.0 for b in first["balance"]] == pytest.approx([b or 0.0 for b in want.balance], rel=1e-9)
    assert first["evaluated"] == pytest.approx(want.evaluated, rel=1e-9)
    assert first["weights"].keys() == want.weights.keys()
    errors = {
        name: float(np.abs(w - want.weights[name].numpy()).max() / want.weights[name].abs().max())
        for name, w in first["weights"].items()
    }
    assert errors == pytest.approx(dict.fromkeys(errors, 0.0), abs=1e-9)
    for other in others:
        assert not other["weights"]
        assert other["gathered by"] <= {"all-gather", "broadcast"}
        alike = other.keys() - {"weights", "gathered by"}
        assert {key: other[key] for key in alike} == {key: first[key] for key in alike}


def on(**parallel: Any) -> dict[str, Any]:
    """Changes of `[parallel]`."""
    return {f"parallel__{name}": value for name, value in parallel.items()}


def experts(**changes: Any) -> dict[str, Any]:
    """Experts in the place of the MLP."""
    usual = {"num_experts": 4, "top_k": 2, "intermediate_size": 8, "shared_intermediate_size": 8, "balance": 0.1}
    return {"model__intermediate_size": None, "model__experts": usual | changes}


TIED, DEEP, EXPERTS = {"model__tie_embeddings": True}, {"model__num_layers": 4}, experts()
BY_DOCUMENT = experts(balance_over="document", shared_intermediate_size=0, normalise=False)

RUNS: dict[str, dict[str, Any]] = {
    "tp2": on(tp=2),
    "cp2": on(cp=2),
    "dp2": on(dp=2),
    "pp2": on(pp=2),
    "tp2cp2": on(tp=2, cp=2),
    "cp2pp2, 1f1b": on(cp=2, pp=2),
    "cp2pp2, interleaved": {**on(cp=2, pp=2, schedule="interleaved"), **DEEP},
    "cp2dp2, fsdp": on(cp=2, dp=2),
    "cp2dp2, hsdp": on(cp=2, dp=2, dp_replicate=2),
    "ep2": {**on(dp=2, ep=2), **EXPERTS},
    "cp2ep2": {**on(cp=2, ep=2), **EXPERTS},
    "tp2cp2dp2pp2": on(tp=2, cp=2, dp=2, pp=2),
}
"""What issue 5 asks for."""

OTHERS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "one rank, experts": EXPERTS,
    "tp4": {**on(tp=4), "model__num_kv_heads": 4},
    "cp4": on(cp=4),
    "tp2, no sp": on(tp=2, sp=False),
    "tp2cp2, no sp": on(tp=2, cp=2, sp=False),
    "tp2, tied, recompute full": {**on(tp=2), **TIED, "recompute": "full"},
    "tp2, qk_norm, recompute block": {**on(tp=2), "model__qk_norm": True, "recompute": "block"},
    "tp2, no sp, qk_norm": {**on(tp=2, sp=False), "model__qk_norm": True},
    "tp2cp2, recompute full": {**on(tp=2, cp=2), "recompute": "full"},
    "tp2cp2, ulysses, slots": on(tp=2, cp=2, route="ulysses", pad_to_multiple_of=3),
    "tp2cp2, slots": on(tp=2, cp=2, pad_to_multiple_of=3),
    "tp2dp2, hsdp": on(tp=2, dp=2, dp_replicate=2),
    "tp2cp2, order": on(tp=2, cp=2, order="cp-tp-ep-dp-pp"),
    "tp2cp2pp2, order": on(tp=2, cp=2, pp=2, order="pp-dp-ep-cp-tp"),
    "cp2dp2, dp before cp": on(cp=2, dp=2, order="dp-cp-tp-ep-pp"),
    "cp2dp4, dp before cp, hsdp": on(cp=2, dp=4, dp_replicate=2, order="dp-cp-tp-ep-pp"),
    "tp2cp2dp2, dp before cp": on(tp=2, cp=2, dp=2, order="dp-tp-cp-ep-pp"),
    "pp2, tied": {**on(pp=2), **TIED},
    "tp2pp2, tied": {**on(tp=2, pp=2), **TIED},
    "cp2pp2, tied, interleaved": {**on(cp=2, pp=2, schedule="interleaved"), **TIED, **DEEP},
    "pp4": {**on(pp=4), **DEEP, "gradient_accumulation_steps": 4},
    "pp2, recompute block": {**on(pp=2), "recompute": "block"},
    "pp2, uneven stages": {**on(pp=2), "model__num_layers": 3},
    "cp2pp2, balanced, windows": {**on(cp=2, pp=2, layout="balanced"), "model__windows": [5, None]},
    "cp2pp2, zero-bubble": on(cp=2, pp=2, schedule="zero-bubble"),
    "tp2pp2, zero-bubble": on(tp=2, pp=2, schedule="zero-bubble"),
    "pp2, zero-bubble of 4 stages": {**on(pp=2, schedule="zero-bubble", stages_per_rank=2), **DEEP},
    "tp2, experts": {**on(tp=2), **EXPERTS},
    "tp2ep2": {**on(tp=2, ep=2), **EXPERTS},
    "cp2dp2ep4": {**on(cp=2, dp=2, ep=4), **EXPERTS},
    "cp2ep2, by document": {**on(cp=2, ep=2), **BY_DOCUMENT},
    "cp2pp2ep2": {**on(cp=2, pp=2, ep=2), **EXPERTS},
    "dp2ep2, recompute block": {**on(dp=2, ep=2), **EXPERTS, "recompute": "block"},
    "cp2dp2ep2, hsdp": {**on(cp=2, dp=2, ep=2, dp_replicate=2), **EXPERTS},
    "cp2dp2, each reduced": on(cp=2, dp=2, defer_reduction=False),
    "tp2dp2ep2, each reduced": {**on(tp=2, dp=2, ep=2, defer_reduction=False), **EXPERTS},
    "cp2, ddp, each reduced": on(cp=2, wrapper="ddp", defer_reduction=False),
    "cp2, compiled": {**on(cp=2, pad_to_multiple_of=24), "compile": True},
    "cp2, ddp, experts": {**on(cp=2, wrapper="ddp"), **EXPERTS},
}


WIDEST = {
    "tp2cp2dp2pp2", "tp2cp2, order", "tp4", "cp4", "tp2, no sp", "tp2cp2, no sp", "tp2cp2, recompute full", "tp2cp2, slots",
    "tp2dp2, hsdp", "cp2dp4, dp before cp, hsdp", "tp2cp2dp2, dp before cp", "tp2pp2, tied", "tp2pp2, zero-bubble",
    "cp2dp2ep4", "cp2dp2ep2, hsdp", "cp2dp2, each reduced", "cp2, compiled",
}  # fmt: skip
"""Products of what other runs have apart: nightly."""


def widest_nightly(runs: Iterable[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "run", [pytest.param(run, marks=pytest.mark.nightly if run in WIDEST else ()) for run in runs]
    )


@widest_nightly(RUNS)
def test_equals_one_rank(run: str) -> None:
    check(**RUNS[run])


@widest_nightly(OTHERS)
def test_others_equal_one_rank(run: str) -> None:
    check(**OTHERS[run])


@pytest.mark.nightly
def test_compiled_by_inductor() -> None:
    check(train_through_inductor, **OTHERS["cp2, compiled"])


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "tp and KV heads": (on(tp=4), r"tp=4 does not divide 2 KV heads\s+hint: .* set it to 1 or 2"),
    "tp and the MLP": (
        {**on(tp=2), "model__intermediate_size": 25},
        r"does not divide intermediate_size=25\s+hint: .* such as 26",
    ),
    "tp and the vocabulary": ({**on(tp=2), "model__vocab_size": 65}, r"vocab_size=65\s+hint: .* such as 66"),
    "ulysses after tp": (
        on(tp=2, cp=4, route="ulysses"),
        r"degree 4 does not divide 2 query heads \(4 before tp=2\).*\s+hint: .*lower tp",
    ),
    "usp after tp": (
        on(tp=2, cp=4, route="usp", inner=4),
        r"degree 4 does not divide 2 query heads.*\s+hint: set inner=",
    ),
    "stages and layers": (
        {**on(pp=8), **DEEP, "gradient_accumulation_steps": 8},
        r"8 stages, and the model has 4 layers\s+hint: .* at most 4",
    ),
    "virtual stages and layers": (
        {**on(pp=4, schedule="interleaved"), **DEEP, "gradient_accumulation_steps": 4},
        r"pp=4 x stages_per_rank=2 makes 8 stages, .*\s+hint: .*or lower stages_per_rank",
    ),
    "few micro-batches": (
        {**on(pp=4), **DEEP, "gradient_accumulation_steps": 2},
        r"gradient_accumulation_steps=2 is less than pp=4.*\s+hint: set gradient_accumulation_steps to 4",
    ),
    "odd micro-batches": (
        {**on(pp=2, schedule="interleaved"), **DEEP, "gradient_accumulation_steps": 3},
        r"gradient_accumulation_steps=3 is not a multiple of pp=2.*\s+hint: .*2 or 4",
    ),
    "stages of 1f1b": (on(pp=2, stages_per_rank=2), r"stages_per_rank=2 does not apply to schedule '1f1b'"),
    "a schedule without stages": (on(schedule="zero-bubble"), r"'zero-bubble' does not apply to pp=1"),
    "no sp without tp": (on(sp=False), r"sp=false does not apply to tp=1"),
    "ep without experts": (on(dp=2, ep=2), r"ep=2 for a model without experts"),
    "ep and experts": ({**on(dp=3, ep=3), **EXPERTS}, r"ep=3 does not divide 4 experts\s+hint: .*set it to 1"),
    "ep and ranks": ({**on(ep=2), **EXPERTS}, r"ep=2 does not divide the 1 ranks of a stage"),
    "experts without sp": (
        {**on(tp=2, sp=False), **EXPERTS},
        r"all TP ranks would route the same tokens\s+hint: set sp to true",
    ),
    "dp_replicate": (
        on(dp=2, dp_replicate=3),
        r"dp_replicate=3 does not divide dp=2\s+hint: set dp_replicate to 1 or 2",
    ),
    "the order": (on(order="tp-cp-dp-pp"), r"does not name each of tp, cp, ep, dp, pp once"),
    "tp across nodes": (
        on(tp=2, cp=2, ranks_per_node=2, order="cp-tp-ep-dp-pp"),
        r"a TP group crosses nodes of 2 ranks: ranks 0,2.*\s+hint: put tp first",
    ),
    "ddp": (on(tp=2, wrapper="ddp"), r"DDP supports only dp and cp\s+hint: use parallel.wrapper=\"fsdp\""),
    "upipe and tp": (on(tp=2, cp=2, route="upipe"), r"route \"upipe\" with parallel.tp=2"),
    "zero-bubble and recompute": (
        {**on(pp=2, schedule="zero-bubble"), "recompute": "block"},
        r"each would recompute the block\s+hint: set recompute",
    ),
    "each reduced in a pipeline": (on(pp=2, defer_reduction=False), r"a pipeline reduces gradients once"),
    "compile and tp": (
        {**on(tp=2), "compile": True},
        r"compile=true with parallel.tp=2, parallel.pp=1 is not supported",
    ),
    "compile and experts": ({**EXPERTS, "compile": True}, r"compile=true with experts"),
}


@pytest.mark.parametrize("case", WRONG)
def test_refused_before_there_are_ranks(case: str) -> None:
    def prepare(changes: dict[str, Any]) -> None:
        config = axes_config(**changes)
        check_plan(config, model_config(config))

    changes, text = WRONG[case]
    with pytest.raises(ValueError, match=text):
        prepare(changes)


def test_a_world_that_the_degrees_do_not_make(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "6")
    config = axes_config(**on(tp=2, cp=2))
    with pytest.raises(
        SpecError, match=r"tp 2 x cp 2 = 4 does not divide a world of 6 ranks\s+hint: .*multiple of 4 ranks"
    ):
        check_plan(config, model_config(config))


def test_dropout_needs_the_numbers_of_tokens() -> None:
    (text,) = run_ranks(1, train_without_numbers, axes_config())
    assert text == (
        "dropout=0.25 needs Batch.numbers, but a batch has numbers=None\n\n"
        "hint: take batches from a Loader, or set Batch.numbers to each token's number in the run"
    )


def train_without_numbers(group: Any, rank: int, config: TrainConfig) -> str:
    return raised(make_step(config).backward, [make_batch(random_row(1, vocab_size=64))])[1]
