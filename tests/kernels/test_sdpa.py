"""The flash kernels against plain math: CPU as it is, CUDA through a stand-in that has the real operators' rules."""

from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longspan.kernels import sdpa
from longspan.kernels.choice import KERNELS
from longspan.kernels.masked import mode_of
from longspan.kernels.protocol import BackwardInputs, launches
from longspan.kernels.sdpa import SdpaKernel
from longspan.kernels.windows import window_of
from longspan.plan import Mask
from longspan.plan import bands as algebra
from tests.cp.cases import check_through, through
from tests.examples import examples

from ..oracle import make_inputs, relative_error
from .tiles import HEADS, PRECISION, TILES, check_kernel, every_tile, make_tile, seen, wide

KERNEL = SdpaKernel()
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@every_tile()
def test_every_tile_on_cpu(kind, heads, dtype):
    check_kernel(KERNEL, TILES[kind], heads, dtype, PRECISION[dtype])


bounds = st.none() | st.integers(-320, 320)
raw_tiles = st.tuples(st.integers(0, 3), st.integers(1, 300), st.integers(0, 3), st.integers(1, 300), bounds, bounds)


@st.composite
def some_tiles(draw):
    q0, rows, k0, columns, lo, hi = draw(raw_tiles)
    band = (q0, q0 + rows, k0, k0 + columns, lo, hi)
    mask = Mask.bands(400, [band])
    return make_tile(*band) if mask.area else TILES["full"]


@examples(200)
@given(some_tiles(), st.booleans())
def test_split_covers_each_pair_once_with_shapes_that_the_cpu_kernel_has(tile, backward):
    times = torch.zeros(400, 400, dtype=torch.int64)
    for part in KERNEL.split(tile, CPU, torch.float32, backward):
        pairs = seen(part)
        assert pairs.any(0).all()
        assert pairs.any(1).all()
        assert algebra.tile_area(part) == pairs.sum()
        times[part.q0 : part.q1, part.k0 : part.k1] += pairs
        causal, mask = mode_of(part.shape, torch.float32, CPU)
        if mask is not None:
            assert not causal
            assert mask.shape[0] <= 64 or backward
            assert max(mask.shape) <= 2048
            assert torch.equal(mask == 0, pairs)
            assert torch.equal(mask == float("-inf"), ~pairs)
        else:
            assert pairs.all() if not causal else torch.equal(pairs, torch.ones_like(pairs).tril())
    right = torch.zeros_like(times)
    right[tile.q0 : tile.q1, tile.k0 : tile.k1] += seen(tile)
    assert torch.equal(times, right)


@pytest.mark.parametrize(
    ("kind", "calls"),
    [
        ("full", 1), ("causal", 1), ("causal, above a block", 1), ("lower trapezoid, wide", 2),
        ("lower trapezoid, tall", 2), ("lower trapezoid, all but a corner", 3), ("band", 1), ("band, above a block", 5),
    ],
)  # fmt: skip
def test_number_of_calls_on_cpu(kind, calls):
    assert len(KERNEL.split(TILES[kind], CPU, torch.float32)) == calls


