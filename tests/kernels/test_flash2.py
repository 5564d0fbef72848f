"""flash-attn 2 through a stand-in with the signatures of 2.7, which checks what it is given and answers by plain math."""

import sys
from contextlib import contextmanager
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from longspan.kernels import flash2
from longspan.kernels.choice import KERNELS
from longspan.kernels.flash2 import FlashAttention2Kernel
from longspan.kernels.protocol import BackwardInputs, launches
from longspan.kernels.reference import ReferenceKernel
from longspan.kernels.scores import ScoreChange
from longspan.plan import bands as algebra
from tests.cp.cases import check_through, through
from tests.oracle import make_inputs, relative_error

from .test_sdpa import FOLLOWING, join_tiles
from .tiles import PRECISION, TILES, check_kernel, every_tile, make_tile, wide

KERNEL = FlashAttention2Kernel()


def scores(q, k, scale, left, right, softcap, longest=None):
    """`(H, T, D), (K, Tk, D)` -> scores in fp32 with what the window hides at -inf, and their derivative by the cap."""
    rows, columns = q.shape[1], k.shape[1]
    longest = longest or columns
    left, right = (-1 if side >= longest else side for side in (left, right))
    left, right = (longest if side < 0 <= other else side for side, other in ((left, right), (right, left)))
    raw = q @ k.repeat_interleave(q.shape[0] // k.shape[0], 0).mT * scale
    derivative = torch.ones_like(raw)
    if softcap:
        derivative = 1 - torch.tanh(raw / softcap) ** 2
        raw = softcap * torch.tanh(raw / softcap)
    away = torch.arange(columns) - (torch.arange(rows)[:, None] + columns - rows)
    hidden = torch.zeros_like(away, dtype=torch.bool) if left < 0 else (away < -left) | (away > right)
    return raw.masked_fill(hidden, float("-inf")), derivative


def attend(q, k, v, *how):
    dtype, (q, k, v) = q.dtype, map(wide, (q, k, v))
    raw, _ = scores(q, k, *how)
    lse = raw.logsumexp(-1)
    weights = torch.exp(raw - lse.unsqueeze(-1))
    return (weights @ v.repeat_interleave(q.shape[0] // k.shape[0], 0)).to(dtype), lse


def differentiate(dout, q, k, v, out, lse, *how):
    dout, q, k, v, out = map(wide, (dout, q, k, v, out))
    raw, derivative = scores(q, k, *how)
    group, scale = q.shape[0] // k.shape[0], how[0]
    keys, values = (x.repeat_interleave(group, 0) for x in (k, v))
    weights = torch.exp(raw - lse.unsqueeze(-1))
    delta = (dout * out).sum(-1, keepdim=True)
    ds = weights * (dout @ values.mT - delta) * derivative * scale
    by_head = [ds.mT @ q, weights.mT @ dout]
    return [ds @ keys, *(x.unflatten(0, (-1, group)).sum(1) for x in by_head)]


def check(q, k, v, *others, dims):
    for x in (q, k, v, *others):
        assert x.dim() == dims
        assert x.dtype == q.dtype in (torch.bfloat16, torch.float16, torch.float64)  # the last for an exact oracle
        assert x.stride(-1) == 1
    assert q.shape[-2] % k.shape[-2] == 0
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256
    assert q.shape[-1] % 8 == 0


def check_options(dropout_p, softmax_scale, causal, left, right, softcap, alibi_slopes):
    assert (dropout_p, causal, alibi_slopes) == (0.0, False, None)
    assert isinstance(softmax_scale, float)
    assert all(type(side) is int and side >= -1 for side in (left, right))
    assert isinstance(softcap, float)
    assert softcap >= 0


def check_ends(ends, total, longest):
    assert ends.dtype == torch.int32
    assert ends.is_contiguous()
    assert (int(ends[0]), int(ends[-1])) == (0, total)
    assert max(b - a for a, b in pairwise(ends.tolist())) == longest
    return list(pairwise(ends.tolist()))


class Interface(ModuleType):
    """The four functions of `flash_attn.flash_attn_interface`, by their parameters' names and order."""

    def __init__(self):
        super().__init__("flash_attn.flash_attn_interface")
        self.calls = []

    def _flash_attn_forward(
        self, q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        return_softmax,
    ):  # fmt: skip
        self.calls.append("forward")
        check(q, k, v, dims=4)
        check_options(dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes)
        assert return_softmax is False
        how = softmax_scale, window_size_left, window_size_right, softcap
        results = [attend(*(x[b].transpose(0, 1) for x in (q, k, v)), *how) for b in range(q.shape[0])]
        out = torch.stack([out.transpose(0, 1) for out, _ in results])
        return out, torch.stack([lse for _, lse in results]), torch.empty(0), torch.empty(2, dtype=torch.int64)

    def _flash_attn_varlen_forward(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None,
        leftpad_k=None, seqused_k=None,
    ):  # fmt: skip
        self.calls.append("varlen forward")
        check(q, k, v, dims=3)
        check_options(dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes)
        rows, keys = check_ends(cu_seqlens_q, len(q), max_seqlen_q), check_ends(cu_seqlens_k, len(k), max_seqlen_k)
        how = softmax_scale, window_size_left, window_size_right, softcap, max_seqlen_k
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        results = [attend(q[:, a:b], k[:, c:d], v[:, c:d], *how) for (a, b), (c, d) in zip(rows, keys, strict=True)]
        out = torch.cat([out for out, _ in results], 1).transpose(0, 1).contiguous()
        return out, torch.cat([lse for _, lse in results], 1), torch.empty(0), torch.empty(2, dtype=torch.int64)

    def _flash_attn_backward(
        self, dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        self.calls.append("backward")
        check(q, k, v, dout, out, dq, dk, dv, dims=4)
        check_options(dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes)
        assert softmax_lse.dtype == torch.promote_types(q.dtype, torch.float32)
        assert softmax_lse.is_contiguous()
        assert softmax_lse.shape == (q.shape[0], q.shape[2], q.shape[1])
        assert deterministic is torch.are_deterministic_algorithms_enabled()
        how = softmax_scale, window_size_left, window_size_right, softcap
        for b in range(q.shape[0]):
            one = [x[b].transpose(0, 1) for x in (dout, q, k, v, out)]
            for into, grad in zip((dq, dk, dv), differentiate(*one, softmax_lse[b], *how), strict=True):
                into[b] = grad.transpose(0, 1).to(into.dtype)

    def _flash_attn_varlen_backward(
        self, dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
        rng_state=None,
    ):  # fmt: skip
        self.calls.append("varlen backward")
        check(q, k, v, dout, out, dq, dk, dv, dims=3)
        check_options(dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes)
        assert softmax_lse.shape == (q.shape[1], len(q))
        assert softmax_lse.is_contiguous()
        rows, keys = check_ends(cu_seqlens_q, len(q), max_seqlen_q), check_ends(cu_seqlens_k, len(k), max_seqlen_k)
        how = softmax_scale, window_size_left, window_size_right, softcap, max_seqlen_k
        dout, q, k, v, out = (x.transpose(0, 1) for x in (dout, q, k, v, out))
        for (a, b), (c, d) in zip(rows, keys, strict=True):
            one = dout[:, a:b], q[:, a:b], k[:, c:d], v[:, c:d], out[:, a:b], softmax_lse[:, a:b]
            for into, (start, stop), grad in zip(
                (dq, dk, dv), ((a, b), (c, d), (c, d)), differentiate(*one, *how), strict=True
            ):
                into[start:stop] = grad.transpose(0, 1).to(into.dtype)


class Anywhere(FlashAttention2Kernel):
    """The kernel on tensors of this machine, in fp64 too."""

    def refusal(self, q, k, v, change=None):
        return None


@contextmanager
def on_this_machine():
    """The kernel through the stand-in, in the place of the real one."""
    modules = {"flash_attn": ModuleType("flash_attn"), "flash_attn.flash_attn_interface": Interface()}
    with patch.dict(sys.modules, modules), patch.dict(KERNELS, flash2=Anywhere()):
        yield


@through
def test_the_oracle_matrix(P, routes, every_layout):
    check_through(on_this_machine, "flash2", P, routes, every_layout)


@pytest.fixture
def interface(monkeypatch):
    stand_in = Interface()
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", stand_in)
    return stand_in


@every_tile((torch.bfloat16, torch.float16))
def test_every_tile(interface, kind, heads, dtype):
    check_kernel(KERNEL, TILES[kind], heads, dtype, PRECISION[dtype])
    assert set(interface.calls) == {"forward", "backward"}


def results(tiles, x, change):
    made = launches(KERNEL, tiles, x.q)
    outs, grads = [], []
    for launch in made:
        q, dout = (t[:, :, launch.q0 : launch.q1] for t in (x.q, x.dout))
        k, v = (t[:, :, launch.k0 : launch.k1] for t in (x.k, x.v))
        out, lse = KERNEL.forward(q, k, v, launch.shapes, 0.4, change)
        outs.append((out, lse))
        grads.append(KERNEL.backward(BackwardInputs(dout, q, k, v, out, lse), launch.shapes, 0.4, change))
    return len(made), [torch.cat(parts, dim=2) for some in (outs, grads) for parts in zip(*some, strict=True)]


@pytest.mark.parametrize("change", [None, ScoreChange(1.5)])
@pytest.mark.parametrize("kind", FOLLOWING)
def test_tiles_that_follow_each_other_go_together(interface, kind, change):
    tiles = join_tiles(kind)
    x = make_inputs(tiles[-1].q1, (4, 2), dim=8, dtype=torch.bfloat16)
    calls, together = results(tiles, x, change)
    assert calls == FOLLOWING[kind][2]
    assert "varlen backward" in interface.calls
    one_by_one = [results([tile], x, change)[1] for tile in tiles]
    for got, parts in zip(together, zip(*one_by_one, strict=True), strict=True):
        assert relative_error(got, torch.cat(parts, dim=2)) < PRECISION[torch.bfloat16][1]
    assert sum(map(algebra.tile_area, tiles)) == sum(launch.pairs for launch in launches(KERNEL, tiles, x.q))


def test_a_soft_cap_is_that_of_the_reference(interface):
    tile = make_tile(0, 9, 0, 9, lo=0, hi=5)
    x = make_inputs(9, (4, 2), dim=8, dtype=torch.float16)
    want_out, want_lse = ReferenceKernel().forward(x.q, x.k, x.v, (tile.shape,), 0.4, ScoreChange(1.5))
    want = ReferenceKernel().backward(
        BackwardInputs(x.dout, x.q, x.k, x.v, want_out, want_lse), (tile.shape,), 0.4, ScoreChange(1.5)
    )
    _, (out, lse, *grads) = results([tile], x, ScoreChange(1.5))
    for got, right in zip((out, lse, *grads), (want_out, want_lse, *want), strict=True):
        assert relative_error(got, right) < PRECISION[torch.float16][1]


@pytest.mark.parametrize(
    ("found", "dtype", "dim", "change", "reason"),
    [
        (None, torch.bfloat16, 8, None, "the flash-attn package is not installed"),
        ("2.6.3", torch.bfloat16, 8, None, "flash-attn 2.6.3 is older than 2.7"),
        ("2.7.4", torch.float32, 8, None, "flash-attn takes bf16 and fp16 on cuda, not torch.float32 on cuda"),
        (
            "2.8.0",
            torch.bfloat16,
            12,
            None,
            "flash-attn takes equal head dims, multiples of 8 up to 256, not 12 and 12",
        ),
        (
            "2.8.0",
            torch.bfloat16,
            8,
            ScoreChange(slopes=torch.ones(1)),
            "flash-attn computes ALiBi distances within a tile",
        ),
        ("2.8.0", torch.bfloat16, 8, ScoreChange(2.0), None),
    ],
)
def test_refusals(monkeypatch, found, dtype, dim, change, reason):
    def version(name):
        assert name == "flash-attn"
        if found is None:
            raise flash2.PackageNotFoundError
        return found

    monkeypatch.setattr(flash2, "version", version)
    monkeypatch.setattr(flash2, "capability", lambda device: (8, 0))
    flash2._missing.cache_clear()
    x = SimpleNamespace(dtype=dtype, shape=(1, 2, 4, dim), device=torch.device("cuda"))
    told = KERNEL.refusal(x, x, x, change)
    flash2._missing.cache_clear()
    assert told is None if reason is None else told.startswith(reason)


def test_devices_before_ampere_are_refused(monkeypatch):
    monkeypatch.setattr(flash2, "capability", lambda device: (7, 5))
    monkeypatch.setattr(flash2, "_missing", lambda: None)
    x = SimpleNamespace(dtype=torch.bfloat16, shape=(1, 2, 4, 64), device=torch.device("cuda"))
    assert KERNEL.refusal(x, x, x) == "flash-attn needs Ampere or later (compute capability 8.0)"
