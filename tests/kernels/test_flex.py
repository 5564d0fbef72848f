"""FlexAttention through a stand-in that checks what it is given, and through its own plain math, which runs on CPU."""

import inspect
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from torch._dynamo.testing import CompileCounterWithBackend

from longspan import ContextParallel
from longspan.comm.traffic import record
from longspan.cp.attention import attention
from longspan.kernels import flex
from longspan.kernels.choice import KERNELS
from longspan.kernels.flex import FlexKernel
from longspan.kernels.protocol import BackwardInputs, launches
from longspan.kernels.reference import ReferenceKernel
from longspan.kernels.scores import ScoreChange
from longspan.plan import Layout, Mask, plan_attention
from longspan.plan import bands as algebra
from tests.cp.cases import check_through, through
from tests.oracle import dense_attention, make_inputs, relative_error
from tests.ranks import run_threads

from .test_scores import CHANGES, MASKS, check_changed
from .test_sdpa import FOLLOWING, join_tiles, tensors
from .tiles import PRECISION, TILES, check_kernel, every_tile, make_tile, wide

KERNEL, CPU = FlexKernel(), torch.device("cpu")
BLOCK = 128


class StandIn:
    """`flex_attention` by its own signature, in plain differentiable torch."""

    def __init__(self):
        self.calls = []

    def __call__(self, *positional, **named):
        bound = inspect.signature(torch_flex.flex_attention).bind(*positional, **named)
        bound.apply_defaults()
        a = SimpleNamespace(**bound.arguments)
        self.calls.append("differentiated" if torch.is_grad_enabled() and a.query.requires_grad else "plain")
        self._check(a)
        return plainly(*positional, **named)

    def _check(self, a):
        B, H, num_q, D = a.query.shape
        K, num_k = a.key.shape[1:3]
        assert a.key.shape == (B, K, num_k, D)
        assert a.value.shape[:3] == (B, K, num_k)
        assert H % K == 0
        assert a.enable_gqa is True
        for x in (a.query, a.key, a.value):
            assert x.dtype == a.query.dtype in PRECISION
            assert x.is_contiguous()
            assert x.is_leaf
            assert x.requires_grad == torch.is_grad_enabled()
        assert type(a.scale) is float
        assert a.return_lse is False
        assert a.return_aux == torch_flex.AuxRequest(lse=True, max_scores=False)
        assert a.kernel_options == {"BACKEND": "TRITON"}
        assert a.block_mask.seq_lengths == (num_q, num_k)
        check_blocks(a.block_mask)
        if a.score_mod is not None:
            assert len(inspect.signature(a.score_mod).parameters) == 5
            captured = [cell.cell_contents for cell in a.score_mod.__closure__ if cell.cell_contents is not None]
            assert captured
            assert {(x.device, x.requires_grad) for x in captured} == {(a.query.device, False)}
            assert {x.dtype for x in captured} <= {wide(a.query).dtype, torch.int32}


def plainly(query, key, value, score_mod, block_mask, scale, **how):
    """The answer, differentiable; it can be compiled."""
    group = query.shape[1] // key.shape[1]
    keys, values = (wide(x).repeat_interleave(group, 1) for x in (key, value))
    scores = wide(query) @ keys.mT * scale
    if score_mod is not None:
        head, row, column = (torch.arange(n, dtype=torch.int32) for n in scores.shape[1:])
        changed = score_mod(scores, None, head[:, None, None], row[:, None], column)
        assert (changed.shape, changed.dtype) == (scores.shape, scores.dtype)
        scores = changed
    scores = scores.masked_fill(~visible(block_mask), float("-inf"))
    out = torch.softmax(scores, -1) @ values
    return out.to(query.dtype), torch_flex.AuxOutput(lse=scores.logsumexp(-1))


def visible(mask):
    """Bool `(rows, keys)` by the mask's own function."""
    rows, keys = (torch.arange(length, dtype=torch.int32) for length in mask.seq_lengths)
    return mask.mask_mod(None, None, rows[:, None], keys)


