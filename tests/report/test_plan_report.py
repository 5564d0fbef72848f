"""Every number of a report against the plan it describes, and against counts made by hand."""

import json
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import numpy as np
import pytest

from longspan.errors import SpecError
from longspan.plan import Mask, Plan
from longspan.report import PlanReport, RankReport, StepReport, describe
from tests.plan.strategies import NAMES as LAYOUTS
from tests.report.plans import LEVELS, MASKS, groups, make, owners


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_numbers_are_the_plan_s(layout: str, mask: Mask, ranks: int) -> None:
    plan = make(layout, mask, ranks, slots=24, heads=(6, 2))
    report = describe(plan, head_dim=16, itemsize=2)
    seen, owner = mask.dense(), owners(plan.layout)

    assert report.area == mask.area == seen.sum()
    assert report.imbalance == plan.imbalance
    assert report.blocks == sum(rank.blocks for rank in report.per_rank)
    assert sum(rank.area for rank in report.per_rank) == mask.area
    assert sum(rank.share for rank in report.per_rank) == pytest.approx(1.0)
    for rank in report.per_rank:
        here = plan.rank_plan(rank.rank)
        assert (rank.tokens, rank.slots) == (here.tokens, 24)
        assert rank.area == plan.area(rank.rank) == sum(step.area for step in rank.steps)
        assert rank.blocks == plan.blocks(rank.rank)
        assert rank.rows_received == plan.rows_received(rank.rank) == sum(step.rows_received for step in rank.steps)
        assert rank.rows_sent == here.rows_sent == sum(step.rows_sent for step in rank.steps)
        assert rank.grad_rows_sent == here.grad_rows_sent == sum(step.grad_rows_sent for step in rank.steps)
        assert rank.bytes_forward == plan.bytes(rank.rank, "forward", 16, 2)
        assert rank.bytes_backward == plan.bytes(rank.rank, "backward", 16, 2)
        assert rank.bytes_forward == sum(step.bytes_forward for step in rank.steps)
        assert rank.bytes_backward == sum(step.bytes_backward for step in rank.steps)
        for step in rank.steps:
            assert step.area == seen[np.ix_(owner == rank.rank, owner == step.source)].sum()
            assert step.grad_rows_home <= step.grad_rows_sent
    assert report.rows_sent == sum(rank.rows_received for rank in report.per_rank)


def arriving(plan: Plan, onward: int) -> np.ndarray:
    """Rows that arrive, `(groups, groups)` of receiver and source, from the dense mask: needed here, or passed on from here."""
    owner, number = owners(plan.layout), len(groups(plan))
    group_of = {rank: n for n, members in enumerate(groups(plan)) for rank in members}
    group = np.array([group_of[rank] for rank in owner])
    needed = np.array([plan.mask.dense()[group == n].any(axis=0) for n in range(number)])
    rows = np.zeros((number, number), dtype=np.int64)
    for source in range(number):
        wants = needed[:, group == source]
        if plan.route.startswith("allgather"):
            wants = np.ones_like(wants) * any(needed[n, group != n].any() for n in range(number))
        elif not plan.route.startswith("exchange"):  # each row goes on to the farthest that needs it
            distance = onward * (np.arange(number) - source)[:, None] % number
            wants = (wants * distance).max(axis=0) >= distance
        rows[:, source] = wants.sum(axis=1)
        rows[source, source] = 0
    return rows


