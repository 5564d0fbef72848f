"""A training step at every degree equals plain torch on one process: losses, gradient norms and all weights."""

import functools
import json
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor

from longspan import Mask, record
from longspan.cp.masks import documents_mask
from longspan.data import Batch
from longspan.train.model import make_model
from longspan.train.parallel import decoder_of
from longspan.train.train_config import TrainConfig
from tests.examples import examples
from tests.ranks import run_ranks
from tests.train import reference
from tests.train.tiny import MODEL, Document, make_batch, make_config, make_step, random_row

LAYOUTS = ("zigzag", "striped", "contiguous")
STEPS = 2


def rows_of(num: int, tokens: int = 45) -> list[list[list[Document]]]:
    """For each step `num` rows; the second is shorter, so that micro-batches have very different numbers of targets."""
    sizes = [tokens, max(1, tokens // 5), tokens - 2, tokens]
    return [[random_row(100 * step + row, sizes[row]) for row in range(num)] for step in range(STEPS)]


def whole(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().double().numpy().copy()


def own_batches(config: TrainConfig, group: Any, rows: list[list[Document]]) -> list[Any]:
    """This rank's micro-batches: the rows are dealt to the dp ranks in turn."""
    dp, cp = config.parallel.dp or 1, config.parallel.cp
    return [make_batch(row) for row in rows[group.rank() // cp :: dp]]


def train_on_ranks(group: Any, rank: int, config: TrainConfig, steps: list[list[list[Document]]]) -> dict[str, Any]:
    step = make_step(config)
    done, calls = [], []
    for index, rows in enumerate(steps):
        with record() as seen:
            done.append(step(own_batches(config, group, rows), index))
        calls.append([call.phase for call in seen])
    weights = {name: whole(p) for name, p in decoder_of(step.stages[0]).named_parameters()}
    return {
        "losses": [result.loss for result in done],
        "norms": [result.grad_norm for result in done],
        "rates": [result.learning_rate for result in done],
        "targets": [result.targets for result in done],
        "tokens": [result.tokens for result in done],
        "skipped": [result.skipped for result in done],
        "weights": weights if rank == 0 else {name: float(w.sum()) for name, w in weights.items()},
        "calls": calls,
    }


@functools.cache
def right(num_rows: int, tokens: int, model: str) -> reference.History:
    return reference.train(make_config(model=json.loads(model)), rows_of(num_rows, tokens))


def error(got: np.ndarray[Any, Any], want: torch.Tensor) -> float:
    return float(np.abs(got - want.numpy()).max() / want.abs().max())


EVERY = [
    (1, cp, 1, {"parallel__layout": layout, "parallel__wrapper": wrapper})
    for cp in (1, 2, 4)
    for layout in (LAYOUTS if cp > 1 else LAYOUTS[:1])
    for wrapper in ("fsdp", "ddp")
    if cp < 4 or wrapper == "fsdp" or layout == "zigzag"
]
OTHERS = [
    (2, 1, 1, {"parallel__wrapper": "ddp"}),
    (2, 2, 1, {"parallel__wrapper": "ddp"}),
    (1, 2, 2, {"parallel__wrapper": "ddp"}),
    (2, 2, 2, {"parallel__layout": "striped"}),
    (1, 2, 1, {"model__windows": [7, None]}),
    (1, 4, 1, {"model__windows": [None, 3], "parallel__layout": "contiguous"}),
    (1, 2, 1, {"model__tie_embeddings": True}),
    (2, 2, 2, {"model__tie_embeddings": True, "parallel__wrapper": "ddp"}),
    (1, 2, 1, {"recompute": "block"}),
    (1, 2, 2, {"recompute": "block", "parallel__wrapper": "ddp"}),
    (1, 2, 1, {"model__qk_norm": True}),
    (1, 4, 1, {"parallel__pad_to_multiple_of": 8}),
    (1, 2, 1, {"parallel__kernel": "reference"}),
    (1, 4, 1, {"parallel__layout": "balanced", "parallel__route": "exchange", "model__windows": [7, None]}),
    (1, 2, 1, {"compile": True, "recompute": "block", "parallel__pad_to_multiple_of": 16}),
]


@pytest.mark.parametrize(("dp", "cp", "gradient_accumulation_steps", "changes"), EVERY + OTHERS)
def test_equals_plain_torch(dp: int, cp: int, gradient_accumulation_steps: int, changes: dict[str, Any]) -> None:
    config = make_config(
        parallel__dp=dp, parallel__cp=cp, gradient_accumulation_steps=gradient_accumulation_steps, **changes
    )
    rows = rows_of(dp * gradient_accumulation_steps)
    first, *others = run_ranks(dp * cp, train_on_ranks, config, rows)
    want = right(
        dp * gradient_accumulation_steps, 45, json.dumps(config.model.model_dump(mode="json", exclude_unset=True))
    )
    assert first["losses"] == pytest.approx(want.losses, rel=1e-9)
    assert first["norms"] == pytest.approx(want.norms, rel=1e-9)
    assert first["rates"] == pytest.approx([reference.rate(config, step) for step in range(STEPS)], rel=1e-12)
    assert first["weights"].keys() == want.weights.keys()
    assert {name: error(w, want.weights[name]) for name, w in first["weights"].items()} == pytest.approx(
        dict.fromkeys(want.weights, 0.0), abs=1e-9
    )
    assert first["targets"] == [sum(sum(wanted[1:]) for row in step for _, wanted in row) for step in rows]
    assert first["tokens"] == [sum(len(ids) for row in step for ids, _ in row) for step in rows]
    for other in others:
        assert {key: other[key] for key in ("losses", "norms", "targets", "tokens", "skipped")} == {
            key: first[key] for key in ("losses", "norms", "targets", "tokens", "skipped")
        }
        assert other["weights"] == pytest.approx({name: w.sum() for name, w in first["weights"].items()}, rel=1e-12)


@pytest.mark.parametrize(("cp", "tokens"), [(2, 7), (4, 3), (4, 10), (4, 2)])
def test_rows_that_the_degree_does_not_divide(cp: int, tokens: int) -> None:
    """Shards are uneven, and some are empty."""
    rows = [[[(list(range(5, 5 + tokens)), [1] * tokens)]]] * STEPS
    want = reference.train(make_config(), rows)
    for got in run_ranks(cp, train_on_ranks, make_config(parallel__cp=cp), rows):
        assert got["losses"] == pytest.approx(want.losses, rel=1e-9)
        assert got["norms"] == pytest.approx(want.norms, rel=1e-9)


def test_dp_ranks_whose_rows_have_other_lengths() -> None:
    """The denominator counts all: neither dp ranks nor micro-batches are averaged."""
    rows = [[random_row(1, 40), [([3, 4], [1, 1])], random_row(2, 21), [([9, 8, 7], [1, 1, 1])]]] * STEPS
    want = reference.train(make_config(), rows)
    got = run_ranks(
        4, train_on_ranks, make_config(parallel__dp=2, parallel__cp=2, gradient_accumulation_steps=2), rows
    )[0]
    assert got["losses"] == pytest.approx(want.losses, rel=1e-9)
    assert got["norms"] == pytest.approx(want.norms, rel=1e-9)


@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("wrapper", ["fsdp", "ddp"])
def test_recomputing_repeats_no_attention_call(recompute: str, wrapper: str) -> None:
    config = make_config(parallel__cp=2, recompute=recompute, gradient_accumulation_steps=2, parallel__wrapper=wrapper)
    layers = MODEL["num_layers"]
    for got in run_ranks(2, train_on_ranks, config, rows_of(2)):
        assert (
            got["calls"]
            == [["forward"] * layers + ["backward"] * layers + ["forward"] * layers + ["backward"] * layers] * STEPS
        )


def gradients_on_ranks(group: Any, rank: int, config: TrainConfig, rows: list[list[Document]]) -> dict[str, Any]:
    step = make_step(config)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        loss, targets, tokens, _ = step.backward(own_batches(config, group, rows))
    gradients = {name: p.grad for name, p in decoder_of(step.stages[0]).named_parameters()}
    local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients.values()]
    return {
        "loss": loss,
        "targets": targets,
        "tokens": tokens,
        "finite": all(bool(g.isfinite().all()) for g in local),
        "gradients": {name: whole(g) / step.scale.value for name, g in gradients.items()},
        "dtypes": sorted({str(g.dtype) for g in local}),
        "weight_dtypes": sorted({str(p.dtype) for p in step.stages[0].parameters()}),
        "warnings": [str(w.message) for w in told if "ignored" in str(w.message)],
    }


@pytest.mark.parametrize(("dtype", "half_spacing"), [("bf16", 2.0**-9), ("fp16", 2.0**-12)])
def test_half_precision_is_as_near_to_exact_as_on_one_rank(dtype: str, half_spacing: float) -> None:
    """The worst of three draws of the first weights: one draw may round luckily on one rank."""
    rows = rows_of(1)[0]

    def errors(cp: int) -> dict[str, float]:
        worst: dict[str, float] = {}
        for seed in range(3):
            exact = reference.train(make_config(seed=seed), [rows])
            for got in run_ranks(cp, gradients_on_ranks, make_config(dtype=dtype, parallel__cp=cp, seed=seed), rows):
                assert got["dtypes"] == got["weight_dtypes"] == ["torch.float32"]
                found = {name: error(gradient, exact.gradients[name]) for name, gradient in got["gradients"].items()}
                found["the loss"] = abs(got["loss"] / exact.losses[0] - 1)
                worst = {name: max(e, worst.get(name, 0.0)) for name, e in found.items()}
        return worst

    own = errors(1)
    assert max(own.values()) > half_spacing / 4, "it did not compute in half precision"
    assert {name: e for name, e in errors(2).items() if e > 2 * own[name] + half_spacing} == {}


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(("dp", "cp"), [(1, 2), pytest.param(2, 2, marks=pytest.mark.nightly)])
def test_loss_falls_on_rows_that_come_again(dtype: str, dp: int, cp: int) -> None:
    rows = [[random_row(7), random_row(8)]] * 6
    config = make_config(
        dtype=dtype,
        parallel__dp=dp,
        parallel__cp=cp,
        gradient_accumulation_steps=2 // dp,
        optim__lr=0.02,
        model__init_std=0.1,
    )
    got = run_ranks(dp * cp, train_on_ranks, config, rows)[0]
    assert got["losses"][-1] < got["losses"][0] - 0.3
    assert not any(got["skipped"])


def overflow_on_ranks(group: Any, rank: int, config: TrainConfig, rows: list[list[Document]]) -> dict[str, Any]:
    """A step at an absurd scale, then one at a scale that works."""
    step = make_step(config)
    before = [whole(p) for p in step.stages[0].parameters()]
    step.scale.value = 2.0**60
    spoiled = step(own_batches(config, group, rows), 1)
    scale_after = step.scale.value
    unchanged = all(np.array_equal(a, whole(b)) for a, b in zip(before, step.stages[0].parameters(), strict=True))
    step.scale.value = 2.0**10
    good = step(own_batches(config, group, rows), 1)
    moved = any(not np.array_equal(a, whole(b)) for a, b in zip(before, step.stages[0].parameters(), strict=True))
    return {
        "skipped": [spoiled.skipped, good.skipped],
        "finite_norm": [bool(np.isfinite(r.grad_norm)) for r in (spoiled, good)],
        "scale_after": scale_after,
        "unchanged": unchanged,
        "moved": moved,
        "losses": [spoiled.loss, good.loss],
        "optimizer_steps": {int(state["step"]) for state in step.optimizers[0].state.values()},
    }


@pytest.mark.parametrize(("dp", "cp"), [(1, 2), (2, 2)])
def test_fp16_overflow_halves_the_scale_and_skips_the_step_on_every_rank(dp: int, cp: int) -> None:
    config = make_config(dtype="fp16", parallel__dp=dp, parallel__cp=cp)
    results = run_ranks(dp * cp, overflow_on_ranks, config, rows_of(dp)[0])
    for got in results:
        assert got["skipped"] == [True, False]
        assert got["finite_norm"] == [False, True]
        assert got["scale_after"] == 2.0**59
        assert got["unchanged"]
        assert got["moved"]
        assert got["losses"][0] == got["losses"][1] == results[0]["losses"][0]
        assert got["optimizer_steps"] == {1}


def one_rank_overflows(
    group: Any, rank: int, config: TrainConfig, rows: list[list[Document]]
) -> tuple[bool, float, bool]:
    step = make_step(config)
    step.backward(own_batches(config, group, rows))
    if rank == 1:
        next(iter(p for p in step.stages[0].parameters() if p.ndim == 2)).grad.to_local()[0, 0] = float("inf")
    before = [whole(p) for p in step.stages[0].parameters()]
    norm = step.update(0.1)
    unchanged = all(np.array_equal(a, whole(b)) for a, b in zip(before, step.stages[0].parameters(), strict=True))
    return bool(np.isfinite(norm)), step.scale.value, unchanged


def test_an_overflow_in_the_shard_of_one_rank_is_seen_by_all() -> None:
    """What `torch.amp.GradScaler` misses: it looks at each rank's own shard."""
    config = make_config(dtype="fp16", parallel__cp=2)
    assert run_ranks(2, one_rank_overflows, config, rows_of(1)[0]) == [(False, 2.0**15, True)] * 2


def test_whole_batch_ignored_gives_zeros_and_a_warning() -> None:
    rows = [[([1, 2, 3, 4, 5], [0] * 5), ([6, 7, 8], [0] * 3)]]
    for wrapper in ("fsdp", "ddp"):
        for got in run_ranks(2, gradients_on_ranks, make_config(parallel__cp=2, parallel__wrapper=wrapper), rows):
            assert (got["loss"], got["targets"], got["tokens"]) == (0.0, 0, 8)
            assert all((g == 0).all() for g in got["gradients"].values())
            assert got["warnings"] == ["every label of the global batch is ignored: loss and gradients are 0"]


def test_one_micro_batch_ignored_changes_nothing() -> None:
    """A row without targets beside one with: the gradient of the other alone."""
    full, empty = random_row(3), [([1, 2, 3], [0, 0, 0])]
    want = reference.train(make_config(), [[full]])
    for dp, gradient_accumulation_steps in ((1, 2), (2, 1)):
        config = make_config(parallel__dp=dp, parallel__cp=2, gradient_accumulation_steps=gradient_accumulation_steps)
        for got in run_ranks(2 * dp, gradients_on_ranks, config, [full, empty]):
            assert got["loss"] == pytest.approx(want.losses[0], rel=1e-9)
            assert got["warnings"] == []
            assert {name: error(g, want.gradients[name]) for name, g in got["gradients"].items()} == pytest.approx(
                dict.fromkeys(want.gradients, 0.0), abs=1e-9
            )


def evaluate_on_ranks(group: Any, rank: int, config: TrainConfig, rows: list[list[Document]]) -> tuple[float, bool]:
    step = make_step(config)
    dp, cp = config.parallel.dp or 1, config.parallel.cp
    count = -(-len(rows) // dp) * dp
    mine = [make_batch(rows[r]) if r < len(rows) else None for r in range(rank // cp, count, dp)]
    loss = step.evaluate(mine)
    return loss, all(p.grad is None for p in step.stages[0].parameters())


@pytest.mark.parametrize(
    ("dp", "cp", "changes"),
    [(1, 1, {}), (1, 2, {}), (1, 4, {}), (2, 2, {}), (4, 1, {}), (2, 1, {"parallel__wrapper": "ddp"}), (1, 3, {})],
)
def test_evaluation_is_weighted_by_tokens_at_every_degree(dp: int, cp: int, changes: dict[str, Any]) -> None:
    """Three rows, one with three targets only: not a mean of rows, and not a repeated row where dp does not divide them."""
    few = [(list(range(1, 41)), [0] * 37 + [1] * 3)]
    rows = [random_row(1), few, random_row(2, 30)]
    config = make_config(parallel__dp=dp, parallel__cp=cp, **changes)
    weights = make_model(config).state_dict()
    sums = [sum(float(reference.loss_sum(weights, config.model, document)) for document in row) for row in rows]
    counts = [sum(sum(wanted[1:]) for _, wanted in row) for row in rows]
    assert counts[1] == 3
    want = sum(sums) / sum(counts)
    assert abs(want - np.mean([s / c for s, c in zip(sums, counts, strict=True)])) > 1e-3
    for loss, untouched in run_ranks(dp * cp, evaluate_on_ranks, config, rows):
        assert loss == pytest.approx(want, rel=1e-9)
        assert untouched


def disagreeing_ranks(group: Any, rank: int, config: TrainConfig) -> tuple[str, str]:
    from tests.oracle import raised

    step = make_step(config)
    ids = [5, 6, 7, 8, 9, 10, 11, 12]
    documents = {
        0: [(ids, [1] * 8)],
        1: [(ids[::-1], [1] * 8)],  # a collate that shuffles
    }
    return raised(step, [make_batch(documents[rank])], 0)


def test_ranks_of_a_cp_group_with_other_samples_are_named() -> None:
    results = run_ranks(2, disagreeing_ranks, make_config(parallel__cp=2))
    assert [name for name, _ in results] == ["DisagreementError"] * 2
    for _, text in results:
        assert text.startswith(
            "the ranks of one context-parallel group were given different token ids: rank 1 differ from rank 0"
        )
        assert "key the loader by the data-parallel rank alone" in text


# Responses that share a prompt.

Prompt = tuple[list[int], list[Document]]
"""A prompt, and responses to it with what is to be predicted."""


def make_shared(prompts: list[Prompt]) -> Batch:
    """Of a prompt without responses: a document."""
    return Batch.concat([
        Batch.from_shared_prompt(ids, [r for r, _ in responses], [wanted for _, wanted in responses])
        if responses
        else Batch.from_documents([ids])
        for ids, responses in prompts
    ])  # fmt: skip


def unshared(prompts: list[Prompt]) -> list[Document]:
    """Each response behind a prompt of its own, which is not to be predicted."""
    documents = []
    for ids, responses in prompts:
        documents += [(ids + r, [0] * len(ids) + wanted) for r, wanted in responses] or [(ids, [1] * len(ids))]
    return documents


PROMPTS: list[Prompt] = [
    (list(range(3, 20)), [([7, 5, 9, 1, 8], [1] * 5), ([2] * 9, [1, 0] * 4 + [1]), ([], []), ([6], [1])]),
    ([1, 2, 3, 4, 5], []),
    ([11], [([12, 13], [1, 1]), ([14, 15, 16], [1, 1, 1])]),
    ([21, 22], [([23, 24, 25, 26], [0, 0, 1, 1])]),
]


@examples(100)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.lists(st.integers(0, 4), max_size=3)), min_size=1, max_size=3),
    st.none() | st.integers(1, 8),
)
def test_the_mask_of_shared_prompts_is_its_definition(sizes: list[tuple[int, list[int]]], window: int | None) -> None:
    batch = make_shared([([1] * n, [([2] * m, [1] * m) for m in responses]) for n, responses in sizes])
    document = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
    parent = np.array(batch.parents or [-1] * len(batch.lengths))[document]
    own = document[:, None] == document
    away = batch.position_ids[:, None] - batch.position_ids
    seen = (own & (away >= 0)) | (parent[:, None] == document)
    assert np.array_equal(
        documents_mask(batch.lengths, batch.parents, window).dense(), seen & (away < (window or batch.seq_len))
    )


def test_the_mask_of_one_shared_prompt_is_the_shared_prefix() -> None:
    batch = make_shared([(list(range(6)), [([1, 2, 3], [1] * 3), ([4], [1])])])
    assert np.array_equal(documents_mask(batch.lengths, batch.parents).dense(), Mask.shared_prefix(5, [4, 2]).dense())
    assert documents_mask((3,), (-1,), window=2) == Mask.causal(3, window=2)


def shared_on_ranks(group: Any, rank: int, config: TrainConfig, prompts: list[Prompt]) -> dict[str, Any]:
    step = make_step(config)
    loss, targets, tokens, _ = step.backward([make_shared(prompts)])
    gradients = {name: whole(p.grad) for name, p in decoder_of(step.stages[0]).named_parameters()}
    return {"loss": loss, "targets": targets, "tokens": tokens, "gradients": gradients}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("changes", [{}, {"model__windows": [4, None]}, {"model__windows": [2, 9]}])
def test_shared_prompts_equal_sequences_of_their_own(layout: str, changes: dict[str, Any]) -> None:
    """The right side knows no shared prompt: plain torch on every prompt and response."""
    want = reference.train(make_config(**changes), [[unshared(PROMPTS)]])
    for got in run_ranks(2, shared_on_ranks, make_config(parallel__cp=2, parallel__layout=layout, **changes), PROMPTS):
        assert (got["targets"], got["tokens"]) == (22, (16 + 19) + 5 + (0 + 7) + (1 + 5))
        assert got["loss"] == pytest.approx(want.losses[0], rel=1e-10)
        assert {name: error(g, want.gradients[name]) for name, g in got["gradients"].items()} == pytest.approx(
            dict.fromkeys(want.gradients, 0.0), abs=1e-10
        )


@pytest.mark.parametrize("route", ["exchange", "ulysses", "allgather"])
def test_shared_prompts_on_other_routes(route: str) -> None:
    want = reference.train(make_config(), [[unshared(PROMPTS)]])
    for got in run_ranks(2, shared_on_ranks, make_config(parallel__cp=2, parallel__route=route), PROMPTS):
        assert got["loss"] == pytest.approx(want.losses[0], rel=1e-10)
        assert max(error(g, want.gradients[name]) for name, g in got["gradients"].items()) < 1e-10


def live_slots(group: Any, rank: int, config: TrainConfig) -> tuple[list[int], list[int]]:
    routing = make_step(config).micro(make_batch(random_row(3))).routing
    assert routing is not None
    assert routing.slots is not None
    return routing.slots.tolist(), routing.live.flatten().nonzero()[:, 0].tolist()


def test_live_slots_are_listed_when_a_micro_batch_is_made_so_that_no_layer_waits_for_them() -> None:
    """45 tokens on 2 x 2 ranks of 32 slots at cp, 16 at tp under sp: some of them are dead."""
    experts = {"num_experts": 4, "top_k": 2, "intermediate_size": 8}
    changes = {
        "model__intermediate_size": None,
        "model__experts": experts,
        "model__num_kv_heads": 2,
        "parallel__pad_to_multiple_of": 32,
    }
    for ranks in ({"parallel__cp": 2}, {"parallel__cp": 2, "parallel__tp": 2}):
        listed = run_ranks(2 ** len(ranks), live_slots, make_config(**changes, **ranks))
        assert all(slots == live for slots, live in listed)
        assert sum(len(slots) for slots, _ in listed) == 45
