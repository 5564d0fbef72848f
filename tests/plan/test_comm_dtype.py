"""What a row weighs on the wire, and in the counts of a plan."""

import pytest

from longspan.errors import SpecError
from longspan.plan import Layout, Mask, plan_attention
from longspan.plan.comm_dtype import check_comm_dtype, row_bytes


@pytest.mark.parametrize(
    ("comm_dtype", "dim", "itemsize", "right"),
    [
        (None, 64, 2, 128),
        (None, 80, 8, 640),
        ("bf16", 64, 8, 128),
        ("bf16", 5, 2, 10),
        ("fp8", 32, 2, 33),
        ("fp8", 64, 4, 66),
        ("fp8", 80, 2, 83),  # 32 + 32 + 16 elements: three exponents
        ("fp8", 1, 2, 2),
        ("fp8", 128, 8, 132),
    ],
)
def test_bytes_of_a_row(comm_dtype, dim, itemsize, right):
    assert row_bytes(comm_dtype, dim, itemsize) == right


def test_known_types():
    assert [check_comm_dtype(name) for name in (None, "bf16", "fp8")] == [None, "bf16", "fp8"]
    with pytest.raises(SpecError) as error:
        check_comm_dtype("fp4")
    assert str(error.value) == (
        "comm_dtype 'fp4' is not known\n\nhint: choose one of bf16, fp8, or leave comm_dtype out to send rows in their own dtype"
    )


@pytest.mark.parametrize("route", ["ring", "exchange", "allgather", "rotate"])
@pytest.mark.parametrize(("comm_dtype", "row"), [("bf16", 2 * (80 + 40)), ("fp8", 80 + 3 + 40 + 2)])
def test_a_plan_counts_rows_as_they_travel_and_gradients_in_four_bytes(route, comm_dtype, row):
    S, P, K = 32, 4, 2
    plan = plan_attention(Layout.zigzag(S, P), Mask.full(S), route, (4, K), comm_dtype=comm_dtype)
    rows = S // P * (P - 1)
    for rank in range(P):
        assert plan.bytes(rank, "forward", (80, 40), 4) == rows * K * row
        assert plan.bytes(rank, "backward", (80, 40), 4) == rows * K * (row + 4 * (80 + 40))


@pytest.mark.parametrize(("comm_dtype", "row"), [("bf16", 2 * 2 * 80), ("fp8", 2 * (80 + 3))])
def test_exchanged_heads_travel_as_rounded_keys_and_values_and_whole_queries_and_outputs(comm_dtype, row):
    S, P = 32, 4
    plan = plan_attention(Layout.zigzag(S, P), Mask.full(S), "ulysses", (8, 4), comm_dtype=comm_dtype)
    tokens, others = S // P, P - 1
    for rank in range(P):
        assert plan.bytes(rank, "forward", 80, 4) == tokens * others * (2 * 2 * 80 * 4 + row)
        assert plan.bytes(rank, "backward", 80, 4) == tokens * others * (2 * 2 * 80 * 4 + 2 * 80 * 4)
