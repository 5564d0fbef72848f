"""Memory-efficient attention through a stand-in that has the operators' schema, checks and mask rules, as the kernels' sources
(kernel_forward.h, kernel_backward.h, shipped with torch) have them."""

from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given

from longspan.cp.attention import attention
from longspan.kernels import efficient
from longspan.kernels.choice import KERNELS
from longspan.kernels.efficient import EfficientKernel
from longspan.kernels.protocol import launches
from longspan.kernels.scores import ScoreChange
from longspan.plan import Layout, Mask, Shape, plan_attention
from tests.cp.cases import check_through, through
from tests.examples import examples
from tests.oracle import dense_attention, make_inputs, relative_error
from tests.ranks import run_threads

from .test_sdpa import CUDA, FOLLOWING, FlashOnCuda, check_joined, join_tiles, some_tiles, tensors
from .tiles import HEADS, PRECISION, TILES, check_kernel, every_tile, make_tile, seen, wide

KERNEL = EfficientKernel()
INF, NAN = float("inf"), float("nan")


def visible(rows, columns, mask, window, backward=False):
    """The pairs that a call shows. Backward counts the window from the top left, whatever the mask."""
    offset = columns - rows if mask == 2 else 0
    away = torch.arange(rows)[:, None] - torch.arange(columns)
    shown = torch.ones(rows, columns, dtype=torch.bool) if mask == 0 else away + offset >= 0
    if window:
        assert mask, "LocalAttention only supported in causal mode"
        shown &= away + (0 if backward else offset) < window
    return shown


