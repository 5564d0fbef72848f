"""The schedule by hand, clipping as torch clips, the loss scale's transitions, and what decays."""

import math

import pytest
import torch

from longspan.train.optim import LossScale, learning_rate, make_optimizer, update
from longspan.train.train_config import OptimConfig


@pytest.mark.parametrize(
    ("step", "rate"),
    [
        (0, 0.25),
        (1, 0.5),
        (3, 1.0),
        (4, 1.0),  # the cosine begins at its top
        (6, 0.55),  # half way down to 0.1
        (5, 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2),
        (7, 0.1 + 0.9 * (1 - math.sqrt(0.5)) / 2),
        (8, 0.1),
        (100, 0.1),
    ],
)
def test_learning_rate(step: int, rate: float) -> None:
    assert learning_rate(OptimConfig(lr=1.0, warmup_steps=4, min_lr_ratio=0.1), step, 8) == pytest.approx(rate)


def test_learning_rate_without_warm_up_and_with_nothing_else() -> None:
    assert learning_rate(OptimConfig(lr=2.0, min_lr_ratio=0.0), 0, 10) == 2.0
    assert learning_rate(OptimConfig(lr=2.0, min_lr_ratio=0.0), 5, 10) == pytest.approx(1.0)
    only = OptimConfig(lr=3.0, warmup_steps=3)
    assert [learning_rate(only, step, 3) for step in range(4)] == pytest.approx([1.0, 2.0, 3.0, 3.0])


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8, bias=False), torch.nn.RMSNorm(8)).double()
    model(torch.randn(16, 4, dtype=torch.float64)).square().sum().backward()
    return model


@pytest.mark.parametrize("clip", [None, 0.5, 1e9])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_clips_as_torch_does_and_steps_at_that_rate(clip: float | None, scale: float) -> None:
    ours, theirs = make_model(), make_model()
    for parameter in ours.parameters():
        parameter.grad *= scale
    config = OptimConfig(lr=7.0, weight_decay=0.3)
    loss_scale = LossScale(value=scale, patience=10)
    norm = update([make_optimizer(ours, config)], ours.parameters(), loss_scale, 0.01, clip)
    total = torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip or math.inf)
    matrix, vector = theirs.parameters()
    torch.optim.AdamW(
        [{"params": [matrix], "weight_decay": 0.3}, {"params": [vector], "weight_decay": 0.0}],
        lr=0.01, betas=config.betas, eps=config.eps,
    ).step()  # fmt: skip
    assert norm == pytest.approx(float(total), rel=1e-12)
    assert norm > 0.5
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=0)
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert (loss_scale.value, loss_scale.good_steps) == (scale, 1)


@pytest.mark.parametrize("spoil", [float("inf"), float("nan")])
def test_a_step_without_a_finite_norm_changes_nothing_but_the_scale(spoil: float) -> None:
    model = make_model()
    before = [p.detach().clone() for p in model.parameters()]
    next(model.parameters()).grad[0, 0] = spoil
    optimizer = make_optimizer(model, OptimConfig(lr=1.0))
    scale = LossScale(value=8.0, good_steps=3)
    assert not math.isfinite(update([optimizer], model.parameters(), scale, 1.0, 1.0))
    assert (scale.value, scale.good_steps) == (4.0, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not optimizer.state


def test_only_matrices_decay_and_frozen_parameters_are_left_out() -> None:
    model = make_model()
    extra = torch.nn.Parameter(torch.zeros(3, 3), requires_grad=False)
    model.register_parameter("frozen", extra)
    matrices, vectors = make_optimizer(model, OptimConfig(weight_decay=0.2)).param_groups
    assert [tuple(p.shape) for p in matrices["params"]] == [(8, 4)]
    assert [tuple(p.shape) for p in vectors["params"]] == [(8,)]
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.2, 0.0)


@pytest.mark.parametrize(("dtype", "value"), [("fp64", 1.0), ("fp32", 1.0), ("bf16", 1.0), ("fp16", 65536.0)])
def test_first_loss_scale(dtype: str, value: float) -> None:
    assert LossScale.of_dtype(dtype).value == value


def test_loss_scale_transitions() -> None:
    scale = LossScale(value=4.0, patience=2)
    told = []
    for finite in (True, True, True, False, True, True, False, False):
        scale.update(finite)
        told.append((scale.value, scale.good_steps))
    assert told == [(4.0, 1), (8.0, 0), (8.0, 1), (4.0, 0), (4.0, 1), (8.0, 0), (4.0, 0), (2.0, 0)]


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16"])
def test_other_types_are_never_scaled(dtype: str) -> None:
    scale = LossScale.of_dtype(dtype)
    for finite in (True, False, True):
        scale.update(finite)
    assert scale.value == 1.0
