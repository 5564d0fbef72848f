"""TokenDropout: the same whoever computes a token and however often, and nothing kept for it."""

import pytest
import torch
from benchmarks.harness import peak_bytes
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from longspan.errors import SpecError
from longspan.model import TokenDropout
from longspan.model.chunks import chunk_elements
from longspan.model.philox import keep
from longspan.plan import Layout
from tests.launches import Launches, on_meta

TOKENS = torch.arange(24).view(2, 12) + 1000


def make_x(num_rows=2, num_tokens=12, hidden_size=10, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, num_tokens, hidden_size, generator=generator, dtype=torch.float64)
    return x.to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_and_gradient(dtype):
    x, drop = make_x(dtype=dtype), TokenDropout(0.2, seed=3, site=5)
    factor = keep(TOKENS, 10, 0.2, seed=3, site=5).double() * 1.25
    out, grad = drop(x, TOKENS), torch.randn(2, 12, 10).to(dtype)
    (x_grad,) = torch.autograd.grad(out, x, grad)
    assert torch.equal(out, (x.double() * factor).to(dtype))
    assert torch.equal(x_grad, (grad.double() * factor).to(dtype))


def test_gradcheck_and_the_gradient_of_the_gradient():
    x, drop = make_x(hidden_size=3), TokenDropout(0.4, seed=3, site=5)
    assert torch.autograd.gradcheck(lambda x: drop(x, TOKENS), (x,))
    assert torch.autograd.gradgradcheck(lambda x: drop(x, TOKENS), (x,))


def test_identity_without_training_or_without_dropout():
    x = make_x()
    assert TokenDropout(0.5, seed=1, site=0).eval()(x, TOKENS) is x
    assert TokenDropout(0.0, seed=1, site=0)(x, TOKENS) is x


def test_tokens_sites_and_seeds_differ():
    x = torch.ones(1, 4, 64)
    tokens = torch.tensor([[0, 1, 1, 2**40]])
    rows = TokenDropout(0.5, seed=1, site=0)(x, tokens)[0]
    assert torch.equal(rows[1], rows[2])
    others = [TokenDropout(0.5, seed, site)(x, tokens)[0, 0] for seed, site in ((1, 1), (2, 0))]
    distinct = [rows[0], rows[1], rows[3], *others]
    assert len({tuple(row.tolist()) for row in distinct}) == 5


@pytest.mark.parametrize("layout", [Layout.zigzag(12, 2), Layout.striped(12, 3), Layout.contiguous(12, 5)])
def test_shards_of_a_row_equal_the_whole_row_bit_for_bit(layout):
    x, drop = make_x(), TokenDropout(0.3, seed=3, site=5)
    right = drop(x, TOKENS)
    out = torch.full_like(right, torch.nan)
    for rank in range(layout.ranks):
        own = torch.from_numpy(layout.positions(rank))
        out[:, own] = drop(x[:, own], TOKENS[:, own])
    assert torch.equal(out, right)


def test_chunks_do_not_change_a_bit():
    tokens = torch.arange(3 * 1000).view(3, 1000).flip(0)
    x, drop = make_x(3, 1000, 131, torch.float32), TokenDropout(0.3, seed=3, site=5)
    out = drop(x, tokens)
    rows = [drop(x[:, t : t + 1], tokens[:, t : t + 1]) for t in (0, 1, 500, 999)]
    assert torch.equal(out[:, [0, 1, 500, 999]], torch.cat(rows, 1))
    assert torch.equal(drop(x.mT.contiguous().mT, tokens), out)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_the_same_under_recomputation(use_reentrant):
    x, drop = make_x(), TokenDropout(0.3, seed=3, site=5)

    def square(x):
        # A product, so that the backward of one reads the other's recomputed values.
        return drop(x, TOKENS) * drop(x * 2, TOKENS)

    right = square(x)
    (right_grad,) = torch.autograd.grad(right.sum(), x)
    out = checkpoint(square, x, use_reentrant=use_reentrant, preserve_rng_state=False)
    out.sum().backward()
    assert torch.equal(out, right)
    assert torch.equal(x.grad, right_grad)


def test_tokens_alone_are_kept_for_backward():
    x, kept = make_x(num_tokens=12, hidden_size=1000), []
    with saved_tensors_hooks(lambda saved: kept.append(saved) or saved, lambda saved: saved):
        out = TokenDropout(0.3, seed=3, site=5)(x, TOKENS)
    assert [saved.data_ptr() for saved in kept] == [TOKENS.data_ptr()]
    assert sum(saved.nbytes for saved in kept) == 24 * 8
    out.sum().backward()
    assert x.grad.count_nonzero() == out.count_nonzero()


