"""Rows (B, S) as loops of transformers give them, as the documents of a `Batch`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from longspan.data import Batch
from longspan.errors import SpecError

_REDUNDANT = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
"""Keys of collators that repeat what `position_ids` say."""
_KEYS = {"input_ids", "labels", "attention_mask", "position_ids", "token_type_ids"}


@dataclass(frozen=True)
class Rows:
    """A batch, the place of each of its tokens in the rows, and whether it has labels."""

    batch: Batch
    real: npt.NDArray[np.bool_]
    """(B, S), True at a token of the batch, False at padding."""
    labelled: bool = True
    image: npt.NDArray[np.bool_] | None = None
    """(S,), True at an image token, which sees the whole run of image tokens that it is in."""

    @property
    def digest(self) -> bytes:
        """Digest of all contents, the same on every rank that read the same rows."""
        return self.batch.digest() + (b"" if self.image is None else np.packbits(self.image).tobytes())


def rows_of(given: Batch | Mapping[str, Any]) -> Rows:
    """Flatten rows to documents. Raises `SpecError` for a key or shape that has no meaning on a sharded sequence."""
    if isinstance(given, Batch):
        return Rows(given, np.ones((1, given.seq_len), np.bool_))
    held = {name: _array(value) for name, value in given.items() if value is not None}
    unknown = sorted(held.keys() - _KEYS - (_REDUNDANT if "position_ids" in held else set()))
    if unknown or "input_ids" not in held:
        raise SpecError(
            f"the batch holds {', '.join(map(repr, unknown)) or 'no input_ids'}; "
            "a batch is input_ids, labels, and attention_mask or position_ids, of whole rows",
            hint=_WAYS_OUT.get(
                unknown[0] if unknown else "", "leave other keys out, or give them to the model beside seq.inputs"
            ),
        )
    ids = held["input_ids"]
    labels, mask, positions = held.get("labels"), held.get("attention_mask"), held.get("position_ids")
    if mask is not None and mask.ndim != 2:
        raise SpecError(
            f"attention_mask of shape {mask.shape}: a dense mask of the whole sequence would take its square in memory",
            hint="give a 2-D attention_mask of padding, or position_ids that restart at 0 in every document",
        )
    if positions is None or (mask is not None and not mask.all()):
        real = np.ones(ids.shape, np.bool_) if mask is None else mask != 0
        batch = Batch.from_padded(ids, real, labels=labels)
        if positions is not None and (positions[real] != batch.position_ids).any():
            raise SpecError(
                "position_ids of padded rows do not count the tokens of each row from 0",
                hint="leave position_ids out, or give packed rows without padding",
            )
    else:
        real, batch = np.ones(ids.shape, np.bool_), Batch.from_positions(ids, positions, labels=labels)
    types = held.get("token_type_ids")
    return Rows(batch, real, labels is not None, None if types is None else types[real] == 1)


_WAYS_OUT = {
    "logits_to_keep": "select logits by seq.unshard(out.logits, positions=...)",
    "shift_labels": "give labels as the collator makes them, not shifted: they are shifted here, on the whole row",
    "inputs_embeds": "give input_ids",
    "past_key_values": "run generation outside hf.sequence",
    "cu_seq_lens_q": "give position_ids that restart at 0 in every document",
}


def _array(value: Any) -> npt.NDArray[Any]:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
