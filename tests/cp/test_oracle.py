"""Every route, layout, mask, degree and head layout against a dense fp64 oracle, on every rank, forward and backward."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.plan.strategies import (
    DEGREES,
    INNER_HEADS,
    NAMES,
    OUTER_HEADS,
    carries,
    factored,
    inners_of,
    layout_and_mask,
)
from tests.ranks import run_ranks

from .cases import HEADS, Case, check_cases, check_in_memory, matrix, routed

LENGTHS = {1: 19, 2: 23, 3: 25, 4: 37, 5: 33, 6: 41, 8: 43}
"""Tokens of the quick matrix at each degree: none is a multiple of what it is cut into."""


IN_TURN = pytest.param(False, id="in turn")
EVERY_OPTION = pytest.param(True, id="every option", marks=pytest.mark.nightly)


@pytest.mark.parametrize("every_option", [IN_TURN, EVERY_OPTION])
@pytest.mark.parametrize("P", [2, 3, 4])
def test_matrix_over_gloo(P, every_option):
    cases = matrix(P, [LENGTHS[P]], every_option)
    assert len(cases) == 9 * (len(NAMES) * (2 * 3 if every_option else 1) + 1)
    assert run_ranks(P, check_cases, cases) == [len(cases)] * P


@pytest.mark.parametrize("every_option", [IN_TURN, EVERY_OPTION])
@pytest.mark.parametrize("P", [P for P in DEGREES if P != 3])
def test_matrix(P, every_option):
    check_in_memory(P, matrix(P, [LENGTHS[P]], every_option))


def test_matrix_of_three():
    check_in_memory(3, matrix(3, [LENGTHS[3]]))


def test_options_in_turn_meet_all():
    """Every layout meets all heads, slots, kernels and batch sizes, and every mask meets all layouts."""
    cases = [case for case in matrix(3, [LENGTHS[3]], every_option=False) if case.layout.name in NAMES]
    for name in NAMES:
        own = [case for case in cases if case.layout.name == name]
        assert len({case.mask for case in own}) == len(own) == 9
        assert {(case.heads, case.layout.slots is None) for case in own} == {
            (heads, exact) for heads in ((4, 4), (4, 2), (4, 1)) for exact in (True, False)
        }
        assert {case.kernel for case in own} == {"sdpa", "reference"}
        assert {case.batch for case in own} == {1, 2}


@pytest.mark.nightly
@pytest.mark.parametrize("P", DEGREES)
def test_matrix_over_lengths(P):
    cases = matrix(P, [1, 2, 7, 16, 64])
    check_in_memory(P, cases)


ONE_LEVEL = ("rotate", "allgather", "exchange", "ulysses")
TWO_LEVELS = INNER_HEADS + OUTER_HEADS
"""Beside the ring, whose matrix is above, and `upipe`, which has tests of its own."""


def factorisations(routes, P: int, proper: bool) -> list[tuple[str, int | None]]:
    """Routes with every inner degree; with `proper` only those that leave work for both levels."""
    return [(r, n) for r in routes for n in inners_of(r, P) if n is None or not proper or 1 < n < P]


QUICK = [(P, r, n) for P in (1, 2, 3, 4) for r, n in factorisations(ONE_LEVEL + TWO_LEVELS, P, proper=False)]
QUICK += [(P, r, n) for P in (5, 6, 8) for r, n in factorisations((*ONE_LEVEL, "usp"), P, proper=True)]


@pytest.mark.parametrize("P", [1, 2, 3, 4, 5, *(pytest.param(P, marks=pytest.mark.slow) for P in (6, 8))])
def test_routes(P):
    cases = [case for degree, r, n in QUICK if degree == P for case in routed(r, n, P, LENGTHS[P], every_layout=False)]
    assert len(cases) >= 9 * 4
    check_in_memory(P, cases)


@pytest.mark.nightly
@pytest.mark.parametrize("route", ONE_LEVEL + TWO_LEVELS)
@pytest.mark.parametrize("P", [2, 3, 4, 5, 6, 8])
def test_routes_in_every_layout(P, route):
    whole = factorisations((route,), P, proper=True)
    cases = [case for r, n in whole for case in routed(r, n, P, LENGTHS[P])]
    for r, n in factorisations((route,), P, proper=False):
        if (r, n) not in whole and P > 4:  # up to 4 ranks `test_routes` has them
            cases += routed(r, n, P, LENGTHS[P], every_layout=False)
    if cases:
        check_in_memory(P, cases)
    else:
        assert P in (2, 3), "a prime degree has no factorisation of its own"


random_cases = st.builds(
    lambda pair, heads, batch, kernel: Case(*pair, heads, batch, kernel),
    layout_and_mask(1, 200, DEGREES, with_slots=True),
    st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 2), (3, 1)]),
    st.integers(1, 2),
    st.sampled_from(["auto", "sdpa", "reference"]),
)


@examples(40)
@given(random_cases)
def test_any_length_and_documents(case):
    P = case.layout.ranks
    check_in_memory(P, [case])


ALL_ROUTES = ("ring", *ONE_LEVEL, *TWO_LEVELS)
SMALL_HEADS = (*HEADS, (1, 1), (4, 4), (3, 1), (15, 3))
"""15/3 on 5 ranks: a rank's query heads share KV heads unevenly."""


@st.composite
def routed_cases(draw, degrees):
    route, P, inner, heads = draw(factored(ALL_ROUTES, degrees, SMALL_HEADS))
    layout, mask = draw(layout_and_mask(1, 120, (P,), with_slots=True))
    batch, kernel = draw(st.integers(1, 2)), draw(st.sampled_from(["auto", "sdpa", "reference"]))
    return Case(layout, mask, heads, batch, kernel, draw(st.sampled_from([8, 5])), route, inner)


@examples(60)
@given(routed_cases((1, 2, 3, 4, 5, 6, 8)))
def test_any_route(case):
    P = case.layout.ranks
    assert carries(case.route, P, case.inner, case.heads)
    check_in_memory(P, [case])


@pytest.mark.nightly
@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.sampled_from([2, 3, 4, 5, 6, 8]).flatmap(
    lambda P: st.lists(routed_cases((P,)), min_size=40, max_size=40)
))  # fmt: skip
def test_many_routes(cases):
    P = cases[0].layout.ranks
    check_in_memory(P, cases)


@pytest.mark.nightly
@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.sampled_from(DEGREES).flatmap(
    lambda P: st.lists(st.builds(
        lambda pair, heads: Case(*pair, heads), layout_and_mask(1, 200, (P,), with_slots=True), st.sampled_from([(2, 2), (4, 1)])
    ), min_size=40, max_size=40)
))  # fmt: skip
def test_many_lengths_and_documents(cases):
    P = cases[0].layout.ranks
    check_in_memory(P, cases)
