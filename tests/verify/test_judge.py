"""The verdict: tolerances at their edges, and everything that is missing or not a number fails."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from longspan.train.train_config import TrainConfig
from longspan.verify.evidence import Evidence, digest_inputs, input_rows
from longspan.verify.judge import NOISE, Verdict, gradient_errors, judge
from tests.train.tiny import make_config

NAN, INF = float("nan"), float("inf")


class Files:
    """Evidence with gradients by name."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0

    def __call__(
        self, losses: tuple[float, ...] = (2.0, 1.0), norms: tuple[float, ...] = (4.0, 3.0), **gradients: object
    ) -> Evidence:
        self._count += 1
        path = self._folder / f"{self._count}.safetensors"
        tensors = gradients or {"a": [1.0, -8.0], "b": [[0.5]]}
        Evidence.write_gradients(
            path, {name: torch.tensor(value, dtype=torch.float64) for name, value in tensors.items()}
        )
        return Evidence(list(losses), list(norms), ["same"] * len(losses), path)


@pytest.fixture
def make(tmp_path: Path) -> Files:
    return Files(tmp_path)


def case(dtype: str, comm_dtype: str | None = None) -> TrainConfig:
    """Two ranks, zigzag."""
    return make_config(dtype=dtype, parallel__cp=2, parallel__comm_dtype=comm_dtype)


def exact(dtype: str, seen: Evidence, right: Evidence) -> Verdict:
    return judge(case(dtype), seen, right, right)


def test_equal_sides_pass(make: Files) -> None:
    found = exact("fp64", make(), make())
    assert (found.cp, found.layout, found.dtype, found.loss, found.grad_norm) == (2, "zigzag", "fp64", 2.0, 4.0)
    assert (found.loss_error, found.norm_error, found.gradient_error, found.drift) == (0.0, 0.0, 0.0, [0.0, 0.0])
    assert (found.loss_tolerance, found.norm_tolerance, found.gradient_tolerance) == (1e-9, 1e-9, 1e-9)
    assert found.inputs_equal
    assert found.passed


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp64", 1e-9), ("fp32", 1e-4)])
@pytest.mark.parametrize(("part", "passed"), [(0.99, True), (1.01, False)])
@pytest.mark.parametrize("where", ["first loss", "last loss", "first norm", "last norm", "gradient"])
def test_edges_of_exact_tolerances(
    make: Files, dtype: str, tolerance: float, part: float, passed: bool, where: str
) -> None:
    off = 1 + part * tolerance
    seen = {
        "first loss": lambda: make(losses=(2.0 * off, 1.0)),
        "last loss": lambda: make(losses=(2.0, 1.0 / off)),
        "first norm": lambda: make(norms=(4.0 * off, 3.0)),
        "last norm": lambda: make(norms=(4.0, 3.0 * off)),
        "gradient": lambda: make(a=[1.0 - 8.0 * part * tolerance, -8.0], b=[[0.5]]),  # of the greatest entry, 8
    }[where]()
    assert exact(dtype, seen, make()).passed == passed


def test_the_worst_gradient_is_named(make: Files) -> None:
    found = exact("fp64", make(a=[1.0, -8.0], b=[[0.6]]), make())
    assert (found.worst_gradient, found.passed) == ("b", False)
    assert found.gradient_error == pytest.approx(0.2)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["loss", "last loss", "norm", "gradient"])
@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16", "fp16"])
def test_what_is_not_a_number_fails(make: Files, dtype: str, where: str, bad: float) -> None:
    seen = {
        "loss": lambda: make(losses=(bad, 1.0)),
        "last loss": lambda: make(losses=(2.0, bad)),
        "norm": lambda: make(norms=(bad, 3.0)),
        "gradient": lambda: make(a=[bad, -8.0], b=[[0.5]]),
    }[where]
    assert not judge(case(dtype), seen(), make(), make()).passed
    assert not exact(dtype, make(), seen()).passed, "the right side is spoiled"
    assert not exact(dtype, seen(), seen()).passed, "both sides are spoiled"
    assert not judge(case(dtype), seen(), seen(), make()).passed, "both sides of the type are spoiled"
    if dtype in NOISE:
        assert not judge(case(dtype), make(), seen(), make()).passed, "nothing can be allowed"