def check_blocks(mask):
    """The blocks listed as whole see every pair, those listed as partial some, all others none; every row sees a key."""
    assert mask.BLOCK_SIZE == (BLOCK, BLOCK)
    seen = visible(mask)
    assert seen.any(1).all()
    rows, keys = (-(-length // BLOCK) for length in mask.seq_lengths)
    padded = torch.zeros(rows * BLOCK, keys * BLOCK, dtype=torch.bool)
    padded[: seen.shape[0], : seen.shape[1]] = seen
    blocks = padded.unflatten(1, (keys, BLOCK)).unflatten(0, (rows, BLOCK)).transpose(1, 2).flatten(2)
    some, whole = blocks.any(-1), blocks.all(-1)
    assert torch.equal(listed(mask.kv_num_blocks, mask.kv_indices), some & ~whole)
    assert torch.equal(listed(mask.full_kv_num_blocks, mask.full_kv_indices), whole)
    assert torch.equal(listed(mask.q_num_blocks, mask.q_indices), (some & ~whole).T)
    assert torch.equal(listed(mask.full_q_num_blocks, mask.full_q_indices), whole.T)


def listed(num, indices):
    """Bool `(rows, columns)` of blocks: in each row the first `num` of `indices`."""
    assert num.dtype == indices.dtype == torch.int32
    assert num.is_contiguous()
    assert indices.is_contiguous()  # the kernels take it for granted
    assert indices.shape == (1, 1, num.shape[2], indices.shape[3])
    first = torch.arange(indices.shape[3]) < num[0, 0, :, None]
    return torch.zeros_like(first).scatter_(1, indices[0, 0].long(), first)


class Anywhere(FlexKernel):
    """The kernel on tensors of this machine, in fp64 and of any dim too."""

    def refusal(self, q, k, v, change=None):
        return None


@contextmanager
def on_this_machine():
    """The kernel through the stand-in, in the place of the real one."""
    with patch.object(flex, "_compiled", StandIn), patch.dict(KERNELS, flex=Anywhere()):
        yield


@pytest.fixture
def stand_in(monkeypatch):
    made = StandIn()
    monkeypatch.setattr(flex, "_compiled", lambda: made)
    return made


def any_device(*tensors):
    """In the place of FlexAttention's check that on CPU nothing requires a gradient: its plain math has one."""


@pytest.fixture
def plain_math(monkeypatch):
    """FlexAttention itself, traced and compiled as on CUDA, and then run by its plain math, backward too."""
    monkeypatch.setattr(torch_flex, "_validate_device", any_device)
    monkeypatch.setattr(flex, "_compiled", partial(flex._compiled, "aot_eager"))


@through
def test_the_oracle_matrix(P, routes, every_layout):
    check_through(on_this_machine, "flex", P, routes, every_layout)


@every_tile()
def test_every_tile(stand_in, kind, heads, dtype):
    check_kernel(KERNEL, TILES[kind], heads, dtype, PRECISION[dtype])
    assert stand_in.calls == ["plain"] * 2 + ["differentiated"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.bfloat16, marks=pytest.mark.nightly)], ids=str)
def test_every_tile_by_flex_attention_itself(plain_math, dtype):
    for tile in TILES.values():
        check_kernel(KERNEL, tile, (4, 2), dtype, PRECISION[dtype], dim_v=24, dim=16)


@pytest.mark.parametrize("kind", [*TILES, *FOLLOWING])
def test_blocks_are_those_of_create_block_mask(kind):
    shapes = tuple(tile.shape for tile in ([TILES[kind]] if kind in TILES else join_tiles(kind)))
    mask = flex._block_mask(shapes, CPU)
    check_blocks(mask)
    right = torch_flex.create_block_mask(mask.mask_mod, None, None, *mask.seq_lengths, device="cpu")
    for name in ("kv_num_blocks", "kv_indices", "q_num_blocks", "q_indices"):
        assert torch.equal(getattr(mask, name), getattr(right, name))
        assert torch.equal(getattr(mask, f"full_{name}"), getattr(right, f"full_{name}"))
    assert (mask.shape, mask.BLOCK_SIZE) == (right.shape, right.BLOCK_SIZE)
    # Under vmap, as FlexAttention calls it.
    seen_by_vmap = torch_flex.create_mask(mask.mask_mod, None, None, *mask.seq_lengths, device="cpu")[0, 0]
    assert torch.equal(seen_by_vmap, visible(mask))
    assert torch.equal(visible(mask), torch.block_diag(*(pairs(shape) for shape in shapes)).bool())


