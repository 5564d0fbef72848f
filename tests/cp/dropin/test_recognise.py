"""Dense masks as bands: what the bands say is what was given; what no bands say is refused (the texts: `test_dropin`)."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longspan.cp.dropin.recognise import mask_of_dense
from longspan.errors import SpecError
from longspan.plan import Mask


@st.composite
def runs(draw):
    """Bool `(S, S)`, one run of keys a row, whose ends mostly stay or move with the row."""
    size = draw(st.integers(1, 12))
    seen, first, stop = np.zeros((size, size), dtype=bool), 0, 1
    for row in range(size):
        first = draw(st.sampled_from([first, first, first + 1, row]) | st.integers(0, size))
        stop = draw(st.sampled_from([stop, stop + 1, stop + 1, row + 1, size]) | st.integers(0, size))
        seen[row, first:stop] = True
    return seen


@given(runs())
def test_bands_say_what_the_mask_says(seen):
    dense = torch.from_numpy(seen)
    added = torch.zeros(dense.shape).masked_fill(~dense, float("-inf"))
    for given_mask in (dense, added[None].expand(3, -1, -1)):
        assert (mask_of_dense(given_mask, len(seen)).dense() == seen).all()


@pytest.mark.parametrize(
    ("mask", "bands"),
    [
        (Mask.causal(30), 1),
        (Mask.full(30), 1),
        (Mask.causal(30, window=7), 1),
        (Mask.documents([4, 9, 17]), 3),
        (Mask.documents([4, 9, 17], causal=False), 3),
        (Mask.documents([4, 1, 9, 16], window=3), 4),
        (Mask.prefix(30, 11), 2),
        (Mask.bands(30, []), 0),
    ],
)
def test_as_few_bands_as_there_are(mask, bands):
    found = mask_of_dense(torch.from_numpy(mask.dense()), mask.seq_len)
    assert len(found.array) == bands
    assert found.area == mask.area


def test_any_mask_that_is_expected():
    shared = Mask.shared_prefix(5, [4, 3])
    dense = torch.from_numpy(shared.dense())
    assert mask_of_dense(dense, 12, shared) is shared
    for wrong in (dense.clone(), dense & False):
        wrong[11, 5] = True
        with pytest.raises(SpecError, match="attn_mask differs from the mask of context_parallel"):
            mask_of_dense(wrong, 12, shared)
    with pytest.raises(SpecError, match="query 9 of attn_mask sees 2 separate ranges of keys"):
        mask_of_dense(dense, 12)


def test_masks_that_broadcast():
    keys = torch.arange(6) < 4
    assert mask_of_dense(keys[None], 6) == Mask.bands(6, [(0, 6, 0, 4, None, None)])
    assert mask_of_dense(keys[:, None], 6) == Mask.bands(6, [(0, 4, 0, 6, None, None)])
    assert mask_of_dense(torch.ones(1, 1, dtype=torch.bool), 6) == Mask.full(6)
    with pytest.raises(SpecError, match=r"attn_mask must have shape \(\.\.\., 6, 6\), .* not \(6,\)"):
        mask_of_dense(keys, 6)
