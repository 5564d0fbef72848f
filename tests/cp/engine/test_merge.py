"""Merging partial results, against fp64 math and by hand."""

import itertools
import math

import pytest
import torch

from longspan.cp.engine.merge import accumulation_dtype, merge_, merge_sink_, sink_gradient

INF = float("inf")


def row(value, lse, dtype=torch.float32):
    """One row of one head: out `(1, 1, 1, 2)`, lse `(1, 1, 1)`."""
    return torch.full((1, 1, 1, 2), float(value), dtype=dtype), torch.full((1, 1, 1), float(lse), dtype=dtype)


@pytest.mark.parametrize(
    ("a", "b", "value", "lse"),
    [
        ((1.0, 0.0), (3.0, 100.0), 3.0, 100.0),
        ((3.0, 100.0), (1.0, 0.0), 3.0, 100.0),
        ((1.0, 0.0), (3.0, 0.0), 2.0, math.log(2)),
        ((1.0, math.log(3)), (5.0, 0.0), 2.0, math.log(4)),
        ((0.0, -INF), (3.0, -7.0), 3.0, -7.0),
        ((3.0, -7.0), (0.0, -INF), 3.0, -7.0),
        ((0.0, -INF), (0.0, -INF), 0.0, -INF),
        ((1.0, 1e4), (3.0, 1e4), 2.0, 1e4 + math.log(2)),
        ((1.0, -1e4), (3.0, -1e4), 2.0, -1e4 + math.log(2)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_two_rows(a, b, value, lse, dtype):
    out, total = row(*a, dtype)
    before = out.data_ptr(), total.data_ptr()
    merge_(out, total, *row(*b, dtype))
    assert (out.data_ptr(), total.data_ptr()) == before
    right_out, right_lse = row(value, lse, dtype)
    torch.testing.assert_close(out, right_out, rtol=1e-6, atol=0)
    torch.testing.assert_close(total, right_lse, rtol=1e-6, atol=0)


@pytest.mark.parametrize("parts", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_three_parts_in_any_order_are_the_softmax_over_all(parts, order):
    torch.manual_seed(0)
    scores = torch.randn(1, 2, 5, 30, dtype=torch.float64) * 8
    values = torch.randn(1, 2, 30, 4, dtype=torch.float64)
    chunks = []
    for s, v in zip(scores.split((4, 16, 10), -1), values.split((4, 16, 10), 2), strict=True):
        chunks.append(((torch.softmax(s, -1) @ v).to(parts), s.logsumexp(-1).float()))
    out, lse = torch.zeros(1, 2, 5, 4), torch.full((1, 2, 5), -INF)
    for index in order:
        merge_(out, lse, *chunks[index])
    unit = torch.finfo(parts).eps
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=0, atol=1e-5)
    torch.testing.assert_close(out.double(), torch.softmax(scores, -1) @ values, rtol=0, atol=8 * unit)
    assert out.dtype == lse.dtype == torch.float32


def test_rows_that_see_nothing_stay_as_they_are_among_others():
    out, lse = torch.zeros(1, 1, 2, 1), torch.full((1, 1, 2), -INF)
    merge_(out, lse, torch.tensor([[[[5.0], [0.0]]]]), torch.tensor([[[1.0, -INF]]]))
    merge_(out, lse, torch.tensor([[[[5.0], [0.0]]]]), torch.tensor([[[1.0, -INF]]]))
    assert out.flatten().tolist() == [5, 0]
    assert lse[0, 0, 1] == -INF


def test_a_sink_of_logit_zero_beside_two_keys_of_logit_zero():
    out, lse = row(1.0, math.log(2), torch.float64)
    merge_sink_(out, lse, torch.zeros(1, dtype=torch.float64))
    torch.testing.assert_close(out, torch.full_like(out, 2 / 3))
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(3)))


def test_a_row_that_sees_only_the_sink_gives_zero():
    out, lse = row(0.0, -INF)
    merge_sink_(out, lse, torch.tensor([4.0]))
    assert out.eq(0).all()
    assert lse.item() == 4.0


@pytest.mark.parametrize("blind", [False, True])
def test_sink_gradient_is_autograds(blind):
    torch.manual_seed(0)
    sink = torch.randn(2, dtype=torch.float64, requires_grad=True)
    scores = torch.randn(3, 2, 5, 7, dtype=torch.float64)
    if blind:
        scores[:, :, 2] = -INF
    values, dout = torch.randn(3, 2, 7, 4, dtype=torch.float64), torch.randn(3, 2, 5, 4, dtype=torch.float64)
    with_sink = torch.cat((scores, sink.view(1, 2, 1, 1).expand(3, 2, 5, 1)), -1)
    out = torch.softmax(with_sink, -1)[..., :7] @ values
    out.backward(dout)
    got = sink_gradient(dout, out.detach(), with_sink.logsumexp(-1).detach(), sink.detach())
    torch.testing.assert_close(got, sink.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
def test_accumulation_is_at_least_fp32(dtype, wide):
    assert accumulation_dtype(dtype) == wide