def exchanged(plan: Plan, rank: int, size: int, row: int, grads: int) -> tuple[int, int]:
    """Bytes that `rank` sends forward and backward so that heads come together: whole heads dealt out one by one."""
    (members,) = [members for members in groups(plan) if rank in members]
    num_q, num_kv = plan.heads
    each = num_q // len(members)
    kv = {m: {h * num_kv // num_q for h in range(n * each, (n + 1) * each)} for n, m in enumerate(members)}
    tokens = {m: int((plan.layout.positions(m) >= 0).sum()) for m in members}
    others = [m for m in members if m != rank]
    there = sum(tokens[rank] * each * size for m in others)
    back = sum(tokens[m] * each * size for m in others)
    forward = there + sum(tokens[rank] * len(kv[m]) * row for m in others) + back
    again = forward if plan.route == "upipe" else 0
    return forward, again + there + back + sum(tokens[m] * len(kv[rank]) * grads for m in others)


@pytest.mark.parametrize("mask", ["causal", "window", "documents", "shared prefix"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("ranks", "comm_dtype"), [(4, None), (6, "fp8")])
@pytest.mark.parametrize("route", LEVELS)
def test_every_route_against_brute_sums(route: str, ranks: int, comm_dtype: str | None, layout: str, mask: str) -> None:
    plan = make(layout, MASKS[mask], ranks, heads=(12, 3), route=route, comm_dtype=comm_dtype)
    report = describe(plan, head_dim=40, itemsize=2)
    seen, owner, together = plan.mask.dense(), owners(plan.layout), groups(plan)
    size, partial = 40 * 2, 2 * 40 * 4
    row = 2 * (40 + 2) if comm_dtype else 2 * size
    # A ring goes the way round that moves less.
    rows = min((arriving(plan, onward) for onward in (1, -1)), key=np.sum)

    assert report.area == seen.sum() == pytest.approx(sum(rank.area for rank in report.per_rank))
    for rank in report.per_rank:
        members = together[rank.group]
        assert rank.rank in members
        queries = np.isin(owner, members)
        assert rank.area == pytest.approx(seen[queries].sum() / len(members))
        for step in rank.steps:
            keys = np.isin(owner, together[step.source])
            if step.rows_received or step.distance == 0 == step.stage:
                assert step.area == pytest.approx(seen[np.ix_(queries, keys)].sum() / len(members))
        for source in range(len(together)):
            here = sum(step.rows_received for step in rank.steps if step.source == source)
            assert here == rows[rank.group, source]
        others = int(queries.sum()) - rank.tokens if len(members) > 1 else 0
        assert rank.rows_received == rows[rank.group].sum() + others

        replicated = len(members) > 1 and 3 % len(members) != 0
        heads = (
            exchanged(plan, rank.rank, size, row, partial if replicated else 2 * size) if len(members) > 1 else (0, 0)
        )
        assert (rank.bytes_heads_forward, rank.bytes_heads_backward) == heads
        each = 12 // len(members)
        first = members.index(rank.rank) * each
        num_kv = len({h // 4 for h in range(first, first + each)})
        assert rank.bytes_forward == heads[0] + num_kv * row * rank.rows_sent
        assert rank.bytes_backward == heads[1] + num_kv * (row * rank.rows_sent + partial * rank.grad_rows_sent)
        assert rank.bytes_forward == heads[0] + sum(step.bytes_forward for step in rank.steps)
        assert rank.bytes_backward == heads[1] + sum(step.bytes_backward for step in rank.steps)
    assert report.rows_sent == rows.sum() * len(together[0])
    assert report.blocks == pytest.approx(sum(rank.blocks for rank in report.per_rank))
    assert report.bytes_heads_forward == sum(rank.bytes_heads_forward for rank in report.per_rank)
    assert report.plain_ring_bytes == 24 * (ranks - 1) * 3 * 2 * size
    assert report.bytes_relative == report.bytes_forward / report.plain_ring_bytes


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("route", "ranks"), [("ring", 5), ("rotate", 5), ("allgather", 5), ("exchange", 11), ("exchange-ulysses", 22)]
)
def test_what_leaves_in_one_stage_arrives_for_the_next(route: str, ranks: int, layout: str, mask: Mask) -> None:
    report = describe(make(layout, mask, ranks, heads=(2, 2), route=route), 16, 4)
    sent, received = report.by_stage("rows_sent"), report.by_stage("rows_received")
    assert sent.shape == (ranks, report.num_stages)
    assert sent[:, :-1].sum(axis=0).tolist() == received[:, 1:].sum(axis=0).tolist()
    assert not sent[:, -1].any()
    assert not received[:, 0].any()
    assert report.by_stage("area").sum(axis=1).tolist() == [rank.area for rank in report.per_rank]
    assert report.by_stage("bytes_forward").sum(axis=1).tolist() == [
        rank.bytes_forward - rank.bytes_heads_forward for rank in report.per_rank
    ]


def test_a_stage_of_several_steps_and_one_that_only_sends() -> None:
    # Contiguous, causal: rank 0 wants nothing and gives to all; stages hold distances 1, then 2 and 3.
    first, *_, last = describe(make("contiguous", Mask.causal(24), 4, route="exchange"), 16, 2).per_rank
    assert [(step.stage, step.distance, step.source, step.rows_sent) for step in first.steps] == [
        (0, 0, 0, 6),
        (1, 0, 0, 12),
    ]
    assert [(step.stage, step.distance, step.source, step.grad_rows_home) for step in last.steps] == [
        (0, 0, 3, 0),
        (1, 1, 2, 6),
        (2, 2, 1, 6),
        (2, 3, 0, 6),
    ]


def test_degrees_of_a_route_of_two_levels() -> None:
    for route, degrees, group in (
        ("ring", (1, 6, None), 3),
        ("ulysses", (6, 1, None), 0),
        ("usp", (2, 3, 2), 1),
        ("ulysses-ring", (3, 2, 2), 1),
    ):
        report = describe(make("zigzag", Mask.causal(24), 6, heads=(6, 6), route=route), 16, 2)
        assert (report.head_degree, report.row_degree, report.inner) == degrees
        assert report.per_rank[3].group == group


def test_ulysses_relative_to_a_plain_ring() -> None:
    # Without GQA on P ranks 4 S d (P - 1) / P^2 elements of each rank, where a plain ring sends 2 S d (P - 1) / P.
    report = describe(make("zigzag", Mask.causal(64), 8, heads=(8, 8), route="ulysses"), 16, 2)
    assert report.per_rank[0].bytes_forward == 4 * 64 * (8 * 16) * 7 // 64 * 2
    assert report.bytes_relative == 2 / 8
    assert (report.rows_sent, report.rows_relative) == (0, 0.0)


def test_distances_count_hops_in_the_direction_of_travel() -> None:
    # Contiguous causal rows go up to the next rank, zigzag's go down.
    up = describe(make("contiguous", Mask.causal(24), 4), 16, 2).per_rank[3]
    assert [(step.distance, step.source) for step in up.steps] == [(0, 3), (1, 2), (2, 1), (3, 0)]
    down = describe(make("zigzag", Mask.causal(24), 4), 16, 2).per_rank[3]
    assert [(step.distance, step.source) for step in down.steps] == [(0, 3), (1, 0), (2, 1), (3, 2)]


def test_pruned_ring_relative_to_a_plain_one() -> None:
    zigzag = describe(make("zigzag", Mask.causal(64), 8), 16, 2)
    assert zigzag.plain_ring_rows == 64 * 7
    assert zigzag.rows_sent == 336
    assert zigzag.rows_relative == 0.75
    assert describe(make("contiguous", Mask.causal(64), 8), 16, 2).rows_relative == 0.5
    assert describe(make("striped", Mask.full(64), 8), 16, 2).rows_relative == 1.0
    assert describe(make("zigzag", Mask.full(64), 1), 16, 2).rows_relative == 0.0


def test_bytes_by_hand() -> None:
    # Contiguous, causal, two ranks: rank 0 sends its 12 rows in forward and again in backward, rank 1 sends 12 partials home.
    first, second = describe(make("contiguous", Mask.causal(24), 2, heads=(8, 2)), head_dim=16, itemsize=2).per_rank
    row = 2 * 16 * 2
    assert (first.bytes_forward, second.bytes_forward) == (12 * row * 2, 0)
    assert (first.bytes_backward, second.bytes_backward) == (12 * row * 2, 12 * row * 4)
    assert [step.grad_rows_home for step in second.steps] == [0, 12]


def test_a_mask_that_sees_nothing() -> None:
    report = describe(make("zigzag", Mask.bands(8, []), 2), 16, 2)
    assert (report.area, report.rows_sent, report.imbalance) == (0, 0, 1.0)
    assert [rank.share for rank in report.per_rank] == [0.0, 0.0]


def test_json_holds_the_record() -> None:
    report = describe(make("zigzag", Mask.causal(24), 2, heads=(8, 2)), 16, 2)
    data = json.loads(report.to_json())
    assert list(data) == [
        *("layout", "mask", "route", "reason", "ranks", "head_degree", "row_degree", "inner", "seq_len", "slots"),
        *("heads", "head_dim", "itemsize", "comm_dtype", "area", "blocks", "imbalance", "rows_sent", "grad_rows_sent"),
        *("plain_ring_rows", "rows_relative", "plain_ring_bytes", "bytes_relative", "bytes_forward", "bytes_backward"),
        *("bytes_heads_forward", "bytes_heads_backward", "per_rank"),
    ]
    assert data["heads"] == [8, 2]
    assert data["per_rank"][1]["steps"][1]["area"] == report.per_rank[1].steps[1].area


@pytest.mark.parametrize("kind", [PlanReport, RankReport, StepReport])
def test_every_key_is_documented(kind: type[PlanReport | RankReport | StepReport]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "concepts" / "plan.md").read_text()
    assert [field.name for field in fields(kind) if f"`{field.name}`" not in page] == []


def test_records_are_frozen() -> None:
    report = describe(make("zigzag", Mask.causal(24), 2), 16, 2)
    with pytest.raises(FrozenInstanceError):
        report.area = 0  # type: ignore[misc]


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(SpecError, match="head_dim=0, itemsize=2: both must be at least 1"):
        describe(make("zigzag", Mask.causal(24), 2), 0, 2)