@pytest.mark.parametrize("dtype", ["fp64", "bf16"])
@pytest.mark.parametrize(
    "gradients",
    [
        {"a": [1.0, -8.0]},
        {"a": [1.0, -8.0], "b": [[0.5]], "c": [0.0]},
        {"a": [1.0, -8.0, 0.0], "b": [[0.5]]},
        {"a": [1.0, -8.0], "b": [0.5]},
    ],
)
def test_a_tensor_that_is_missing_or_of_another_shape_fails(
    make: Files, dtype: str, gradients: dict[str, object]
) -> None:
    found = exact(dtype, make(**gradients), make())
    assert not found.passed
    assert found.gradient_error == INF
    assert not exact(dtype, make(), make(**gradients)).passed


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(("part", "passed"), [(0.99, True), (1.01, False)])
@pytest.mark.parametrize("where", ["loss", "norm", "gradient"])
def test_half_precision_may_err_twice_as_much_as_on_one_rank(
    make: Files, dtype: str, part: float, passed: bool, where: str
) -> None:
    """CP=1 in the type errs by 1/100: CP=N may by 2/100 and half a spacing, by no more."""
    off = part * (0.02 + NOISE[dtype])
    right_a, size = [3.0, -4.0], 5.0
    right = make(a=right_a, b=[[0.5]])
    own = make(losses=(2.02, 1.0), norms=(4.04, 3.0), a=[3.0, -4.0 + 0.01 * size], b=[[0.5]])
    seen = {
        "loss": lambda: make(losses=(2.0, 1.0 - off), a=right_a, b=[[0.5]]),
        "norm": lambda: make(norms=(4.0 + 4.0 * off, 3.0), a=right_a, b=[[0.5]]),
        "gradient": lambda: make(a=[3.0 + 0.6 * size * off, -4.0 + 0.8 * size * off], b=[[0.5]]),
    }[where]()
    found = judge(case(dtype), seen, own, right)
    assert found.passed == passed
    assert found.loss_tolerance == pytest.approx(0.02 + NOISE[dtype])
    assert found.norm_tolerance == pytest.approx(0.02 + NOISE[dtype])
    if where == "gradient":
        assert (found.worst_gradient, found.gradient_tolerance) == ("a", pytest.approx(0.02 + NOISE[dtype]))


def test_each_gradient_of_half_precision_has_its_own_tolerance(make: Files) -> None:
    """`b` is exact on one rank, so that what `a` is allowed does not excuse it."""
    own = make(a=[1.0, -9.0], b=[[0.5]])
    found = judge(case("bf16"), make(a=[1.0, -9.5], b=[[0.505]]), own, make())
    assert (found.worst_gradient, found.passed) == ("b", False)


def test_gradient_norms_of_half_precision_are_judged_at_the_first_step(make: Files) -> None:
    """What AdamW makes of rounding later is not CP's: the loss alone is followed."""
    assert exact("bf16", make(norms=(4.0, 3.3)), make()).passed
    assert not exact("bf16", make(norms=(4.4, 3.0)), make()).passed
    assert not exact("bf16", make(losses=(2.0, 1.1)), make()).passed
    assert not exact("fp32", make(norms=(4.0, 3.3)), make()).passed


def test_drift_is_against_one_rank_in_the_same_type(make: Files) -> None:
    found = judge(case("bf16"), make(losses=(2.0, 1.1)), make(losses=(1.6, 1.0)), make())
    assert found.drift == pytest.approx([0.25, 0.1])
    assert found.loss_error == pytest.approx(0.1)


def test_other_inputs_fail(make: Files) -> None:
    found = exact("fp64", replace(make(), inputs=["same", "other"]), make())
    assert (found.inputs_equal, found.passed) == (False, False)


def test_zero_gradients_equal_zeros_only() -> None:
    zero, tiny = {"a": torch.zeros(2)}, {"a": torch.tensor([0.0, 1e-30])}
    assert gradient_errors(zero, zero) == {"a": 0.0}
    assert gradient_errors(tiny, zero)["a"] > 1e200
    assert math.isinf(gradient_errors({"a": torch.tensor([NAN, 0.0])}, zero)["a"])


def test_inputs_are_compared_in_any_order_and_without_dead_slots() -> None:
    ids, positions, labels = (
        torch.tensor([[5, 6, 7, 0]]),
        torch.tensor([[0, 1, 0, -1]]),
        torch.tensor([[6, -100, 1, -100]]),
    )
    whole = input_rows(ids, positions, labels)
    assert whole.tolist() == [[5, 0, 6], [6, 1, -100], [7, 0, 1]]
    assert digest_inputs([whole]) == digest_inputs([whole[2:], whole[:0], whole[:2]])
    for changed in (input_rows(ids, positions, labels + 1), input_rows(ids, positions + 1, labels), whole[:2]):
        assert digest_inputs([changed]) != digest_inputs([whole])


@pytest.mark.parametrize("comm_dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("dtype", ["fp64", "fp32"])
def test_rounding_on_the_wire_may_err_twice_as_much_as_rounding_everything_on_one_rank(
    make: Files, dtype: str, comm_dtype: str
) -> None:
    right_a, size = [3.0, -4.0], 5.0
    right, own = make(a=right_a), make(a=[3.0, -4.0 + 0.01 * size])
    for part, passed in ((0.99, True), (1.01, False)):
        off = part * (0.02 + NOISE[comm_dtype])
        seen = make(a=[3.0 + 0.6 * size * off, -4.0 + 0.8 * size * off])
        found = judge(case(dtype, comm_dtype), seen, own, right)
        assert (found.passed, found.comm_dtype, found.route) == (passed, comm_dtype, "ring")
        assert found.gradient_tolerance == pytest.approx(0.02 + NOISE[comm_dtype])
    assert not judge(case(dtype), seen, own, right).passed, "what is sent as it is has no excuse"
