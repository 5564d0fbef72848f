"""Philox against its published vectors and a plain Python copy; what is made from it, against that copy and chance.

Bounds on chance are 5 standard deviations of the statistic, and the seeds are fixed.
"""

import hashlib
import math
from unittest import mock

import pytest
import torch
from benchmarks.harness import peak_bytes
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from longspan.errors import SpecError
from longspan.model import philox
from longspan.model.philox import keep, normal
from tests.examples import examples
from tests.launches import Launches

WORD = st.integers(0, 2**32 - 1)


def python_philox(counter, key):
    """The round function as the paper writes it, on Python's integers."""
    for i in range(10):
        k = [(word + i * step) % 2**32 for word, step in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True)]
        (high0, low0), (high1, low1) = divmod(0xD2511F53 * counter[0], 2**32), divmod(0xCD9E8D57 * counter[2], 2**32)
        counter = [high1 ^ counter[1] ^ k[0], low1, high0 ^ counter[3] ^ k[1], low0]
    return counter


def python_normal(index, seed, name):
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    key = [int.from_bytes(digest[i : i + 4], "little") for i in (0, 4)]
    block, place = divmod(index, 4)
    words = python_philox([block % 2**32, 0, block >> 32, 0], key)
    first, second = ((word + 0.5) / 2**32 for word in words[place // 2 * 2 :][:2])
    return math.sqrt(-2 * math.log(first)) * (math.cos, math.sin)[place % 2](2 * math.pi * second)


def whole(shape, **options):
    options = {"seed": 1, "name": "w", "std": 1.0, "dtype": torch.float64} | options
    return normal(shape, tuple(slice(0, size) for size in shape), **options)


def correlation(a, b):
    """In standard deviations of what independent values would give."""
    a, b = (x.double().flatten() for x in (a, b))
    a, b = ((x - x.mean()) / x.std() for x in (a, b))
    return abs(float((a * b).mean())) * math.sqrt(a.numel())


@pytest.mark.parametrize(
    ("counter", "key", "right"),
    [
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_the_vectors_that_random123_publishes(counter, key, right):
    # In vector lanes as well as in the scalar rest of a CPU's loop.
    words = philox.philox(*(torch.full((37,), word) for word in counter), key=tuple(key))
    right = [int(word, 16) for word in right.split()]
    assert torch.stack(words).T.tolist() == [right] * 37
    assert python_philox(counter, key) == right


@examples(100)
@given(st.lists(st.tuples(WORD, WORD), min_size=1, max_size=9), WORD, WORD, st.tuples(WORD, WORD))
def test_any_counter_and_key_against_plain_python(pairs, c1, c3, key):
    first, third = torch.tensor(pairs, dtype=torch.int64).unbind(1)
    words = torch.broadcast_tensors(*philox.philox(first, c1, third, c3, key=key))
    assert torch.stack(words, -1).tolist() == [python_philox([a, c1, b, c3], key) for a, b in pairs]


@pytest.mark.parametrize("start", [0, 5, 2**34 - 3, 2**63 - 9])
def test_normal_against_plain_python(start):
    values = normal((2**63 - 1,), (slice(start, start + 8),), seed=7, name="embed", std=0.5, dtype=torch.float64)
    right = [0.5 * python_normal(start + i, 7, "embed") for i in range(8)]
    assert values.tolist() == pytest.approx(right, rel=1e-12)


@st.composite
def regions(draw):
    shape = draw(st.lists(st.integers(0, 9), max_size=4))
    bounds = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    if draw(st.booleans()):
        bounds[1:] = [(0, size) for size in shape[1:]]
    return shape, tuple(slice(*pair) for pair in bounds)


@examples(200)
@given(regions(), st.integers(1, 40))
def test_any_region_holds_the_numbers_of_the_whole(case, chunk_blocks):
    shape, region = case
    right = whole(shape)[region]
    with mock.patch.object(philox, "chunk_elements", return_value=4 * chunk_blocks):
        part = normal(shape, region, seed=1, name="w", std=1.0, dtype=torch.float64)
    assert part.shape == right.shape
    assert torch.equal(part, right)


def test_a_column_of_a_large_matrix_is_cut_from_the_same_numbers():
    shape, column = (2**40, 2**20 + 1), 2**19
    region = (slice(2**39, 2**39 + 3), slice(column, column + 1))
    values = normal(shape, region, seed=1, name="w", std=1.0, dtype=torch.float64)
    right = [python_normal((2**39 + i) * shape[1] + column, 1, "w") for i in range(3)]
    assert values.flatten().tolist() == pytest.approx(right, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_types_are_the_fp64_numbers_rounded(dtype):
    assert torch.equal(whole((50, 7), dtype=dtype, std=0.02), whole((50, 7), std=0.02).to(dtype))


def test_normal_has_the_moments_and_quantiles_of_a_normal_distribution():
    x, n = whole((2**18,), seed=3, std=2.0) / 2, 2**18
    assert abs(float(x.mean())) < 5 * math.sqrt(1 / n)
    assert abs(float((x**2).mean()) - 1) < 5 * math.sqrt(2 / n)
    assert abs(float((x**3).mean())) < 5 * math.sqrt(15 / n)
    assert abs(float((x**4).mean()) - 3) < 5 * math.sqrt(96 / n)
    # 32 bins that a normal number falls in alike: chi-square of 31 degrees of freedom, variance 62.
    edges = torch.special.ndtri(torch.arange(1, 32, dtype=torch.float64) / 32)
    counts = torch.bincount(torch.bucketize(x, edges), minlength=32)
    assert abs(float(((counts - n / 32) ** 2 / (n / 32)).sum()) - 31) < 5 * math.sqrt(62)


def test_normal_numbers_of_neighbours_names_and_seeds_do_not_correlate():
    x = whole((512, 512))
    others = {
        "the next": whole((512, 512))[:, 1:],
        "two on": whole((512, 512))[:, 2:],
        "the next row": whole((512, 512))[1:],
        "another name": whole((512, 512), name="v"),
        "another seed": whole((512, 512), seed=2),
    }
    far = {name: correlation(x[: y.shape[0], : y.shape[1]], y) for name, y in others.items()}
    assert all(0 < value < 5 for value in far.values()), far
    # Nor do their sizes, as the two numbers of one radius would if the other radius were the same.
    assert all(correlation(x[: y.shape[0], : y.shape[1]] ** 2, y**2) < 5 for y in others.values())


@pytest.mark.slow
@pytest.mark.parametrize(("num_rows", "num_columns"), [(1, 2**20), (2**20, 1), (2**12, 2**8 - 1)])
def test_temporaries_of_normal_do_not_grow_with_the_region(num_rows, num_columns):
    region = (slice(0, num_rows), slice(1, num_columns + 1))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        x = normal((num_rows, num_columns + 2), region, seed=1, name="w", std=1.0, dtype=torch.bfloat16)
    assert x.nbytes < peak_bytes(profiler) < x.nbytes + 10 * 2**20


@pytest.mark.parametrize(
    "region", [(slice(0, 3),), (slice(0, 3), slice(1, 6)), (slice(-1, 3), slice(0, 5)), (slice(0, 3), slice(0, 5, 2))]
)
def test_a_region_outside_the_tensor_is_refused(region):
    with pytest.raises(SpecError, match=r"does not lie in a tensor of shape \(3, 5\)[\s\S]*0 <= start <= stop <= size"):
        normal((3, 5), region, seed=1, name="w", std=1.0, dtype=torch.float32)


@pytest.mark.parametrize("hidden_size", [0, 1, 4, 10])
def test_keep_against_plain_python(hidden_size):
    tokens, seed, site, p = [[0, 7], [2**32 + 5, 2**63 - 1]], 2**63 + 12345, 2**32 - 2, 0.3
    kept = keep(torch.tensor(tokens), hidden_size, p, seed=seed, site=site)
    right = [
        [
            [
                python_philox([f // 4, t % 2**32, t >> 32, site], [seed % 2**32, seed >> 32])[f % 4] >= p * 2**32
                for f in range(hidden_size)
            ]
            for t in row
        ]
        for row in tokens
    ]
    assert kept.shape == (2, 2, hidden_size)
    assert kept.dtype == torch.bool
    assert kept.tolist() == right


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_keep_keeps_its_share_of_tokens_and_of_features(p):
    kept = keep(torch.arange(2**10), 2**8, p, seed=1, site=0).double()
    assert abs(float(kept.mean()) - (1 - p)) <= 5 * math.sqrt(p * (1 - p) / kept.numel())
    for dim, n in ((0, 2**10), (1, 2**8)):
        # The means over tokens, or over features, scatter as independent draws do.
        means, variance = kept.mean(dim), p * (1 - p) / n
        assert float((means - (1 - p)).abs().max()) <= 6 * math.sqrt(variance)
        assert abs(float(means.var()) - variance) <= 5 * variance * math.sqrt(2 / (len(means) - 1))


def test_keep_of_neighbouring_tokens_features_sites_and_seeds_does_not_correlate():
    tokens, options = torch.arange(2**10), {"seed": 1, "site": 0}
    kept = keep(tokens, 2**8, 0.3, **options)
    others = {
        "the next token": kept[1:],
        "the next feature": kept[:, 1:],
        "the next block": kept[:, 4:],
        "the token 2**32 on": keep(tokens + 2**32, 2**8, 0.3, **options),
        "another site": keep(tokens, 2**8, 0.3, seed=1, site=1),
        "another seed": keep(tokens, 2**8, 0.3, seed=2, site=0),
        "another high seed": keep(tokens, 2**8, 0.3, seed=1 + 2**32, site=0),
    }
    far = {name: correlation(kept[: y.shape[0], : y.shape[1]], y) for name, y in others.items()}
    assert all(0 < value < 5 for value in far.values()), far


def test_every_bit_is_set_half_of_the_time_and_every_byte_comes_alike_often():
    n = 2**16
    words = torch.stack(philox.philox(torch.arange(n), 0, torch.zeros(n, dtype=torch.int64), 0, key=(1, 0)))
    bits = words[..., None] >> torch.arange(32) & 1
    # 128 bits, each of binomial(n, 1/2): the squares of their deviations have chi-square with 128 degrees of freedom.
    deviations = (bits.sum(1) - n / 2) / math.sqrt(n / 4)
    assert abs(float((deviations**2).sum()) - 128) < 5 * math.sqrt(2 * 128)
    assert float(deviations.abs().max()) < 5
    for shift in (0, 8, 16, 24):
        counts, mean = torch.bincount((words >> shift & 255).flatten(), minlength=256), 4 * n / 256
        assert abs(float(((counts - mean) ** 2 / mean).sum()) - 255) < 5 * math.sqrt(2 * 255)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"p": 1.0}, r"dropout 1.0 is outside \[0, 1\)"),
        ({"p": -0.1}, r"dropout -0.1 is outside"),
        ({"p": math.nan}, r"dropout nan is outside"),
        ({"seed": -1}, r"seed -1 must be in \[0, 2\*\*64\) and site 0 in \[0, 2\*\*32\)"),
        ({"site": 2**32}, r"seed 1 must be .* and site 4294967296 in"),
    ],
)
def test_keep_refuses(change, words):
    given = {"p": 0.1, "seed": 1, "site": 0} | change
    with pytest.raises(SpecError, match=words):
        keep(torch.arange(3), 4, **given)


def test_a_large_weight_on_an_accelerator_is_made_by_few_launches():
    # 4,096 x 14,336 values are 3.5 times 2**24: 4 pieces or 5, of 10 rounds with 10 operators, and the transform.
    shape = (4096, 14336)
    with Launches() as seen:
        normal(shape, tuple(slice(0, n) for n in shape), seed=1, name="w", std=1.0, dtype=torch.float32, device="meta")
    assert seen.total <= 5 * 160
    assert 4 <= seen.counts["gather"] <= 5