def pairs(shape):
    away = torch.arange(shape.num_q)[:, None] - torch.arange(shape.num_k)
    return ((away >= shape.lo) & (away <= shape.hi)).int()


def changes(tile, heads):
    places = torch.arange(tile.q0, tile.q1) * 3, torch.arange(tile.k0, tile.k1) * 2 + 1
    slopes = torch.tensor([2.0**-n for n in range(heads)])
    return ScoreChange(1.3), ScoreChange(None, slopes, *places), ScoreChange(1.3, slopes, *places)


SOME = [TILES[kind] for kind in ("full", "lower trapezoid, wide", "band, tall", "band, above a block")]


def differences(change, tile, dtype, heads=(4, 2)):
    """Of out, lse and the gradients, from the reference kernel's, where the rows also see a key that is not in the tile."""
    x = make_inputs(max(tile.q1, tile.k1), heads, batch=2, dim=16, dtype=dtype)
    q, dout = (t[:, :, tile.q0 : tile.q1] for t in (x.q, x.dout))
    k, v = (t[:, :, tile.k0 : tile.k1] for t in (x.k, x.v))
    results = []
    for kernel in (KERNEL, ReferenceKernel()):
        out, lse = kernel.forward(q, k, v, (tile.shape,), 0.4, change)
        more = torch.logaddexp(lse, torch.full_like(lse, 0.5))
        final = (out * torch.exp(lse - more).unsqueeze(-1) + 0.2 * torch.exp(0.5 - more).unsqueeze(-1)).to(dtype)
        results.append(
            (out, lse, *kernel.backward(BackwardInputs(dout, q, k, v, final, more), (tile.shape,), 0.4, change))
        )
    return [relative_error(got, right) for got, right in zip(*results, strict=True)]


@pytest.mark.parametrize("dtype", list(PRECISION), ids=str)
@pytest.mark.parametrize("tile", SOME, ids=str)
def test_changes_are_those_of_the_reference(stand_in, tile, dtype):
    for change in changes(tile, 4):
        assert max(differences(change, tile, dtype)) < PRECISION[dtype][1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "tile"),
    [
        pytest.param(n, tile, marks=() if turn % 3 == n else pytest.mark.nightly)
        for n in range(3) for turn, tile in enumerate(SOME)
    ],
    ids=str,
)  # fmt: skip
def test_changes_by_flex_attention_itself(plain_math, number, tile):
    assert max(differences(changes(tile, 4)[number], tile, torch.float64)) < 1e-12


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.nightly)], ids=str)
@pytest.mark.parametrize("tile", SOME, ids=str)
def test_the_stand_in_is_flex_attention(monkeypatch, tile, dtype):
    """Forward, where nothing has to be patched: the real function, uncompiled."""
    x = make_inputs(max(tile.q1, tile.k1), (6, 2), batch=2, dim=16, dim_v=24, dtype=dtype)
    q, k, v = x.q[:, :, tile.q0 : tile.q1], x.k[:, :, tile.k0 : tile.k1], x.v[:, :, tile.k0 : tile.k1]
    for change in (None, *changes(tile, 6)):
        both = []
        for function in (StandIn(), torch_flex.flex_attention):
            monkeypatch.setattr(flex, "_compiled", lambda function=function: function)
            both.append(KERNEL.forward(q, k, v, (tile.shape,), 0.4, change))
        for got, real in zip(*both, strict=True):
            assert got.dtype == real.dtype
            assert relative_error(got, real) < PRECISION[dtype][0]


