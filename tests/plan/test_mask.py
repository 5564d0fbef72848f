"""Each constructor against its definition, pair by pair."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.errors import SpecError
from longspan.plan import Layout, Mask
from tests.examples import examples

from .strategies import defined_masks

thorough = examples(300)


@thorough
@given(defined_masks(high=24))
def test_each_constructor_is_its_definition(defined):
    mask, sees = defined
    S = mask.seq_len
    right = np.array([[bool(sees(i, j)) for j in range(S)] for i in range(S)])
    assert np.array_equal(mask.dense(), right)
    assert mask.area == right.sum()


@thorough
@given(st.lists(defined_masks(high=10).map(lambda pair: pair[0]), min_size=1, max_size=4))
def test_concat_is_block_diagonal(masks):
    joined = Mask.concat(masks)
    right = np.zeros((joined.seq_len, joined.seq_len), dtype=bool)
    offset = 0
    for mask in masks:
        stop = offset + mask.seq_len
        right[offset:stop, offset:stop] = mask.dense()
        offset = stop
    assert offset == joined.seq_len
    assert np.array_equal(joined.dense(), right)
    assert joined.area == right.sum() == sum(mask.area for mask in masks)


@pytest.mark.parametrize(
    ("mask", "right"),
    [
        (Mask.causal(4), ["#...", "##..", "###.", "####"]),
        (Mask.causal(4, window=2), ["#...", "##..", ".##.", "..##"]),
        (Mask.full(2), ["##", "##"]),
        (Mask.documents([3, 2]), ["#....", "##...", "###..", "...#.", "...##"]),
        (Mask.documents([2, 2], causal=False), ["##..", "##..", "..##", "..##"]),
        (Mask.documents([4], causal=False, window=2), ["##..", "###.", ".###", "..##"]),
        (Mask.prefix(4, 2), ["##..", "##..", "###.", "####"]),
        (Mask.shared_prefix(2, [1, 2]), ["#....", "##...", "###..", "##.#.", "##.##"]),
        (Mask.bands(3, [(0, 1, 2, 3, None, None), (1, 3, 0, 2, 1, None)]), ["..#", "#..", "##."]),
    ],
)
def test_drawn_by_hand(mask, right):
    assert ["".join(".#"[int(seen)] for seen in row) for row in mask.dense()] == right


def test_zero_length_documents_are_harmless():
    bare, with_zeros = Mask.documents([4, 4]), Mask.documents([0, 4, 0, 0, 4, 0])
    assert bare == with_zeros
    assert bare.fingerprint() == with_zeros.fingerprint()
    assert Mask.shared_prefix(3, [0, 2, 0]) == Mask.shared_prefix(3, [2])


def test_area_needs_no_dense_mask():
    assert Mask.causal(1 << 20).area == (1 << 19) * ((1 << 20) + 1)
    assert Mask.causal(1 << 20, window=4096).area == 4096 * 4097 // 2 + ((1 << 20) - 4096) * 4096


def test_the_same_pairs_by_other_ways_are_equal():
    assert Mask.causal(8) == Mask.documents([8]) == Mask.bands(8, [(0, 8, 0, 8, 0, None)]) == Mask.prefix(8, 0)
    assert Mask.causal(8, window=8) == Mask.causal(8) == Mask.causal(8, window=99)
    assert hash(Mask.causal(8)) == hash(Mask.documents([8]))
    assert Mask.causal(8) != Mask.causal(9)
    assert Mask.causal(8) != Mask.full(8)
    assert Mask.causal(8) != "causal"


def test_a_mask_may_hide_everything():
    nothing = Mask.bands(5, [])
    assert nothing.area == 0
    assert not nothing.dense().any()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: Mask.bands(8, [(0, 8, 0, 8, 0, None), (4, 8, 2, 8, 0, 3)]),
            "bands (0, 8, 0, 8, 0, 7) and (4, 8, 2, 8, 0, 3) (q_start, q_stop, k_start, k_stop, lo, hi) share a "
            "query-key pair\n\nhint: make the bands disjoint: end one band where the other begins",
        ),
        (
            lambda: Mask.bands(8, [(0, 9, 0, 8, None, None)]),
            "band queries 0..9, keys 0..8 does not lie within 0..8",
        ),
        (lambda: Mask.bands(8, [(3, 2, 0, 8, None, None)]), "band queries 3..2, keys 0..8 does not lie within 0..8"),
        (lambda: Mask.full(0), "seq_len=0: a mask covers at least one token"),
        (lambda: Mask.documents([]), "seq_len=0: a mask covers at least one token"),
        (lambda: Mask.concat([]), "seq_len=0: a mask covers at least one token"),
        (
            lambda: Mask.causal(4, window=0),
            "window=0 is below 1: a query sees at least itself\n\nhint: use window=None for no window",
        ),
        (lambda: Mask.documents([3, -1]), "document lengths [3, -1] include a negative length"),
        (lambda: Mask.prefix(4, 5), "prefix_len=5 is not within 0..4"),
        (
            lambda: Mask.shared_prefix(2, [1, -1]),
            "prompt_len=2, response_lens=[1, -1]: lengths must not be negative",
        ),
    ],
)
def test_refusals(make, text):
    with pytest.raises(SpecError) as error:
        make()
    assert str(error.value) == text


def test_touching_bands_are_not_an_overlap():
    split = Mask.bands(8, [(0, 8, 0, 8, 0, 3), (0, 8, 0, 8, 4, None)])
    assert np.array_equal(split.dense(), Mask.causal(8).dense())


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Mask.documents([5.5, 3]), r"document lengths \[5.5, 3\] are not integers in 1 dim"),
        (lambda: Mask.documents([[2, 3], [4, 5]]), "are not integers in 1 dim"),
        (lambda: Mask.documents("ab"), "document lengths 'ab' are not integers in 1 dim"),
        (lambda: Mask.causal(8.7), r"document lengths \[8.7\] are not integers"),
        (lambda: Mask.causal(8, window=2.5), "window=2.5 is not an integer"),
        (lambda: Mask.bands(8, [(0, 8, 0, 8, 0.5, None)]), "are not integers in 2 dims"),
        (lambda: Layout.zigzag(1000.5, 2), "seq_len=1000.5 is not an integer"),
    ],
)
def test_nothing_is_rounded_to_tokens(make, text):
    with pytest.raises(SpecError, match=text):
        make()
