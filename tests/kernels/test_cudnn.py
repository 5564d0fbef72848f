"""cuDNN attention through a stand-in with the aten operators' schema, which checks what it is given and answers by plain math."""

from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from longspan.kernels import cudnn
from longspan.kernels.choice import KERNELS
from longspan.kernels.cudnn import CudnnKernel
from longspan.kernels.scores import ScoreChange
from tests.cp.cases import check_through, through

from .test_sdpa import FlashOnCuda, tensors
from .tiles import PRECISION, TILES, check_kernel, every_tile, wide

KERNEL = CudnnKernel()


class CudnnOnCuda:
    """`torch.ops.aten` with cuDNN's operators: causal from the top left, lse `(B, H, T, 1)`, gradients of KV heads grouped."""

    def __init__(self):
        self.calls = []

    _bind = FlashOnCuda._bind

    def _scaled_dot_product_cudnn_attention(self, *positional, **named):
        a = self._bind("_scaled_dot_product_cudnn_attention", positional, named)
        assert a.compute_log_sumexp is True
        assert a.return_debug_mask is False
        scores = self._scores(a)
        lse = scores.logsumexp(-1, keepdim=True)
        out = torch.exp(scores - lse) @ self._grouped(a, a.value)
        return out.to(a.query.dtype), lse, None, None, a.query.shape[2], a.key.shape[2], None, None, None

    def _scaled_dot_product_cudnn_attention_backward(self, *positional, **named):
        a = self._bind("_scaled_dot_product_cudnn_attention_backward", positional, named)
        batch, heads, rows, _ = a.query.shape
        assert a.logsumexp.shape == (batch, heads, rows, 1)
        assert a.logsumexp.dtype == torch.promote_types(a.query.dtype, torch.float32)
        assert a.logsumexp.is_contiguous()
        assert (a.cum_seq_q, a.cum_seq_k, a.max_q, a.max_k) == (None, None, rows, a.key.shape[2])
        assert a.philox_seed.dtype == a.philox_offset.dtype == torch.int64
        assert a.grad_out.shape == a.out.shape == a.query.shape
        assert a.grad_out.dtype == a.out.dtype == a.query.dtype
        group = heads // a.key.shape[1]
        q, out, dout = wide(a.query), wide(a.out), wide(a.grad_out)
        weights = torch.exp(self._scores(a) - a.logsumexp)
        delta = (out * dout).sum(-1, keepdim=True)
        ds = weights * (dout @ self._grouped(a, a.value).mT - delta) * a.scale
        dk, dv = ((x.mT @ y).unflatten(1, (-1, group)).sum(2) for x, y in ((ds, q), (weights, dout)))
        return tuple(x.to(a.query.dtype) for x in (ds @ self._grouped(a, a.key), dk, dv))

    def _grouped(self, a, x):
        return wide(x).repeat_interleave(a.query.shape[1] // a.key.shape[1], 1)

    def _scores(self, a):
        assert a.dropout_p == 0.0
        assert isinstance(a.scale, float)
        batch, heads, rows, dim = a.query.shape
        columns = a.key.shape[2]
        assert a.key.shape == a.value.shape == (batch, a.key.shape[1], columns, dim)
        assert heads % a.key.shape[1] == 0
        assert a.query.dtype == a.key.dtype == a.value.dtype in (torch.bfloat16, torch.float16, torch.float64)
        scores = wide(a.query) @ self._grouped(a, a.key).mT * a.scale
        if a.is_causal:
            assert a.attn_bias is None
            assert rows == columns  # where top left and bottom right are the same
            scores = scores.masked_fill(torch.ones(rows, columns).triu(1).bool(), float("-inf"))
        if a.attn_bias is not None:
            assert a.attn_bias.shape == (rows, columns)
            assert a.attn_bias.dtype == a.query.dtype
            scores = scores + wide(a.attn_bias)
        return scores


class OnThisMachine(CudnnKernel):
    """The kernel on tensors of this machine, in fp64 too."""

    def refusal(self, q, k, v, change=None):
        return None


@every_tile((torch.bfloat16, torch.float16))
def test_every_tile(monkeypatch, kind, heads, dtype):
    monkeypatch.setattr(cudnn, "aten", stand_in := CudnnOnCuda())
    check_kernel(KERNEL, TILES[kind], heads, dtype, PRECISION[dtype])
    assert len({name for name, _ in stand_in.calls}) == 2


@contextmanager
def on_this_machine():
    """The kernel through the stand-in, in the place of the real one."""
    with patch.object(cudnn, "aten", CudnnOnCuda()), patch.dict(KERNELS, cudnn=OnThisMachine()):
        yield


@through
def test_the_oracle_matrix(P, routes, every_layout):
    check_through(on_this_machine, "cudnn", P, routes, every_layout)


@pytest.mark.parametrize(
    ("given", "change", "reason"),
    [
        (tensors(), None, "cuDNN attention takes bf16 and fp16 on cuda, not torch.bfloat16 on cpu"),
        (
            tensors(torch.float32, device="cuda"),
            None,
            "cuDNN attention takes bf16 and fp16 on cuda, not torch.float32 on cuda",
        ),
        (tensors(device="cuda"), ScoreChange(2.0), "cuDNN attention has no soft-cap and no ALiBi"),
        (
            tensors(dim=136, device="cuda"),
            None,
            "cuDNN attention takes equal head dims, multiples of 8 up to 128, not 136 and 136",
        ),
        (tensors(device="cuda"), None, None),
    ],
)
def test_refusal(given: tuple[SimpleNamespace, ...], change, reason):
    assert KERNEL.refusal(*given, change) == reason
