"""Tiles of every kind, and one kernel's work on them against plain math."""

import itertools

import numpy as np
import pytest
import torch

from longspan.cp.engine.merge import accumulation_dtype, merge_
from longspan.kernels.protocol import BackwardInputs
from longspan.plan import Tile
from longspan.plan import bands as algebra
from longspan.plan.bands import UNBOUNDED

from ..oracle import Inputs, dense_attention, make_inputs, relative_error


def make_tile(q0, q1, k0, k1, lo=None, hi=None) -> Tile:
    """A trimmed tile."""
    band = [q0, q1, k0, k1, -UNBOUNDED if lo is None else lo, UNBOUNDED if hi is None else hi]
    return Tile(*algebra.trim(np.array([band], dtype=np.int64))[0][0].tolist())


TILES = {
    "full": make_tile(0, 5, 0, 7),
    "full, elsewhere": make_tile(3, 9, 2, 6),
    "one by one": make_tile(2, 3, 1, 2),
    "one row": make_tile(4, 5, 0, 9),
    "one column": make_tile(0, 9, 3, 4),
    "causal": make_tile(0, 6, 0, 6, lo=0),
    "causal, elsewhere": make_tile(4, 9, 3, 8, lo=1),
    "causal, above a block": make_tile(0, 300, 0, 300, lo=0),
    "causal, above all that are cut": make_tile(0, 1030, 0, 1030, lo=0),
    "lower trapezoid, wide": make_tile(4, 9, 0, 9, lo=0),
    "lower trapezoid, tall": make_tile(0, 9, 0, 4, lo=0),
    "lower trapezoid, very tall": make_tile(0, 30, 0, 4, lo=0),
    "lower trapezoid, all but a corner": make_tile(3, 9, 0, 5, lo=0),
    "upper trapezoid, wide": make_tile(0, 5, 0, 9, hi=3),
    "upper trapezoid, tall": make_tile(0, 12, 0, 4, hi=9),
    "upper triangle": make_tile(0, 6, 0, 6, hi=0),
    "band": make_tile(0, 20, 0, 20, lo=0, hi=3),
    "band, to both sides": make_tile(0, 20, 0, 20, lo=-2, hi=3),
    "band, wide": make_tile(8, 12, 0, 16, lo=-1, hi=7),
    "band, tall": make_tile(0, 24, 5, 9, lo=2, hi=12),
    "band, above a block": make_tile(0, 300, 0, 300, lo=0, hi=40),
    "band, of several strips": make_tile(0, 700, 0, 700, lo=0, hi=300),
    "band, of several strips, to both sides": make_tile(0, 500, 100, 600, lo=-90, hi=110),
    "upper trapezoid, above a block": make_tile(0, 400, 0, 500, hi=60),
    "band, diagonal": make_tile(0, 9, 0, 9, lo=0, hi=0),
    "band, strictly below": make_tile(0, 150, 0, 140, lo=3, hi=11),
}


def wide(x: torch.Tensor) -> torch.Tensor:
    """At least fp32."""
    return x.to(accumulation_dtype(x.dtype))


def seen(tile) -> torch.Tensor:
    """Bool `(rows, columns)` of a tile."""
    away = torch.arange(tile.q0, tile.q1)[:, None] - torch.arange(tile.k0, tile.k1)
    return (away >= tile.lo) & (away <= tile.hi)


