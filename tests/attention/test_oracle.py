"""Every layout, mask, degree and head layout against a dense fp64 oracle, on every rank, forward and backward."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.strategies import DEGREES, layout_and_mask
from tests.ranks import run_ranks

from .cases import Case, check_cases, matrix

LENGTHS = {1: 19, 2: 23, 3: 25, 4: 37, 5: 33, 8: 43}
"""Tokens of the quick matrix at each degree: none is a multiple of what it is cut into."""


@pytest.mark.parametrize("P", DEGREES)
def test_matrix(P):
    cases = matrix(P, [LENGTHS[P]])
    assert len(cases) == 9 * 3 * 2 * 3
    assert run_ranks(P, check_cases, cases) == [len(cases)] * P


@pytest.mark.slow
@pytest.mark.parametrize("P", DEGREES)
def test_matrix_over_lengths(P):
    cases = matrix(P, [1, 2, 7, 16, 64])
    assert run_ranks(P, check_cases, cases) == [len(cases)] * P


random_cases = st.builds(
    lambda pair, heads, batch, kernel: Case(*pair, heads, batch, kernel),
    layout_and_mask(1, 200, DEGREES, with_slots=True),
    st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 2), (3, 1)]),
    st.integers(1, 2),
    st.sampled_from(["auto", "sdpa", "reference"]),
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(random_cases)
def test_any_length_and_documents(case):
    P = case.layout.ranks
    assert run_ranks(P, check_cases, [case]) == [1] * P


@pytest.mark.slow
@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.sampled_from(DEGREES).flatmap(
    lambda P: st.lists(st.builds(
        lambda pair, heads: Case(*pair, heads), layout_and_mask(1, 200, (P,), with_slots=True), st.sampled_from([(2, 2), (4, 1)])
    ), min_size=40, max_size=40)
))  # fmt: skip
def test_many_lengths_and_documents(cases):
    P = cases[0].layout.ranks
    assert run_ranks(P, check_cases, cases) == [len(cases)] * P
