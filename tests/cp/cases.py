"""One case of the oracle matrix: what a rank must give, to the byte and the pair."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from itertools import product
from typing import NamedTuple

import pytest

from longspan.comm.sharding import shard
from longspan.comm.traffic import record
from longspan.cp.attention import attention
from longspan.names import LAYOUTS
from longspan.plan import Layout, Mask, Plan, plan_attention
from tests.oracle import Answer, Inputs, dense_attention, make_inputs, relative_error
from tests.plan.strategies import NAMES as LAYOUTS_WITHOUT_MASKS
from tests.plan.strategies import carries
from tests.ranks import run_threads, share_out

NAN = float("nan")


class Case(NamedTuple):
    layout: Layout
    mask: Mask
    heads: tuple[int, int]
    batch: int = 1
    kernel: str = "auto"
    dim: int = 8
    route: str = "ring"
    inner: int | None = None


def masks_of(S: int) -> list[Mask]:
    """A mask of each kind over `S` tokens, as far as they fit."""
    third = S // 3
    some = [
        Mask.causal(S),
        Mask.full(S),
        Mask.causal(S, window=max(1, third)),
        Mask.documents([0, third, 0, S - third, 0]),
        Mask.prefix(S, third),
        Mask.documents([S], causal=False, window=3),
    ]
    if S > 6:
        half, quarter = S // 2, S // 4
        some += [
            Mask.shared_prefix(half, [quarter, 0, S - half - quarter]),
            # Tokens 0 and 1 see nothing, keys 0 and 4 onwards are seen by some only.
            Mask.bands(S, [(2, 5, 0, S, None, None), (5, S, 1, 4, 1, None), (5, S, 4, S, -2, 7)]),
            Mask.concat([Mask.full(third), Mask.causal(S - third - 2, window=4), Mask.bands(2, [])]),
        ]
    return some


def matrix(P: int, lengths, every_option: bool = True) -> list[Case]:
    """Layouts x masks x MHA, GQA, MQA x exact and fixed slots, kernels and batch sizes taking turns; balanced, all take turns.

    Without `every_option` heads and slots take turns too: each layout meets each mask once.
    """
    cases = []
    for S in lengths:
        for number, mask in enumerate(masks_of(S)):
            for index, name in enumerate(LAYOUTS_WITHOUT_MASKS):
                options = list(product((None, -(-S // P) + 3), ((4, 4), (4, 2), (4, 1))))
                for slots, heads in options if every_option else [options[(number + 2 * index) % len(options)]]:
                    # so that every mask meets the layouts with other options
                    turn = len(cases) + number if every_option else 3 * number + index
                    layout = Layout.named(name, S, P, slots)
                    cases.append(Case(layout, mask, heads, 1 + turn % 5 % 2, ("sdpa", "reference")[turn % 2]))
            layout = Layout.balanced(mask, P, (None, -(-S // P) + 3)[number % 2])
            cases.append(
                Case(layout, mask, ((4, 2), (4, 1))[number // 2 % 2], kernel=("sdpa", "reference")[number % 2])
            )
    return cases


HEADS = ((8, 2), (6, 2), (12, 6), (9, 3), (10, 2))
"""Query and KV heads for routes that may move them: fewer and more KV heads than ranks, and degrees that divide none or both."""


def routed(route: str, inner: int | None, P: int, S: int, every_layout: bool = True) -> list[Case]:
    """Each mask in each layout, or in one of them in turn; heads that the route can deal out, slots, batch sizes and kernels
    take turns, so that the route meets every one of them."""
    heads = [some for some in HEADS if carries(route, P, inner, some)]
    cases = []
    for number, mask in enumerate(masks_of(S)):
        for index, name in enumerate(LAYOUTS if every_layout else (LAYOUTS[number % len(LAYOUTS)],)):
            turn = 7 * number + index  # so that every mask meets the layouts with other options
            layout = Layout.named(name, S, P, (None, -(-S // P) + 3)[turn % 2], masks=[mask])
            kernel = ("sdpa", "reference")[turn // 2 % 2]
            cases.append(Case(layout, mask, heads[turn % len(heads)], 1 + turn // 3 % 2, kernel, 8, route, inner))
    for values in (LAYOUTS, heads, ("sdpa", "reference"), (True, False)):
        met = {v for c in cases for v in (c.layout.name, c.heads, c.kernel, c.layout.slots is None)}
        assert met >= set(values), f"{route} {inner} of {P} never meets {set(values) - met}"
    for name in LAYOUTS if every_layout else ():
        own = [c for c in cases if c.layout.name == name]
        for options in ({c.layout.slots is None for c in own}, {c.kernel for c in own}, {c.batch for c in own}):
            assert len(options) == 2, f"{route} {inner} of {P}: layout {name} meets {options} alone"
    return cases


class Prepared(NamedTuple):
    """A case with what is right: made once for all ranks of a process."""

    case: Case
    plan: Plan
    inputs: Inputs
    want: Answer

    @classmethod
    def of(cls, case: Case) -> "Prepared":
        inputs = make_inputs(case.mask.seq_len, case.heads, case.batch, case.dim)
        plan = plan_attention(case.layout, case.mask, case.route, case.heads, case.inner)
        return cls(case, plan, inputs, dense_attention(inputs, case.mask))


def check_cases(group, rank: int, cases: list[Case]) -> int:
    """Run and check all cases on this rank of gloo; how many there were."""
    return _check_prepared(group, rank, [Prepared.of(case) for case in cases])


def check_in_memory(P: int, cases: list[Case]) -> None:
    """Run and check cases on `P` ranks that are threads, under NCCL's rules; processes share out many cases."""
    if len(cases) < 8:
        assert _in_memory(P, cases) == len(cases)
    else:
        assert sum(share_out(partial(_in_memory, P), cases)) == len(cases)


