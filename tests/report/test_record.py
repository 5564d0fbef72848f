"""Every number of a report against the plan it describes, and against counts made by hand."""

import json
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import numpy as np
import pytest

from longspan.plan import Mask
from longspan.report import PlanReport, RankReport, StepReport, describe
from longspan.spec import SpecError
from tests.report.plans import LAYOUTS, MASKS, make, owners


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_numbers_are_the_plan_s(layout: str, mask: Mask, ranks: int) -> None:
    plan = make(layout, mask, ranks, slots=24, heads=(6, 2))
    report = describe(plan, head_dim=16, itemsize=2)
    seen, owner = mask.dense(), owners(plan.layout)

    assert report.area == mask.area == seen.sum()
    assert report.imbalance == plan.imbalance
    assert sum(rank.area for rank in report.per_rank) == mask.area
    assert sum(rank.share for rank in report.per_rank) == pytest.approx(1.0)
    for rank in report.per_rank:
        here = plan.rank_plan(rank.rank)
        assert (rank.tokens, rank.slots) == (here.tokens, 24)
        assert rank.area == plan.area(rank.rank) == sum(step.area for step in rank.steps)
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


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_leaves_at_one_distance_arrives_at_the_next(layout: str, mask: Mask) -> None:
    report = describe(make(layout, mask, 5), 16, 4)
    sent, received = report.by_step("rows_sent"), report.by_step("rows_received")
    assert sent.shape == (5, report.num_steps)
    assert sent[:, :-1].sum(axis=0).tolist() == received[:, 1:].sum(axis=0).tolist()
    assert not sent[:, -1].any()
    assert not received[:, 0].any()
    assert report.by_step("area").sum(axis=1).tolist() == [rank.area for rank in report.per_rank]


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
        *("layout", "mask", "route", "ranks", "seq_len", "slots", "heads", "head_dim", "itemsize", "area", "imbalance"),
        *("rows_sent", "grad_rows_sent", "plain_ring_rows", "rows_relative", "bytes_forward", "bytes_backward"),
        "per_rank",
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
