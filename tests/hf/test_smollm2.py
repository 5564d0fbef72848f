"""SmolLM2-135M through transformers' own model: logits, loss and gradients on two and three ranks are those of one process."""

from copy import deepcopy
from functools import lru_cache
from typing import NamedTuple

import pytest
import torch
from transformers import PreTrainedModel

from longspan import ContextParallel, hf
from tests.hf.models import gradients, loss_of, packed, shifted
from tests.hf.smollm2 import smollm2, text
from tests.ranks import run_threads

Tensor = torch.Tensor

CASES = {
    "ring": (2, "zigzag", "ring", 1),
    "exchange": (2, "zigzag", "exchange", 1),
    "ring on three": (3, "zigzag", "ring", 1),
    "ulysses on three": (3, "zigzag", "ulysses", 1),
    "balanced packing": (2, "balanced", "exchange", 5),
}
"""Name -> ranks, layout, route, documents of the row. Three ranks divide the 9 query heads and 3 KV heads."""
_BRIEFLY = ("ulysses on three", "balanced packing")


class Result(NamedTuple):
    """Logits in global order, or on ranks the worst difference of this rank's."""

    logits: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]


def parts_of(seq_len: int, documents: int) -> list[Tensor]:
    """Cut the text into documents, each a third as long as the rest."""
    parts, rest = [], torch.tensor([text(seq_len)])
    for _ in range(documents - 1):
        parts.append(rest[:, : rest.shape[1] // 3])
        rest = rest[:, rest.shape[1] // 3 :]
    return [*parts, rest]


def build(layers: int, dtype: torch.dtype) -> PreTrainedModel:
    """Return a copy to train, which keeps the input of each layer alone: 4,096 tokens of 30 layers would take 6 GB."""
    model = deepcopy(smollm2(layers)).to(dtype).train()
    model.gradient_checkpointing_enable()
    return model


@lru_cache(maxsize=1)
def on_one(layers: int, dtype: torch.dtype, seq_len: int, documents: int) -> Result:
    """Compute the documents one at a time, by SDPA."""
    model, targets = build(layers, dtype), seq_len - documents
    logits, losses = [], []
    for part in parts_of(seq_len, documents):
        out = model(input_ids=part, labels=part, use_cache=False)
        loss = out.loss * ((part.shape[1] - 1) / targets)
        if dtype == torch.float64:  # transformers' loss is in fp32
            loss = loss_of(out.logits, shifted(part), targets)
        loss.backward()
        logits.append(out.logits.detach())
        losses.append(loss.detach())
    return Result(torch.cat(logits, 1), torch.stack(losses).sum(), gradients(model))


def on_ranks(
    group, rank: int, layout: str, route: str, batch: dict[str, Tensor], size: tuple[int, torch.dtype]
) -> Result:
    model, cp = build(*size), ContextParallel(group, layout, route, heads=(9, 3))
    model.set_attn_implementation("longspan")
    with hf.sequence(cp, model, batch) as seq:
        out = model(**seq.inputs)
    loss, targets = out.loss, seq.batch.num_targets
    if size[1] == torch.float64:
        loss = loss_of(out.logits, seq.inputs["shift_labels"], targets)
    seq.backward(loss)
    here = on_one(*size, seq.batch.seq_len, len(seq.batch.lengths)).logits[:, seq.layout.positions(rank)]
    return Result((out.logits.detach() - here).abs().max(), loss.detach(), gradients(model))


def differences(name: str, layers: int, dtype: torch.dtype, seq_len: int) -> dict[str, float]:
    """Return the worst absolute difference of logits, that of the loss, and the worst relative one of a gradient."""
    ranks, layout, route, documents = CASES[name]
    wanted = on_one(layers, dtype, seq_len, documents)
    found = run_threads(ranks, on_ranks, layout, route, packed(parts_of(seq_len, documents)), (layers, dtype))
    assert all(result.gradients.keys() == wanted.gradients.keys() for result in found)
    worst = 0.0
    for parameter, gradient in wanted.gradients.items():
        total = sum(result.gradients[parameter] for result in found)
        worst = max(worst, float((total - gradient).norm() / gradient.norm()))
    return {
        "logits": max(float(result.logits) for result in found),
        "loss": abs(float(sum(result.loss for result in found) - wanted.loss)),
        "gradient": worst,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in _BRIEFLY else pytest.param(name, marks=pytest.mark.nightly) for name in CASES]
)
def test_four_layers_in_fp64(name: str) -> None:
    found = differences(name, 4, torch.float64, 96)
    # transformers normalises in fp32: a value on the edge between two of its numbers may fall either way.
    assert found.pop("logits") <= 1e-7
    assert max(found.values()) <= 1e-9, found


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_the_whole_model_on_4096_tokens_in_fp32(name: str, record_property) -> None:
    found = differences(name, 30, torch.float32, 4096)
    for quantity, value in found.items():
        record_property(quantity, value)
    assert found["logits"] <= 1e-3
    assert found["loss"] <= 1e-5
    assert found["gradient"] <= 1e-3