def test_temporaries_do_not_grow_with_the_tokens():
    x, drop = torch.ones(1, 2**14, 2**8), TokenDropout(0.1, seed=1, site=0)
    tokens = torch.arange(2**14)[None]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        out = drop(x, tokens)
    assert out.nbytes < peak_bytes(profiler) < out.nbytes + 5 * 2**20


def test_dead_slots_are_harmless():
    x, tokens = make_x(), TOKENS.clone()
    tokens[0, 3] = tokens[1, 11] = -1
    drop = TokenDropout(0.3, seed=3, site=5)
    out = drop(x, tokens)
    out.sum().backward()
    assert out.isfinite().all()
    assert x.grad.isfinite().all()
    assert torch.equal(out[tokens >= 0], drop(x, TOKENS)[tokens >= 0])


@pytest.mark.parametrize("shape", [(2, 0, 10), (0, 12, 10), (2, 12, 0)])
def test_nothing_to_drop(shape):
    x = torch.zeros(shape, requires_grad=True)
    out = TokenDropout(0.3, seed=3, site=5)(x, torch.zeros(shape[:-1], dtype=torch.int64))
    out.sum().backward()
    assert out.shape == x.grad.shape == shape


@pytest.mark.slow
def test_compiled_and_eager_are_equal():
    first, second = TokenDropout(0.3, seed=3, site=5), TokenDropout(0.6, seed=2**64 - 1, site=2**32 - 1)

    def both(x, tokens):
        return second(first(x, tokens), tokens)

    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    for num_tokens in (12, 7):
        x, tokens, results = make_x(num_tokens=num_tokens), TOKENS[:, :num_tokens], []
        for function in (both, compiled):
            out = function(x, tokens)
            results.append((out, *torch.autograd.grad(out, x, x.detach().cos())))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        assert 0 < results[0][0].count_nonzero() < x.numel()


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (TOKENS[0], r"tokens \(12,\) torch.int64 do not match x \(2, 12, 10\)[\s\S]*sharded like the ids"),
        (TOKENS.int(), r"tokens \(2, 12\) torch.int32 do not match"),
    ],
)
def test_tokens_that_do_not_fit_are_refused(tokens, words):
    with pytest.raises(SpecError, match=words):
        TokenDropout(0.1, seed=1, site=0)(make_x(), tokens)


@pytest.mark.parametrize(("p", "seed", "site"), [(1.0, 1, 0), (-0.1, 1, 0), (0.1, 2**64, 0), (0.1, 1, -1)])
def test_options_that_cannot_be_are_refused(p, seed, site):
    with pytest.raises(SpecError, match=r"dropout .* is outside \[0, 1\)|seed .* must be in .* and site"):
        TokenDropout(p, seed, site)


def test_options_are_shown():
    assert repr(TokenDropout(0.1, seed=3, site=5)) == "TokenDropout(p=0.1, seed=3, site=5)"


def test_a_long_shard_on_an_accelerator_takes_hundreds_of_launches_and_not_tens_of_thousands():
    # 16k x 4,096 elements are 4 chunks of 2**24. A round of Philox is 10 operators, and there are 10 rounds: with counters,
    # thresholds and the product some 120 a chunk.
    x, tokens, drop = on_meta(1, 2**14, 2**12), on_meta(1, 2**14, dtype=torch.int64), TokenDropout(0.1, seed=1, site=0)
    with Launches() as seen:
        drop(x, tokens)
    assert seen.total <= 4 * 125
    assert seen.counts["where"] == 4


@pytest.mark.slow
def test_chunks_of_an_accelerator_do_not_change_a_bit(monkeypatch):
    tokens = torch.arange(1, 1001)[None]
    x, drop = make_x(1, 1000, 131, torch.float32), TokenDropout(0.3, seed=3, site=5)
    results = []
    for size in (131, 2**17, chunk_elements("cuda")):
        monkeypatch.setattr("longspan.model.dropout.chunk_elements", lambda device_type, size=size: size)
        with Launches() as seen:
            out = drop(x, tokens)
        results.append((out, *torch.autograd.grad(out, x, x.detach().cos()), seen.counts["where"]))
    assert [number for *_, number in results] == [1000, 1, 1]
    for out, grad, _ in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(grad, results[0][1])