def results(tiles, x, change):
    made = launches(KERNEL, tiles, x.q)
    outs, grads = [], []
    for launch in made:
        q, dout = (t[:, :, launch.q0 : launch.q1] for t in (x.q, x.dout))
        k, v = (t[:, :, launch.k0 : launch.k1] for t in (x.k, x.v))
        here = None
        if change is not None:
            rows, keys = torch.arange(launch.q0, launch.q1), torch.arange(launch.k0, launch.k1)
            here = ScoreChange(change.softcap, change.slopes, rows, keys)
        outs.append(KERNEL.forward(q, k, v, launch.shapes, 0.4, here))
        grads.append(KERNEL.backward(BackwardInputs(dout, q, k, v, *outs[-1]), launch.shapes, 0.4, here))
    return len(made), [torch.cat(parts, dim=2) for some in (outs, grads) for parts in zip(*some, strict=True)]


@pytest.mark.parametrize(
    "change", [None, ScoreChange(1.5, torch.tensor([1.0, 0.5, 0.25, 0.125]))], ids=["plain", "both"]
)
@pytest.mark.parametrize("kind", FOLLOWING)
def test_tiles_that_follow_each_other_go_together(stand_in, kind, change):
    tiles = join_tiles(kind)
    x = make_inputs(tiles[-1].q1, (4, 2), dim=8)
    calls, together = results(tiles, x, change)
    assert calls == 1
    one_by_one = [results([tile], x, change)[1] for tile in tiles]
    for got, parts in zip(together, zip(*one_by_one, strict=True), strict=True):
        assert relative_error(got, torch.cat(parts, dim=2)) < 1e-12
    assert sum(map(algebra.tile_area, tiles)) == sum(launch.pairs for launch in launches(KERNEL, tiles, x.q))


@pytest.mark.slow
def test_documents_longer_than_a_block_go_together(plain_math):
    ends = [0, 300, 301, 450, 900]
    tiles = [make_tile(a, b, a, b, lo=0, hi=None if a else 140) for a, b in pairwise(ends)]
    mask = flex._block_mask(tuple(tile.shape for tile in tiles), CPU)
    x = make_inputs(900, (2, 1), dim=16)
    calls, got = results(tiles, x, None)
    assert calls == 1
    want = dense_attention(x, visible(mask), 0.4)
    for a, b in zip((got[0], *got[2:]), want, strict=False):
        assert relative_error(a, b) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("P", [2, 3])