class EfficientOnCuda:
    """`torch.ops.aten` with the operators that the kernel calls, in fp64 too."""

    def __init__(self):
        self.calls = []

    _bind = FlashOnCuda._bind

    def _efficient_attention_forward(self, *positional, **named):
        a = self._bind("_efficient_attention_forward", positional, named)
        assert a.compute_log_sumexp is True
        longest = a.query.shape[1] if a.cu_seqlens_q is None else a.max_seqlen_q
        outs, lses = [], []
        for q, k, v in self._sequences(a):
            scores = self._scores(a, q, k)
            lse = scores.logsumexp(-1)
            outs.append((torch.exp(scores - lse.unsqueeze(-1)) @ wide(v).transpose(1, 2)).transpose(1, 2))
            padded = lse.new_full((*lse.shape[:2], -(-longest // 32) * 32), NAN)  # what is not a row is not read
            padded[:, :, : lse.shape[2]] = lse
            lses.append(padded)
        unused = torch.empty((), dtype=torch.int64)
        out = torch.cat(outs, 1).to(a.query.dtype).contiguous()
        return out, torch.cat(lses), unused, unused, longest, a.key.shape[1]

    def _efficient_attention_backward(self, *positional, **named):
        a = self._bind("_efficient_attention_backward", positional, named)
        assert a.bias_requires_grad is False
        assert a.num_splits_key is None
        assert a.shared_storage_dqdkdv is False
        assert a.philox_seed.dtype == a.philox_offset.dtype == torch.int64
        rows, heads = a.query.shape[1:3]
        assert a.out.shape == a.grad_out_.shape == (*a.query.shape[:3], a.value.shape[3])
        assert a.out.dtype == a.grad_out_.dtype == a.query.dtype
        assert a.out.is_contiguous(), "its rows are taken for heads x dim apart"
        longest = rows if a.cu_seqlens_q is None else a.max_seqlen_q
        batch = a.query.shape[0] if a.cu_seqlens_q is None else len(a.cu_seqlens_q) - 1
        assert a.logsumexp.shape == (batch, heads, -(-longest // 32) * 32)
        assert a.logsumexp.dtype == torch.promote_types(a.query.dtype, torch.float32)
        assert a.logsumexp.is_contiguous()
        grads, extra = [], list(self._sequences(a, a.out, a.grad_out_))
        for n, (q, k, v, out, dout) in enumerate(extra):
            lse = a.logsumexp if a.cu_seqlens_q is None else a.logsumexp[n : n + 1]
            assert lse[:, :, q.shape[1] :].eq(INF).all(), "padding is read"
            q, k, v, out, dout = (wide(x).transpose(1, 2) for x in (q, k, v, out, dout))
            weights = torch.exp(
                self._scores(a, *(x.transpose(1, 2) for x in (q, k)), backward=True) - lse[:, :, : q.shape[2], None]
            )
            ds = weights * (dout @ v.mT - (out * dout).sum(-1, keepdim=True)) * a.scale
            grads.append((ds @ k, ds.mT @ q, weights.mT @ dout))
        dq, dk, dv = (torch.cat(parts, 2).transpose(1, 2).to(a.query.dtype) for parts in zip(*grads, strict=True))
        return dq, dk, dv, torch.empty(())

    def _sequences(self, a, *more):
        """The tensors of each sequence, or of the batch."""
        batch, rows, heads, dim = a.query.shape
        assert a.bias is None
        assert a.dropout_p == 0.0
        assert isinstance(a.scale, float)
        assert a.window_size is None or type(a.window_size) is int
        assert a.key.shape[::3] == (batch, dim)
        assert a.key.shape[:3] == a.value.shape[:3]
        assert a.key.shape[2] == heads, "heads are not grouped"
        unit = 16 // a.query.element_size()
        for x in (a.query, a.key, a.value):
            assert x.dtype == a.query.dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
            assert x.stride(3) == 1
            assert x.storage_offset() % unit == 0, "not correctly aligned"
            assert all(stride % unit == 0 for stride in x.stride()[:3]), "not correctly aligned"
        everything = (a.query, a.key, a.value, *more)
        if a.cu_seqlens_q is None:
            assert a.cu_seqlens_k is None
            yield everything
            return
        assert batch == 1, "cu_seqlen only supports batch_size=1"
        lengths = []
        for ends, total, most in (
            (a.cu_seqlens_q, rows, a.max_seqlen_q),
            (a.cu_seqlens_k, a.key.shape[1], a.max_seqlen_k),
        ):
            assert ends.dtype == torch.int32
            assert ends.is_contiguous()
            ends = ends.tolist()
            assert (ends[0], ends[-1]) == (0, total)
            assert max(stop - start for start, stop in pairwise(ends)) == most
            lengths.append(list(pairwise(ends)))
        for q_rows, k_rows in zip(*lengths, strict=True):
            spans = [slice(*(k_rows if n in (1, 2) else q_rows)) for n in range(len(everything))]
            yield tuple(x[:, span] for x, span in zip(everything, spans, strict=True))

    def _scores(self, a, q, k, backward=False):
        shown = visible(q.shape[1], k.shape[1], a.custom_mask_type, a.window_size, backward)
        scores = wide(q).transpose(1, 2) @ wide(k).transpose(1, 2).mT * a.scale
        return scores.masked_fill(~shown, -INF)


class OnThisMachine(EfficientKernel):
    """The kernel on tensors of this machine, in fp64 too."""

    def refusal(self, q, k, v, change=None):
        return None


@pytest.fixture
def operators(monkeypatch):
    monkeypatch.setattr(efficient, "aten", stand_in := EfficientOnCuda())
    return stand_in


@contextmanager
def on_this_machine():
    """The kernel through the stand-in, in the place of the real one."""
    with patch.object(efficient, "aten", EfficientOnCuda()), patch.dict(KERNELS, efficient=OnThisMachine()):
        yield


@every_tile((torch.float32, torch.bfloat16))
def test_every_tile(operators, kind, heads, dtype):
    check_kernel(KERNEL, TILES[kind], heads, dtype, PRECISION[dtype])
    assert len({name for name, _ in operators.calls}) == 2


def test_values_of_a_dim_of_their_own(operators):
    for kind in ("causal", "band, to both sides", "upper triangle"):
        check_kernel(KERNEL, TILES[kind], (4, 2), torch.bfloat16, PRECISION[torch.bfloat16], dim_v=16)


@through
def test_the_oracle_matrix(P, routes, every_layout):
    check_through(on_this_machine, "efficient", P, routes, every_layout)


def _other_dims(group, rank):
    layout, mask = Layout.zigzag(23, 2), Mask.documents([9, 14], window=5)
    inputs = make_inputs(23, (6, 2), dim=8, dim_v=12)
    want, positions = dense_attention(inputs, mask), torch.from_numpy(layout.positions(rank))
    q, k, v, dout = (x[:, :, positions].clone() for x in inputs)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    plan = plan_attention(layout, mask, "ring")
    out = attention(*leaves, plan=plan, group=group, kernel="efficient")
    out.backward(dout)
    got = (out.detach(), *(x.grad for x in leaves))
    return [relative_error(g, w[:, :, positions]) for g, w in zip(got, want, strict=False)]


def test_dims_that_differ_over_ranks():
    with on_this_machine():
        found = run_threads(2, _other_dims)
    assert max(error for errors in found for error in errors) < 1e-10


@examples(150)
@given(some_tiles())
def test_mode_and_window_show_exactly_the_tiles_pairs(tile):
    times = {False: torch.zeros(400, 400, dtype=torch.int64), True: torch.zeros(400, 400, dtype=torch.int64)}
    parts = KERNEL.split(tile, CUDA, torch.float32)
    assert len(parts) <= 4
    for part in parts:
        mode = efficient._mode(part.shape)
        for backward, total in times.items():
            shown = visible(*part.shape[:2], mode.mask, mode.window, backward)
            total[part.q0 : part.q1, part.k0 : part.k1] += shown.flip(0, 1) if mode.turned else shown
    right = torch.zeros(400, 400, dtype=torch.int64)
    right[tile.q0 : tile.q1, tile.k0 : tile.k1] += seen(tile)
    assert torch.equal(times[False], right)
    assert torch.equal(times[True], right)


@pytest.mark.parametrize(
    ("kind", "calls"),
    [
        ("full", 1), ("causal", 1), ("causal, above a block", 1), ("lower trapezoid, wide", 1), ("lower trapezoid, tall", 1),
        ("lower trapezoid, all but a corner", 2), ("upper triangle", 1), ("upper trapezoid, wide", 2), ("band", 1),
        ("band, above a block", 1), ("band, to both sides", 2), ("band, wide", 2),
    ],
)  # fmt: skip
def test_number_of_calls(kind, calls):
    assert len(KERNEL.split(TILES[kind], CUDA, torch.float32)) == calls


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kind", FOLLOWING)
def test_tiles_that_follow_each_other_go_together(operators, kind, heads):
    check_joined(KERNEL, join_tiles(kind), FOLLOWING[kind][2], heads, torch.float32, PRECISION[torch.float32][1])
    assert any(getattr(call, "cu_seqlens_q", None) is not None for _, call in operators.calls)


def test_windows_of_documents_go_together_and_turned_tiles_do_not(operators):
    # A document that is shorter than the window has none of its own, but goes with those that have.
    tiles = [make_tile(0, 9, 0, 9, 0, 3), make_tile(9, 12, 9, 12, 0, 3), make_tile(12, 19, 12, 19, 0, 3)]
    check_joined(KERNEL, tiles, 1, (4, 2), torch.float32, PRECISION[torch.float32][1])
    upper = [make_tile(0, 4, 0, 4, hi=0), make_tile(4, 8, 4, 8, hi=0)]
    assert len(launches(KERNEL, upper, torch.empty(1, 4, 8, 8))) == 2


def test_rows_that_do_not_begin_on_16_bytes_are_copied(operators):
    packed = torch.randn(1, 2, 6, 26)
    q, k, v = packed[..., 1:9], packed[..., 9:17], packed[..., 17:25]
    out, lse = KERNEL.forward(q, k, v, (TILES["causal"].shape,), 0.4)
    right, right_lse = KERNEL.forward(*(x.contiguous() for x in (q, k, v)), (TILES["causal"].shape,), 0.4)
    assert torch.equal(out, right)
    assert torch.equal(lse, right_lse)


@pytest.mark.parametrize(
    ("given", "change", "major", "reason"),
    [
        (
            tensors(torch.float32), None, 8,
            "memory-efficient attention takes fp32, bf16 and fp16 on cuda, not torch.float32 on cpu",
        ),
        (
            tensors(torch.float64, device="cuda"), None, 8,
            "memory-efficient attention takes fp32, bf16 and fp16 on cuda, not torch.float64 on cuda",
        ),
        (
            tensors(torch.float32, device="cuda"), ScoreChange(2.0), 8,
            "memory-efficient attention has no soft-cap and no ALiBi",
        ),
        (
            tensors(torch.float32, 64, 66, "cuda"), None, 8,
            "memory-efficient attention takes head dims that are multiples of 4 in torch.float32, not 64 and 66",
        ),
        (
            tensors(torch.bfloat16, 60, 64, "cuda"), None, 8,
            "memory-efficient attention takes head dims that are multiples of 8 in torch.bfloat16, not 60 and 64",
        ),
        (tensors(device="cuda"), None, 7, "memory-efficient attention has no bf16 on devices before Ampere"),
        (tensors(torch.float16, device="cuda"), None, 7, None),
        (tensors(torch.float32, 60, 4, "cuda"), None, 9, None),
    ],
)  # fmt: skip
def test_refusal(given: tuple[SimpleNamespace, ...], change, major, reason):
    with patch.object(efficient, "capability", lambda device: (major, 0)):
        assert KERNEL.refusal(*given, change) == reason


def test_tiles_of_one_call_are_about_as_long():
    """The operator pads every sequence to the longest: 512 documents of 64 beside one of 32,768 would take 257 GiB."""
    square = [Shape(n, n, 0, n - 1) for n in (64, 128, 129)]
    cuda = torch.device("cuda")
    assert [KERNEL.joins(square[0], other, cuda) for other in square] == [True, True, False]
    assert [KERNEL.joins(other, square[0], cuda) for other in square] == [True, True, False]


@pytest.mark.parametrize(("rows", "kept"), [(1000, True), (2**31 // (32 * 128), False)])
def test_where_a_head_begins_fits_32_bits(rows, kept):
    x = torch.empty(1, 32, rows, 128, device="meta", dtype=torch.bfloat16)
    assert (efficient._rows_first(x, efficient.Mode(0)).stride(2) == rows * 128) == kept
