"""The mask of a packed row, from the lengths and parents of its documents."""

from collections.abc import Sequence

import numpy as np

from longspan.plan import Mask
from longspan.plan.mask import Band


def documents_mask(lengths: Sequence[int], parents: Sequence[int] = (), window: int | None = None) -> Mask:
    """Return a mask that is causal within each document, and full from a document to its parent.

    `parents[n]` is the document that document n sees as well, or -1 for none. Default: no document has a parent. One
    parent of all other documents gives `Mask.shared_prefix`. `window` counts positions, which continue from the
    parent's end: tokens between a document and its parent on the token axis are added to the bound of `i - j`.
    """
    mask = Mask.documents(lengths, window=window)
    if not parents:
        return mask
    stops = np.cumsum(lengths).tolist()
    bands: list[Band] = [tuple(band) for band in mask.array.tolist()]
    for stop, length, parent in zip(stops, lengths, parents, strict=True):
        if parent >= 0:
            start, seen = stop - length, stops[parent]
            hi = None if window is None else window - 1 + start - seen
            bands.append((start, stop, seen - lengths[parent], seen, None, hi))
    return Mask.bands(stops[-1], bands)
