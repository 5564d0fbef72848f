"""Compare the two sides and return a verdict, with a tolerance for every figure.

fp64, fp32    losses, gradient norms and every gradient equal those of CP=1 up to a fixed relative error: `EXACT`
bf16, fp16    the error against CP=1 in fp32 is at most twice that of CP=1 in the same dtype, plus rounding noise
comm_dtype    the error against CP=1 is at most twice that of CP=1 with all keys and values rounded to comm_dtype, plus noise

Rounding errors of bf16, fp16 and comm_dtype are random, so gradients are compared by the Euclidean norm, not by the maximum.
Gradient norms are compared at the first step only: AdamW amplifies rounding errors; in later steps the loss shows them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from longspan.model import TransformersConfig
from longspan.train.train_config import TrainConfig, model_config
from longspan.verify.evidence import Evidence

EXACT = {"fp64": 1e-9, "fp32": 1e-4}
"""Allowed relative error of losses, norms and gradients (of a gradient: greatest difference / greatest entry)."""

EXACT_TRANSFORMERS = {"fp64": 1e-6, "fp32": 1e-4}
"""The same for models of transformers, some of which compute norms and routers in fp32 in any dtype."""

NOISE = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp8": 2.0**-4}
"""Half the spacing of the dtype at 1: added to twice the baseline's error, because the order of summation differs."""


@dataclass(frozen=True)
class Verdict:
    """The result of one case. Errors are relative. `drift` is the loss error per step against CP=1 in the same dtype.
    `inputs_equal`: whether the ranks together ran the tokens, positions and labels of CP=1."""

    cp: int
    layout: str
    route: str
    dtype: str
    comm_dtype: str | None
    loss: float
    grad_norm: float
    loss_error: float
    loss_tolerance: float
    norm_error: float
    norm_tolerance: float
    worst_gradient: str
    gradient_error: float
    gradient_tolerance: float
    drift: list[float]
    inputs_equal: bool
    passed: bool


def judge(case: TrainConfig, seen: Evidence, baseline: Evidence, exact: Evidence) -> Verdict:
    """Return the verdict on `case`. `baseline` is CP=1 in the same dtype, with keys and values rounded to the case's
    comm_dtype. `exact` is CP=1 in at least fp32, unrounded (the baseline itself for fp64 and fp32 without comm_dtype)."""
    dtype, parallel = case.dtype, case.parallel
    equal = dtype in EXACT and parallel.comm_dtype is None
    exact_error = (EXACT_TRANSFORMERS if isinstance(model_config(case), TransformersConfig) else EXACT).get(
        dtype, math.inf
    )
    judged, order = (None, math.inf) if equal else (1, 2)
    noise = max(NOISE.get(dtype, 0.0), NOISE.get(parallel.comm_dtype or "", 0.0))
    losses = _errors(seen.losses, exact.losses)
    norms = _errors(seen.grad_norms, exact.grad_norms)[:judged]
    gradients = gradient_errors(seen.read_gradients(), exact.read_gradients(), order)
    if equal:
        loss_tolerance = norm_tolerance = exact_error
        allowed = dict.fromkeys(gradients, exact_error)
    else:
        loss_tolerance = 2 * max(_errors(baseline.losses, exact.losses)) + noise
        norm_tolerance = 2 * max(_errors(baseline.grad_norms, exact.grad_norms)[:judged]) + noise
        own = gradient_errors(baseline.read_gradients(), exact.read_gradients(), order)
        allowed = {name: 2 * error + noise for name, error in own.items()}
    # A baseline that overflowed would allow anything, so all tolerances must be finite.
    tolerances = (loss_tolerance, norm_tolerance, *allowed.values())
    # The worst gradient has the largest error relative to its tolerance, which is 0 for a tensor that CP=1 lacks.
    worst = max(gradients, key=lambda name: gradients[name] / allowed.get(name, 1e-300))
    return Verdict(
        cp=parallel.cp,
        layout=parallel.layout,
        route=parallel.route,
        dtype=dtype,
        comm_dtype=parallel.comm_dtype,
        loss=seen.losses[0],
        grad_norm=seen.grad_norms[0],
        loss_error=max(losses),
        loss_tolerance=loss_tolerance,
        norm_error=max(norms),
        norm_tolerance=norm_tolerance,
        worst_gradient=worst,
        gradient_error=gradients[worst],
        gradient_tolerance=allowed.get(worst, 0.0),
        drift=_errors(seen.losses, baseline.losses),
        inputs_equal=seen.inputs == exact.inputs,
        passed=seen.inputs == exact.inputs
        and all(map(math.isfinite, tolerances))
        and max(losses) <= loss_tolerance
        and max(norms) <= norm_tolerance
        and all(error <= allowed.get(name, 0.0) for name, error in gradients.items()),
    )


def gradient_errors(
    seen: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor], order: float = math.inf
) -> dict[str, float]:
    """Return norm of the difference / norm, per parameter; infinite if one side lacks the tensor.

    `order` infinity: greatest difference / greatest entry. `order` 2: Euclidean norms.
    """
    errors = {}
    for name in sorted(seen.keys() | right.keys()):
        if name not in seen or name not in right or seen[name].shape != right[name].shape:
            errors[name] = float("inf")
            continue
        a, b = seen[name].double(), right[name].double()
        size = torch.linalg.vector_norm(b, order).clamp(min=torch.finfo(torch.float64).tiny)
        error = float(torch.linalg.vector_norm(a - b, order) / size)
        errors[name] = error if error == error else float("inf")
    return errors


def _errors(seen: list[float], right: list[float]) -> list[float]:
    errors = [abs(a - b) / max(abs(b), 1e-300) for a, b in zip(seen, right, strict=True)]
    return [error if error == error else float("inf") for error in errors]
