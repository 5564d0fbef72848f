"""Compare the two sides and give a verdict, with the tolerance of every figure.

fp64, fp32    losses, gradient norms and every gradient equal those of CP=1 to a fixed relative error
bf16, fp16    the error against CP=1 in fp32 is at most twice that of CP=1 in the same type, plus rounding noise
comm_dtype    the error against CP=1 is at most twice that of CP=1 with all keys and values rounded as on the wire, plus noise

Rounding errors of bf16 and fp16 are random: of a gradient their norm says more than the greatest, and what AdamW makes of them
in later steps shows in the loss alone. So there a gradient's error is that of its norm, and the norm of all is the first step's.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from longspan.train.train_config import TrainConfig
from longspan.verify.evidence import Evidence

EXACT = {"fp64": 1e-9, "fp32": 1e-4}
"""Relative error allowed to a gradient, as a tensor: greatest difference over greatest entry. To losses and norms too."""

NOISE = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp8": 2.0**-4}
"""Half the spacing of the type at 1: what two correct orders of summation may differ by, beyond twice the baseline's error."""


@dataclass(frozen=True)
class Verdict:
    """One case. Errors are relative; `drift` is the loss's difference from CP=1 of the same type, step by step;
    `inputs_equal` says that the ranks together gave the model CP=1's tokens, each with its position and label."""

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
    """`baseline` is CP=1 in the same type, its keys and values rounded if those of `case` are on the wire; `exact` is CP=1 in
    at least fp32, unrounded (for fp64 and fp32 that is the baseline itself, unless it rounds)."""
    dtype, parallel = case.dtype, case.parallel
    equal = dtype in EXACT and parallel.comm_dtype is None
    judged, order = (None, math.inf) if equal else (1, 2)
    noise = max(NOISE.get(dtype, 0.0), NOISE.get(parallel.comm_dtype or "", 0.0))
    losses = _errors(seen.losses, exact.losses)
    norms = _errors(seen.grad_norms, exact.grad_norms)[:judged]
    gradients = gradient_errors(seen.read_gradients(), exact.read_gradients(), order)
    if equal:
        loss_tolerance = norm_tolerance = EXACT[dtype]
        allowed = dict.fromkeys(gradients, EXACT[dtype])
    else:
        loss_tolerance = 2 * max(_errors(baseline.losses, exact.losses)) + noise
        norm_tolerance = 2 * max(_errors(baseline.grad_norms, exact.grad_norms)[:judged]) + noise
        own = gradient_errors(baseline.read_gradients(), exact.read_gradients(), order)
        allowed = {name: 2 * error + noise for name, error in own.items()}
    # A baseline that overflowed would allow anything: only what is finite passes.
    tolerances = (loss_tolerance, norm_tolerance, *allowed.values())
    # The worst is the one that uses most of what it is allowed; a tensor that CP=1 lacks is allowed nothing.
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
    """Norm of the difference over the norm, per parameter; infinite where one side has no such tensor.

    With `order` infinity: the greatest difference over the greatest entry; with 2: the Euclidean norms.
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
