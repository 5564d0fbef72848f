"""Dense mask to bands: `attn_mask` of scaled_dot_product_attention -> `Mask`, if every query sees one range of keys.

    # . . . .    first key 0, 1 key      Successive rows form one band if the first keys are equal or advance by one per
    # # . . .    first key 0, 2 keys     row, and so do the last keys: here rows 0..1 (first key 0, last key on the
    . . # . .                            diagonal) and rows 2..4 (first key 2).
    . . # # .
    . . # # #

A row that sees no key is in no band.
"""

from collections.abc import Iterator

import numpy as np
import torch

from longspan.errors import SpecError
from longspan.plan import Mask
from longspan.plan import bands as algebra

Array = np.ndarray
_AS_A_MASK = "give a bool mask, True where a query sees a key, or a float mask of 0 and -inf"


def mask_of_dense(attn_mask: torch.Tensor, seq_len: int, expected: Mask | None = None) -> Mask:
    """Return the `Mask` of `attn_mask`, which broadcasts to `(..., S, S)` and is bool (True: visible) or 0 and -inf.

    Raises `SpecError` if `attn_mask` has other values, differs between batch rows or heads, or differs from the `expected`
    mask. Without `expected`, also if the visible keys of a query are not one contiguous range.
    """
    shape = tuple(attn_mask.shape)
    if len(shape) < 2 or any(size not in (1, seq_len) for size in shape[-2:]):
        raise SpecError(
            f"attn_mask must have shape (..., {seq_len}, {seq_len}), the pairs of the global sequence, not {shape}",
            hint="give the mask of the global sequence and leave the mask out of buffers, or set is_causal=True",
        )
    runs = _seen(attn_mask).expand(seq_len, seq_len)
    if expected is not None:
        if not torch.equal(runs.cpu(), torch.from_numpy(expected.dense())):
            raise SpecError(
                "attn_mask differs from the mask of context_parallel", hint="leave attn_mask out; mask= applies already"
            )
        return expected
    begins = runs[:, 0] + (runs[:, 1:] & ~runs[:, :-1]).sum(-1)
    if (several := int(begins.max())) > 1:
        raise SpecError(
            f"query {int(begins.argmax())} of attn_mask sees {several} separate ranges of keys: visible keys must be contiguous",
            hint="set mask=Mask.bands(seq_len, bands) of context_parallel, or call longspan.attention",
        )
    first = runs.view(torch.uint8).argmax(-1).cpu().numpy()
    return _merged(Mask.bands(seq_len, _bands(first, runs.sum(-1).cpu().numpy())))


def _merged(mask: Mask) -> Mask:
    bands = algebra.merge(mask.array, np.zeros(len(mask.array), dtype=np.int64))[0]
    return Mask.bands(mask.seq_len, [(q0, q1, k0, k1, lo, hi) for q0, q1, k0, k1, lo, hi in bands.tolist()])


def _seen(attn_mask: torch.Tensor) -> torch.Tensor:
    """Return the bool mask `(S or 1, S or 1)` that all batch rows and heads share, True where a query sees a key."""
    # In an expanded dim (stride 0), compare only the first index.
    different = [slice(None) if stride else slice(1) for stride in attn_mask.stride()[:-2]]
    parts = attn_mask.detach()[*different].reshape(-1, *attn_mask.shape[-2:])
    one = parts[0]
    if len(parts) > 1 and not bool((parts == one).all()):
        raise SpecError(
            f"attn_mask of shape {tuple(attn_mask.shape)} differs between batch rows or heads",
            hint="call attention once for each batch row, or concatenate the rows into one sequence (Mask.concat)",
        )
    if one.dtype == torch.bool:
        return one
    if not one.is_floating_point():
        raise SpecError(f"attn_mask is {one.dtype}", hint=_AS_A_MASK)
    seen, learned = one == 0, attn_mask.requires_grad
    if learned or not bool((seen | (one == float("-inf"))).all()):
        what = "a learned bias" if learned else "a bias, with values other than 0 and -inf"
        raise SpecError(
            f"attn_mask is {what}; longspan attention takes masks only",
            hint=_AS_A_MASK,
        )
    return seen


def _bands(first: Array, count: Array) -> Iterator[tuple[int, int, int, int, int | None, int | None]]:
    """Yield bands for rows that see `count` keys from key `first`. The first two rows of a band determine its shape."""
    last = first + count - 1
    begins, ends = np.diff(first), np.diff(last)
    steps = begins * 2 + ends  # 0..3 if each end stays or moves by one
    seen = (count[1:] > 0) & (count[:-1] > 0)
    steps[(begins >> 1 != 0) | (ends >> 1 != 0) | (first[1:] > last[:-1]) | ~seen] = -1
    turns = [*(np.flatnonzero(np.diff(steps)) + 1).tolist(), len(steps)]
    row, turn = 0, 0
    while row < len(first):
        while turns[turn] <= row < len(steps):
            turn += 1
        step = int(steps[row]) if row < len(steps) else -1
        stop = row + 1 if step < 0 else turns[turn] + 1
        if count[row]:
            begin, end = int(first[row]), int(last[row])
            lo, hi = (row - end if step in (1, 3) else None), (row - begin if step in (2, 3) else None)
            yield row, stop, begin, int(last[stop - 1]) + 1, lo, hi
        row = stop
