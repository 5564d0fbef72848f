"""The kinds of mask that a model asks for, and the mask of each over packed documents.

create_causal_mask                        full                every earlier token of the document
create_sliding_window_causal_mask         window-4096         the latest 4,096 of these
create_chunked_causal_mask                chunk-8192          those of the same chunk of the document
create_bidirectional_mask                 bidirectional       every token of the document
create_bidirectional_sliding_window_mask  both-sides-512      those at most 512 tokens away
any of these with an overlay of its own   overlay             unknown
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from longspan.advise.planner import documents_mask
from longspan.errors import SpecError
from longspan.names import CHUNK, mask_name, window_of
from longspan.plan import Mask
from longspan.plan.mask import Band

Flags = npt.NDArray[np.bool_]

FULL, BIDIRECTIONAL, OVERLAY = "full", "bidirectional", "overlay"
_BOTH_SIDES = "both-sides-"


def kind_of(
    config: Any,
    *,
    mask_function: Callable[..., Any] | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = False,
    allow_is_bidirectional_skip: bool = False,
    **_: Any,
) -> str:
    """Return the kind of mask that a model requests by these keywords of a mask function of transformers.

    Holds for calls with a 2-D `attention_mask` and without a cache. Otherwise transformers adds documents of its own.
    """
    if allow_is_bidirectional_skip:
        return BIDIRECTIONAL if local_size is None else f"{_BOTH_SIDES}{local_size}"
    if not allow_is_causal_skip:
        return OVERLAY
    if local_size is None:
        return FULL
    chunked = getattr(config, "attention_chunk_size", None) == local_size
    if chunked and getattr(config, "sliding_window", None) == local_size and mask_function is not None:
        query = torch.tensor(local_size)  # the first token of the second chunk sees the token before in a window alone
        chunked = not bool(mask_function(torch.tensor(0), torch.tensor(0), query, query - 1))
    return f"{CHUNK}{local_size}" if chunked else mask_name(local_size)


def mask_of(kind: str, lengths: Sequence[int], image: Flags | None = None) -> Mask:
    """Make the mask of a kind over documents of these lengths.

    `image` (S,): in "full" and "window", a token of a run of image tokens also sees the later tokens of its run (Gemma 3).
    """
    if image is not None and image.any():
        return _with_blocks(kind, lengths, image)
    if kind.startswith(_BOTH_SIDES):
        return Mask.documents(lengths, causal=False, window=int(kind.removeprefix(_BOTH_SIDES)) + 1)
    if kind == BIDIRECTIONAL:
        return Mask.documents(lengths, causal=False)
    return documents_mask(kind, lengths)


def _with_blocks(kind: str, lengths: Sequence[int], image: Flags) -> Mask:
    if kind.startswith((CHUNK, _BOTH_SIDES, BIDIRECTIONAL)):
        raise SpecError(f"token_type_ids mark image tokens, which a {kind!r} mask does not have", hint="leave them out")
    hi = None if (window := window_of(kind)) is None else window - 1
    bands: list[Band] = []
    stop = 0
    for length in lengths:
        start, stop = stop, stop + length
        turns = np.flatnonzero(np.diff(image[start:stop])) + 1 + start
        for first, last in pairwise([start, *turns.tolist(), stop]):
            bands.append((first, last, start, last, None if image[first:last].any() else 0, hi))
    return Mask.bands(stop, bands)


def kinds_of_layers(config: Any) -> dict[str, int]:
    """Return kind -> number of layers, as the configuration states them.

    Only the balance of a layout depends on it. The masks are those that the model requests.
    """
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    types = getattr(config, "layer_types", None)
    if not types:
        uses_window = isinstance(window, int) and getattr(config, "use_sliding_window", True)
        return {mask_name(window if uses_window else None): config.num_hidden_layers}
    kinds = [
        f"{CHUNK}{chunk}" if "chunk" in name and chunk else mask_name(window if "sliding" in name else None)
        for name in types
    ]
    return {kind: kinds.count(kind) for kind in kinds}