class FlashOnCuda:
    """`torch.ops.aten` with the CUDA flash operators' signatures, checks and window rules, computed by plain math.

    The rules are those of mha_fwd and mha_bwd in PyTorch's flash_api.cpp: rows and columns are aligned at the bottom right;
    a window not less than the number of keys is no window; beside one that is open, the open side reaches that many keys.
    """

    def __init__(self):
        self.calls = []

    def _flash_attention_forward(self, *positional, **named):
        a = self._bind("_flash_attention_forward", positional, named)
        assert a.return_debug_mask is False
        unused = torch.empty(0, dtype=torch.int64)
        if a.cum_seq_q is not None:
            parts = [self._forward(one) for one in self._sequences(a)]
            out, lse = torch.cat([out[0] for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], dim=1)
            return out, lse, unused, unused, unused
        return *self._forward(a), unused, unused, unused

    def _forward(self, a):
        self._check(a)
        out, lse, _ = self._math(a)
        return out.to(a.query.dtype).contiguous(), lse

    def _sequences(self, a):
        """A call of several sequences, `(T, H, D)` and lse `(H, T)`, as one call for each. Windows are read by the longest."""
        lengths = []
        for ends, rows, most in ((a.cum_seq_q, a.query, a.max_q), (a.cum_seq_k, a.key, a.max_k)):
            assert ends.dtype == torch.int32
            assert ends.is_contiguous()
            assert rows.dim() == 3
            ends = ends.tolist()
            assert (ends[0], ends[-1]) == (0, rows.shape[0])
            assert max(stop - start for start, stop in pairwise(ends)) == most
            lengths.append(list(pairwise(ends)))
        for (q0, q1), (k0, k1) in zip(*lengths, strict=True):
            assert q0 < q1
            assert k0 < k1
            one = SimpleNamespace(**vars(a))
            one.query, one.key, one.value = a.query[None, q0:q1], a.key[None, k0:k1], a.value[None, k0:k1]
            if hasattr(a, "grad_out"):
                one.grad_out, one.out = a.grad_out[None, q0:q1], a.out[None, q0:q1]
                assert a.logsumexp.is_contiguous()
                one.logsumexp = a.logsumexp[None, :, q0:q1].contiguous()
            one.cum_seq_q = one.cum_seq_k = None
            one.longest, one.max_q, one.max_k = a.max_k, q1 - q0, k1 - k0
            yield one

    def _flash_attention_backward(self, *positional, **named):
        a = self._bind("_flash_attention_backward", positional, named)
        if a.cum_seq_q is not None:
            parts = [self._backward(one) for one in self._sequences(a)]
            return tuple(torch.cat([grad[0] for grad in grads]) for grads in zip(*parts, strict=True))
        return self._backward(a)

    def _backward(self, a):
        self._check(a)
        # The operator itself makes `grad_out` and `out` contiguous.
        assert a.grad_out.shape == a.out.shape == a.query.shape
        assert a.grad_out.dtype == a.out.dtype == a.query.dtype
        batch, rows, heads, _ = a.query.shape
        assert a.logsumexp.shape == (batch, heads, rows)
        assert a.logsumexp.dtype == torch.promote_types(a.query.dtype, torch.float32)
        assert a.logsumexp.is_contiguous()
        assert a.rng_state.dtype == a.unused.dtype == torch.int64
        group = heads // a.key.shape[2]
        q, k, v, out, dout = (wide(x.transpose(1, 2)) for x in (a.query, a.key, a.value, a.out, a.grad_out))
        _, _, scores = self._math(a)
        weights = torch.exp(scores - a.logsumexp.unsqueeze(-1))
        delta = (out * dout).sum(-1, keepdim=True)
        ds = weights * (dout @ v.repeat_interleave(group, 1).mT - delta) * a.scale
        dq = ds @ k.repeat_interleave(group, 1)
        dk, dv = ((x.mT @ y).unflatten(1, (-1, group)).sum(2) for x, y in ((ds, q), (weights, dout)))
        return tuple(x.to(a.query.dtype).transpose(1, 2) for x in (dq, dk, dv))

    def _bind(self, name, positional, named):
        schema = getattr(torch.ops.aten, name).default._schema
        known = [argument.name for argument in schema.arguments]
        taken = [argument.name for argument in schema.arguments if not argument.kwarg_only]
        assert len(positional) <= len(taken)
        assert set(named) <= set(known) - set(taken[: len(positional)])
        values = dict(zip(taken, positional, strict=False)) | named
        for argument in schema.arguments:
            if argument.name not in values:
                assert argument.has_default_value(), argument.name
                values[argument.name] = argument.default_value
        bound = SimpleNamespace(**values)
        self.calls.append((name, bound))
        return bound

    def _check(self, a):
        # cum_seq_* of None are undefined tensors: dense, not varlen.
        assert a.cum_seq_k is None
        assert a.dropout_p == 0.0
        assert a.is_causal is False
        assert isinstance(a.scale, float)
        batch, rows, heads, dim = a.query.shape
        columns, kv_heads = a.key.shape[1:3]
        assert a.key.shape == a.value.shape == (batch, columns, kv_heads, dim)
        assert (a.max_q, a.max_k) == (rows, columns)
        assert heads % kv_heads == 0
        assert a.query.dtype == a.key.dtype == a.value.dtype
        assert a.query.dtype in (torch.float16, torch.bfloat16, torch.float64)  # the last for an exact oracle
        for x in (a.query, a.key, a.value):
            assert x.stride(-1) == 1, "Input tensor must have contiguous last dimension"
        for window in (a.window_size_left, a.window_size_right):
            assert window is None or (type(window) is int and window >= 0)

    def _math(self, a):
        rows, columns = a.query.shape[1], a.key.shape[1]
        longest = getattr(a, "longest", columns)
        left, right = (-1 if w is None or w >= longest else w for w in (a.window_size_left, a.window_size_right))
        if left < 0 <= right:
            left = longest
        if right < 0 <= left:
            right = longest
        j = torch.arange(columns) - (torch.arange(rows)[:, None] + columns - rows)
        hidden = torch.zeros_like(j, dtype=torch.bool) if left < 0 else (j < -left) | (j > right)
        group = a.query.shape[2] // a.key.shape[2]
        q, k, v = (wide(x.transpose(1, 2)) for x in (a.query, a.key, a.value))
        scores = (q @ k.repeat_interleave(group, 1).mT * a.scale).masked_fill(hidden, float("-inf"))
        lse = scores.logsumexp(-1)
        weights = torch.exp(scores - lse.unsqueeze(-1)).nan_to_num(0.0)
        return (weights @ v.repeat_interleave(group, 1)).transpose(1, 2), lse, scores


