"""The attention function and the mask function that transformers calls under the name "longspan".

    model.forward   -> mask function       once for each kind of mask -> `SequenceMask`
    each layer      -> attention function  q, k, v, that `SequenceMask` -> attention over the whole sequence

transformers hands whatever the mask function returns to every layer, so that backward, recomputation and compiled code
find the sequence in their own arguments. Outside `hf.sequence`, both functions are those of `attn_implementation="sdpa"`.
"""

import sys
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from longspan.cp.attention import attend
from longspan.cp.context import is_sharded_run
from longspan.errors import SpecError
from longspan.hf.keywords import KNOWN_KEYWORDS
from longspan.hf.mask_kinds import kind_of

if TYPE_CHECKING:
    from longspan.hf.model_sequence import Sequence, SequenceMask

Tensor = torch.Tensor

NAME = "longspan"


class _Open(threading.local):
    sequence: "Sequence | None" = None


_open = _Open()


def register() -> None:
    """Register the name in transformers' attention and mask interfaces."""
    AttentionInterface.register(NAME, attention_function)
    AttentionMaskInterface.register(NAME, mask_function)


def open_sequence() -> "Sequence | None":
    """Return the sequence whose `with` block this thread is in."""
    return _open.sequence


def enter(sequence: "Sequence | None") -> None:
    """Make a sequence, or none, the one whose `with` block this thread is in."""
    _open.sequence = sequence


def mask_function(**call: Any) -> "Tensor | SequenceMask | None":
    """Return the open sequence's mask of the kind that the call requests, or outside a sequence that of "sdpa"."""
    sequence = _open.sequence
    if sequence is None:
        return sdpa_mask(**call)
    return sequence.mask(kind_of(**call))


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: "Tensor | SequenceMask | None",
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' attention functions do: q (B, H, T, D), k (B, K, T, D), v (B, K, T, Dv) -> (B, T, H, Dv).

    `s_aux`, `sinks`: the learnable logit of each head in the softmax denominator, by either of its names.
    """
    if attention_mask is None or isinstance(attention_mask, Tensor):
        _refuse_within_a_run(module)
        named = {"softcap": softcap, "s_aux": s_aux, "sinks": sinks}
        scores = {name: change for name, change in named.items() if change is not None}
        options = others | {"dropout": dropout, "scaling": scaling}
        return _plain(module, query, key, value, attention_mask, scores, options)
    if dropout:
        raise SpecError(
            f"{type(module).__name__} has attention dropout {dropout}, which longspan attention does not have",
            hint="set attention_dropout=0.0 in the model's configuration",
        )
    for name, keyword in others.items():
        if keyword is not None and name not in KNOWN_KEYWORDS:
            raise SpecError(
                f"{type(module).__name__} passed {name}= to its attention, which may select keys or change scores",
                hint="this model cannot be run under context parallelism; hf.check(model, seq_len=...) says so before a run",
            )
    sink = s_aux if sinks is None else sinks
    ref = attention_mask.share(query.shape[1], key.shape[1])
    out = attend(query, key, value, ref, scaling, None if sink is None else sink.to(query.dtype), softcap)
    return out.transpose(1, 2).contiguous(), None  # some models take views of it


def _refuse_within_a_run(module: nn.Module) -> None:
    """Raise `SpecError` where this attention would see only the tokens of this rank's shard."""
    if _open.sequence is not None:
        raise SpecError(
            f"{type(module).__name__} calls attention without the mask of this sequence",
            hint='give only the text model to longspan, as in attn_implementation={"": "sdpa", "text_config": "longspan"}',
        )
    if module.training and is_sharded_run():
        raise SpecError(
            f"{type(module).__name__} attends outside hf.sequence, in training, in a run with context parallelism",
            hint="call the model as model(**seq.inputs) within `with hf.sequence(cp, model, batch) as seq`; "
            "or model.eval() for whole sequences on this rank",
        )


def _plain(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scores: dict[str, Any],
    options: dict[str, Any],
) -> tuple[Tensor, None]:
    """Attend on this rank alone, by SDPA, or by the model's own eager attention for changes of `scores`, which SDPA lacks."""
    if not scores:
        out: Tensor = sdpa_attention_forward(module, query, key, value, attention_mask, **options)[0]
        return out, None
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise SpecError(
            f"{type(module).__name__} passed {', '.join(scores)}, which SDPA does not compute, outside hf.sequence",
            hint='set model.set_attn_implementation("eager") for evaluation and generation',
        )
    seen = attention_mask
    if seen is None and query.shape[2] > 1:
        seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    if seen is not None and seen.dtype == torch.bool:
        seen = torch.zeros_like(seen, dtype=query.dtype).masked_fill(~seen, torch.finfo(query.dtype).min)
    weights = eager(module, query, key, value, seen, **scores, **options)
    return weights[0], None
