"""The mask of a packed row, from the lengths of its documents and the parent of each."""

from collections.abc import Sequence

import numpy as np

from longspan.plan import Mask
from longspan.plan.mask import Band


def documents_mask(lengths: Sequence[int], parents: Sequence[int] = (), window: int | None = None) -> Mask:
    """Causal within each document, and full from a document to its parent, as `Mask.shared_prefix` is for one prompt.

    `parents[n]` is the document that document n sees as well, or -1; empty: none. A `window` counts positions. Positions of a
    document and its parent are nearer than their places on the token axis, by the tokens between the two, so the bound of
    `i - j` is farther by as many.
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