class OnCuda:
    """The CUDA half of the kernel, called with tensors of this machine, in fp64 too."""

    name = "sdpa"

    def refusal(self, q, k, v, change=None):
        return None

    def split(self, tile, device, dtype, backward=False):
        return KERNEL.split(tile, CUDA, dtype, backward)

    def joins(self, first, second, device):
        return KERNEL.joins(first, second, CUDA)

    def forward(self, q, k, v, shapes, scale, change=None):
        return sdpa._cuda_forward(q, k, v, shapes, scale)

    def backward(self, saved, shapes, scale, change=None):
        return sdpa._cuda_backward(saved, shapes, scale)


@contextmanager
def on_cuda():
    """The CUDA half in the place of the kernel."""
    with patch.object(sdpa, "aten", FlashOnCuda()), patch.dict(KERNELS, sdpa=OnCuda()):
        yield


@through
def test_the_oracle_matrix_on_cuda(P, routes, every_layout):
    check_through(on_cuda, "sdpa", P, routes, every_layout)


@pytest.fixture
def flash(monkeypatch):
    stand_in = FlashOnCuda()
    monkeypatch.setattr(sdpa, "aten", stand_in)
    return stand_in


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kind", TILES)
def test_every_tile_on_cuda(flash, kind, heads, dtype):
    check_kernel(OnCuda(), TILES[kind], heads, dtype, PRECISION[dtype])
    assert {name for name, _ in flash.calls} == {"_flash_attention_forward", "_flash_attention_backward"}


@examples(200)
@given(some_tiles())
def test_the_window_on_cuda_shows_exactly_the_tiles_pairs(tile):
    stand_in, times = FlashOnCuda(), torch.zeros(400, 400, dtype=torch.int64)
    for part in KERNEL.split(tile, CUDA, torch.bfloat16):
        rows, columns = part.q1 - part.q0, part.k1 - part.k0
        left, right = window_of(part.shape)
        q, k = torch.zeros(1, rows, 1, 8), torch.zeros(1, columns, 1, 8)
        call = SimpleNamespace(query=q, key=k, value=k, scale=1.0, window_size_left=left, window_size_right=right)
        times[part.q0 : part.q1, part.k0 : part.k1] += stand_in._math(call)[2][0, 0] == 0
    right = torch.zeros_like(times)
    right[tile.q0 : tile.q1, tile.k0 : tile.k1] += seen(tile)
    assert torch.equal(times, right)


FOLLOWING = {
    # Tiles whose rows and keys follow each other, and the calls they take on CPU and on CUDA.
    "equal documents": ([(0, 5, 0), (5, 10, 0), (10, 15, 0)], 1, 1),
    "documents": ([(0, 5, 0), (5, 7, 0), (7, 8, 0), (8, 20, 0)], 4, 1),
    "some equal": ([(0, 4, 0), (4, 8, 0), (8, 9, 0), (9, 13, 0)], 3, 1),
    "rectangles": ([(0, 4, None), (4, 8, None), (8, 9, None)], 2, 1),
    "rectangles and documents": ([(0, 4, None), (4, 8, 0), (8, 12, 0)], 2, 2),
}


def join_tiles(kind):
    return [make_tile(start, stop, start, stop, lo=lo) for start, stop, lo in FOLLOWING[kind][0]]