def _in_memory(P: int, cases: list[Case]) -> int:
    (number,) = set(run_threads(P, _check_prepared, [Prepared.of(case) for case in cases]))
    return number


def _check_prepared(group, rank: int, cases: list[Prepared]) -> int:
    for case in cases:
        check_case(group, rank, case)
    return len(cases)


through = pytest.mark.parametrize(
    ("P", "routes", "every_layout"),
    [
        pytest.param(P, routes, every, id=f"{P}, {how}", marks=pytest.mark.nightly if every else ())
        for P, routes in ((1, ("ring",)), (2, ("ring", "exchange", "ulysses")), (3, ("ring", "exchange")))
        for every, how in ((False, "in turn"), (True, "every layout"))
    ],
)  # fmt: skip
"""Ranks and routes on which a kernel's stand-in meets the matrix: each mask in one layout, in turn; in every layout, nightly."""


def check_through(
    installed: Callable[[], AbstractContextManager[None]],
    kernel: str,
    P: int,
    routes: tuple[str, ...],
    every_layout: bool,
) -> None:
    """The matrix on `P` ranks by a kernel that `installed` puts in the place of the real one, in each rank."""
    cases = [case._replace(kernel=kernel) for route in routes for case in routed(route, None, P, 23, every_layout)]
    assert sum(share_out(partial(_through, installed, P), cases)) == len(cases)


def _through(installed: Callable[[], AbstractContextManager[None]], P: int, cases: list[Case]) -> int:
    with installed():
        return _in_memory(P, cases)


def check_case(group, rank: int, prepared: Prepared) -> None:
    case, plan, inputs, want = prepared
    layout, mask, heads, batch, kernel, dim, route, _ = case
    q, k, v = (shard(x, layout, rank, 2, fill=NAN).requires_grad_() for x in inputs[:3])
    with record() as calls:
        out = attention(q, k, v, plan=plan, group=group, kernel=kernel)
        out.backward(shard(inputs.dout, layout, rank, 2, fill=NAN))
    calls = [call for call in calls if call.rank == rank]  # threads of one process see each other's
    place = f"rank {rank}: {layout.name} of {layout.ranks}, slots {layout.slots}, {mask.array.tolist()}, {case[2:]}"
    live = int(layout.counts[rank])
    for name, got, right in zip(("out", "dq", "dk", "dv"), (out.detach(), q.grad, k.grad, v.grad), want, strict=False):
        local = shard(right, layout, rank, 2)
        assert got.shape == local.shape, f"{place}: {name}"
        assert got[:, :, live:].eq(0).all(), f"{place}: dead slots of {name}"
        # A rank may hold little of a tensor, all of it small: errors are relative to the whole tensor.
        error = relative_error(got, local, floor=max(1e-3, right.abs().max().item()))
        assert error < 1e-10, f"{place}: {name} is off by {error}"
    assert [call.phase for call in calls] == ["forward", "backward"], place
    for call in calls:
        assert call.bytes_sent == plan.bytes(rank, call.phase, dim, 8) * batch, f"{place}: {call}"
        assert (call.pairs, call.blocks) == (plan.area(rank), plan.blocks(rank)), f"{place}: {call}"
        # Exchanged heads are kept for backward, so that their rows arrive but once.
        exchanged = plan.rank_plan(rank).live_rows - live if call.phase == "backward" else 0
        assert call.rows_received == plan.rows_received(rank) - exchanged, f"{place}: {call}"
        assert (call.rank, call.route, call.kernel) == (rank, route, kernel if kernel != "auto" else "sdpa")
    if plan.degrees.heads == 1:
        assert calls[0].bytes_received == plan.rows_received(rank) * batch * 2 * heads[1] * dim * 8, place