def test_soft_cap_and_alibi_on_routes_against_dense(P):
    """ "auto" takes it: the kernels before it refuse what changes scores."""
    heads = (6, 3) if P == 3 else (8, 4)
    cases = [
        (layout, mask, route, None, heads, *change)
        for route in ("ring", "exchange", "ulysses")
        for layout in (Layout.zigzag(23, P), Layout.striped(23, P, 26 // P + 3))
        for mask in MASKS
        for change in CHANGES
    ]
    # KV heads that serve now more, now fewer query heads of a rank.
    cases += [(Layout.zigzag(23, P), MASKS[0], "ulysses", None, (12, 6), *change) for change in CHANGES if P == 2]
    with on_this_machine(), record() as calls:
        run_threads(P, check_changed, cases)
    assert {call.kernel for call in calls} == {"flex"}
    assert len(calls) == 2 * len(cases) * P


def test_a_sink_beside_the_keys(stand_in, monkeypatch):
    """A term of the final lse that no tile has."""
    monkeypatch.setitem(KERNELS, "flex", Anywhere())
    mask, x, sink = Mask.documents([5, 11, 7], window=4), make_inputs(23), torch.tensor([0.3, -2.0, 1.5, 0.0]).double()
    want = dense_attention(x, mask, sink=sink)
    leaves = [t.clone().requires_grad_() for t in (*x[:3], sink)]
    out = attention(*leaves[:3], plan=plan_attention(Layout.zigzag(23, 1), mask), kernel="flex", sink=leaves[3])
    out.backward(x.dout)
    for got, right in zip((out.detach(), *(t.grad for t in leaves)), want, strict=True):
        assert relative_error(got, right) < 1e-12


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_compiled_code_in_compiled_code_and_without_gradients(monkeypatch, backend):
    """A compiled block calls an operator that calls what the kernel has compiled: the stand-in's formulas, for FlexAttention's
    plain math uses vmap, which does not run there."""
    function = torch.compile(plainly, fullgraph=True, backend=backend)
    monkeypatch.setattr(flex, "_compiled", lambda: function)
    monkeypatch.setitem(KERNELS, "flex", Anywhere())
    mask, x = Mask.documents([40, 160]), make_inputs(200, dim=16)
    want = dense_attention(x, mask)
    with ContextParallel(None, kernel="flex").sequence(mask) as sequence:
        block = torch.compile(lambda q, k, v: sequence.attention(q * 2, k, v) + 1, fullgraph=True, backend=backend)
        q, k, v = (t.clone().requires_grad_() for t in (x.q / 2, *x[1:3]))
        with torch.inference_mode():
            before = block(q, k, v) - 1
        out = block(q, k, v) - 1
        out.backward(x.dout)
    for got, right in zip((before, out.detach(), q.grad / 2, k.grad, v.grad), (want.out, *want[:4]), strict=True):
        assert relative_error(got, right) < 1e-12


@pytest.mark.slow
def test_evaluation_before_training(plain_math, monkeypatch):
    """What is kept from a call in inference mode can be kept for backward."""
    flex._block_mask.cache_clear()
    monkeypatch.setitem(KERNELS, "flex", Anywhere())
    mask, x, slopes = Mask.causal(150), make_inputs(150, dim=16), torch.ones(4)
    plan = plan_attention(Layout.zigzag(150, 1), mask)
    q, k, v = (t.clone().requires_grad_() for t in x[:3])
    with torch.inference_mode():
        before = attention(*x[:3], plan=plan, kernel="flex", alibi=slopes, softcap=2.0)
    out = attention(q, k, v, plan=plan, kernel="flex", alibi=slopes, softcap=2.0)
    out.backward(x.dout)
    other = [t.clone().requires_grad_() for t in x[:3]]
    right = attention(*other, plan=plan, kernel="reference", alibi=slopes, softcap=2.0)
    right.backward(x.dout)
    for got, want in zip((before, out, q.grad, k.grad, v.grad), (right, right, *(t.grad for t in other)), strict=True):
        assert relative_error(got.detach(), want.detach()) < 1e-12


@pytest.mark.slow
def test_lengths_places_and_caps_compile_nothing_anew(monkeypatch):
    counter = CompileCounterWithBackend("aot_eager")
    function = flex._compiled.__wrapped__(counter)
    monkeypatch.setattr(torch_flex, "_validate_device", any_device)
    monkeypatch.setattr(flex, "_compiled", lambda: function)
    slopes = torch.ones(4)

    def run(lengths, cap):
        ends = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
        tiles = [make_tile(a, b, a, b, lo=0) for a, b in pairwise(ends)]
        assert results(tiles, make_inputs(ends[-1], (4, 2), dim=16), ScoreChange(cap, slopes))[0] == 1
        return counter.frame_count

    run([400], 1.5)
    graphs = run([300, 180], 2.5)
    assert graphs <= 6  # forward and backward, each for one length, then for all, these as tiles and as squares
    assert [run(lengths, 1.0 + len(lengths)) for lengths in ([500], [129, 1, 600], [60] * 9, [1100])] == [graphs] * 4


@pytest.mark.parametrize(
    ("given", "has_triton", "reason"),
    [
        (
            tensors(dim=16), True,
            "FlexAttention has a backward for fp32, bf16 and fp16 on cuda, not for torch.bfloat16 on cpu",
        ),
        (
            tensors(torch.float64, dim=16, device="cuda"), True,
            "FlexAttention has a backward for fp32, bf16 and fp16 on cuda, not for torch.float64 on cuda",
        ),
        (
            tensors(dim=16, device="cuda"), False,
            "FlexAttention needs the triton package, which is not installed",
        ),
        (tensors(dim=8, device="cuda"), True, "FlexAttention takes head dims from 16 to 256, not 8 and 8"),
        (tensors(dim=264, device="cuda"), True, "FlexAttention takes head dims from 16 to 256, not 264 and 264"),
        (tensors(dim=24, device="cuda"), True, None),
    ],
)  # fmt: skip
def test_refusals(monkeypatch, given, has_triton, reason):
    monkeypatch.setattr(flex, "_HAS_TRITON", has_triton)
    assert KERNEL.refusal(*given, ScoreChange(2.0)) == reason