def check_kernel(kernel, tile, heads, dtype, tolerances, dim_v=None, dim=8, split=True):
    """Forward and backward of a tile among other keys: its rows also see 3 keys that another kernel call computes.

    So `out` and `lse` in backward are those of all keys, as in the executor, and not of the tile alone.
    """
    scale = 0.4
    rows, columns, others = tile.q1 - tile.q0, tile.k1 - tile.k0, 3
    x = make_inputs(max(tile.q1, tile.k1) + others, heads, batch=2, dim=dim, dim_v=dim_v, dtype=dtype)
    q, dout = (t[:, :, tile.q0 : tile.q1] for t in (x.q, x.dout))
    k_tile, v_tile = (t[:, :, tile.k0 : tile.k1] for t in (x.k, x.v))
    k_rest, v_rest = x.k[:, :, -others:], x.v[:, :, -others:]
    exact = Inputs(
        q.double(), torch.cat((k_tile, k_rest), 2).double(), torch.cat((v_tile, v_rest), 2).double(), dout.double()
    )
    visible = torch.cat((seen(tile), torch.ones(rows, others, dtype=torch.bool)), 1)
    want = dense_attention(exact, visible, scale)
    scores = exact.q @ exact.k.repeat_interleave(heads[0] // heads[1], 1).mT * scale
    want_lse = scores.masked_fill(~visible, float("-inf")).logsumexp(-1)

    cpu, rest = torch.device("cpu"), make_tile(tile.q0, tile.q1, tile.k1, tile.k1 + others)

    def work(backward):
        parts = kernel.split(tile, cpu, dtype, backward) if split else (tile,)
        return [*((part, k_tile, v_tile, tile.k0) for part in parts), (rest, k_rest, v_rest, tile.k1)]

    wide = accumulation_dtype(dtype)
    out = torch.zeros(*q.shape[:3], v_tile.shape[3], dtype=wide)
    lse = torch.full(q.shape[:3], float("-inf"), dtype=wide)
    for part, k, v, first in work(backward=False):
        r, c = slice(part.q0 - tile.q0, part.q1 - tile.q0), slice(part.k0 - first, part.k1 - first)
        o, s = kernel.forward(q[:, :, r], k[:, :, c], v[:, :, c], (part.shape,), scale)
        assert o.dtype == dtype
        assert s.dtype == wide
        assert o.shape == (*q.shape[:2], part.q1 - part.q0, v.shape[3])
        assert s.shape == o.shape[:3]
        merge_(out[:, :, r], lse[:, :, r], o, s)
    final = out.to(dtype)
    dq = torch.zeros_like(q, dtype=wide)
    dk, dv = (torch.zeros(*t.shape[:2], columns + others, t.shape[3], dtype=wide) for t in (k_tile, v_tile))
    for part, k, v, first in work(backward=True):
        r, c = slice(part.q0 - tile.q0, part.q1 - tile.q0), slice(part.k0 - first, part.k1 - first)
        into = slice(part.k0 - tile.k0, part.k1 - tile.k0)
        saved = BackwardInputs(dout[:, :, r], q[:, :, r], k[:, :, c], v[:, :, c], final[:, :, r], lse[:, :, r])
        parts_of_gradient = kernel.backward(saved, (part.shape,), scale)
        for total, part_of_gradient, where in zip((dq, dk, dv), parts_of_gradient, (r, into, into), strict=True):
            total[:, :, where] += part_of_gradient
    got = (final, dq, dk, dv)
    errors = {n: relative_error(g, w) for n, g, w in zip(("out", "dq", "dk", "dv"), got, want, strict=False)}
    errors["lse"] = relative_error(lse, want_lse)
    assert max(errors[n] for n in ("out", "lse")) < tolerances[0], errors
    assert max(errors.values()) < tolerances[1], errors


HEADS = ((2, 2), (4, 2), (4, 1))
PRECISION = {
    # Forward and backward, relative to the tensor's greatest value: a few units in the last place of the type.
    torch.float64: (1e-13, 1e-12),
    torch.float32: (2e-6, 1e-5),
    torch.bfloat16: (2**-7, 2**-5),
    torch.float16: (2**-10, 2**-8),
}


def every_tile(dtypes=tuple(PRECISION)) -> pytest.MarkDecorator:
    """Each tile in each type, with head layouts taking turns; every head layout of each, nightly."""
    cases = []
    for (index, kind), (turn, dtype), (number, heads) in itertools.product(*map(enumerate, (TILES, dtypes, HEADS))):
        marks = () if number == (index + turn) % len(HEADS) else pytest.mark.nightly
        cases.append(pytest.param(kind, heads, dtype, marks=marks, id=f"{kind}-{heads}-{dtype}"))
    return pytest.mark.parametrize(("kind", "heads", "dtype"), cases)