def check_joined(kernel, tiles, calls, heads, dtype, tolerance):
    """All tiles together against each alone."""
    x = make_inputs(tiles[-1].q1, heads, dim=8, dtype=dtype)
    made = launches(kernel, tiles, x.q)
    assert len(made) == calls
    assert [shape for launch in made for shape in launch.shapes] == [tile.shape for tile in tiles]
    assert sum(launch.pairs for launch in made) == sum(map(algebra.tile_area, tiles))
    alone = [launches(kernel, [tile], x.q)[0] for tile in tiles]
    one_by_one, together = _results(kernel, alone, x), _results(kernel, made, x)
    assert all(relative_error(a, b) < tolerance for a, b in zip(together, one_by_one, strict=True))


def _results(kernel, made, x):
    """out, lse, dq, dk, dv over all rows."""
    outs, grads = [], []
    for launch in made:
        q, dout = (t[:, :, launch.q0 : launch.q1] for t in (x.q, x.dout))
        k, v = (t[:, :, launch.k0 : launch.k1] for t in (x.k, x.v))
        out, lse = kernel.forward(q, k, v, launch.shapes, 0.4)
        assert (out.shape, lse.shape) == (q.shape, q.shape[:3])
        outs.append((out, lse))
        grads.append(kernel.backward(BackwardInputs(dout, q, k, v, out, lse), launch.shapes, 0.4))
    return [torch.cat(parts, dim=2) for results in (outs, grads) for parts in zip(*results, strict=True)]


@pytest.mark.parametrize("dtype", list(PRECISION), ids=str)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kind", FOLLOWING)
def test_tiles_that_follow_each_other_go_together_on_cpu(kind, heads, dtype):
    check_joined(KERNEL, join_tiles(kind), FOLLOWING[kind][1], heads, dtype, PRECISION[dtype][1])


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kind", FOLLOWING)
def test_tiles_that_follow_each_other_go_together_on_cuda(flash, kind, heads):
    dtype = torch.bfloat16
    check_joined(OnCuda(), join_tiles(kind), FOLLOWING[kind][2], heads, dtype, PRECISION[dtype][1])
    assert any(call.cum_seq_q is not None for _, call in flash.calls)


def test_windows_of_documents_go_together_on_cuda(flash):
    # A document that is shorter than the window has none of its own, but goes with those that have.
    tiles = [make_tile(0, 9, 0, 9, 0, 3), make_tile(9, 12, 9, 12, 0, 3), make_tile(12, 19, 12, 19, 0, 3)]
    check_joined(OnCuda(), tiles, 1, (4, 2), torch.bfloat16, PRECISION[torch.bfloat16][1])


def test_rows_of_a_batch_and_tiles_apart_are_not_joined():
    tiles = join_tiles("equal documents")
    assert len(launches(KERNEL, tiles, torch.empty(2, 1, 15, 8))) == 3
    assert len(launches(KERNEL, [tiles[0], tiles[2]], torch.empty(1, 1, 15, 8))) == 2
    assert launches(KERNEL, [], torch.empty(1, 1, 15, 8)) == []


def tensors(dtype=torch.bfloat16, dim=64, dim_v=None, device="cpu"):
    """Stand-ins of one shape, type and device, as far as `refusal` looks."""
    device = torch.device(device)
    q = SimpleNamespace(dtype=dtype, shape=(1, 2, 4, dim), device=device)
    return q, q, SimpleNamespace(dtype=dtype, shape=(1, 2, 4, dim if dim_v is None else dim_v), device=device)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (tensors(dim=6, dim_v=4), "keys have dim 6 and values 4; flash attention takes equal dims"),
        (tensors(device="mps"), "there is no flash attention on device 'mps'"),
        (
            tensors(dtype=torch.int64),
            "flash attention on cpu takes fp64, fp32, bf16 and fp16, not torch.int64",
        ),
        (
            tensors(dtype=torch.float32, device="cuda"),
            "flash attention takes bf16 and fp16 on cuda, not torch.float32 on cuda",
        ),
        (
            tensors(dim=60, device="cuda"),
            "flash attention takes equal head dims, multiples of 8 up to 256, not 60 and 60",
        ),
        (
            tensors(dim=264, device="cuda"),
            "flash attention takes equal head dims, multiples of 8 up to 256, not 264 and 264",
        ),
        (tensors(dtype=torch.float64, dim=7), None),
        (tensors(dim=256, device="cuda"), None),
    ],
)
def test_refusal(given, reason):
    with patch.object(sdpa, "capability", lambda device: (8, 0)):
        assert KERNEL.refusal(*given) == reason
