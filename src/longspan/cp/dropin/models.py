"""Models of transformers inside `context_parallel`: refused by their configuration, when a module is called.

    sliding_window, attention_chunk_size      left out if they cover a shard, else turned into a mask of a shard
    one mask= for full and windowed layers    would be right for one kind only
    eager attention                           hidden from the interception of SDPA
    recurrent, convolution, sparse layers     see no earlier rank
    dynamic and longrope rotation             from the longest position of a shard

transformers is not imported here: a configuration exists only if the program has imported it.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from longspan.cp.dropin.local import HF_WAY_OUT
from longspan.errors import SpecError
from longspan.plan import Mask

Problem = tuple[str, str] | None
"""What a module has that does not fit, and the way out."""
_FULL, _SLIDING, _CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
_OF_TOKENS = {_FULL, _SLIDING, _CHUNKED, "dense", "sparse", "moe"}
"""Layer types that mix tokens by full, windowed or chunked attention only, or not at all."""


@contextmanager
def checked_models(seq_len: int, mask: Mask | None) -> Iterator[None]:
    """Raise `SpecError` when this thread calls a module of transformers that cannot run on a shard."""
    thread, checked = get_ident(), dict[int, Any]()

    def check(module: nn.Module, _: Any) -> None:
        config = module.__dict__.get("config")
        if config is None or id(config) in checked or get_ident() != thread:
            return
        checked[id(config)] = config  # held, so that no other configuration gets its id
        if isinstance(config, _transformers("configuration_utils", "PreTrainedConfig")) and _reads_text(module):
            check_model(module, _text_config(config), seq_len, mask)

    hook = register_module_forward_pre_hook(check)
    try:
        yield
    finally:
        hook.remove()


def check_model(module: nn.Module, config: Any, seq_len: int, mask: Mask | None) -> None:
    """Raise `SpecError` if the text configuration `config` of a module does not fit plain SDPA on a shard."""
    for problem in (_recurrence, _window, _chunk, _rotation, _eager):
        if (text := problem(module, config, seq_len, mask)) is not None:
            has, way_out = text
            raise SpecError(f"{type(module).__name__} {has}", hint=way_out)


def _transformers(module: str, name: str) -> Any:
    return getattr(sys.modules.get(f"transformers.{module}"), name, ())


def _reads_text(module: nn.Module) -> bool:
    return "text" in getattr(module, "input_modalities", "text")


def _text_config(config: Any) -> Any:
    try:
        return config.get_text_config()
    except ValueError:  # several: each is checked when its own model is called
        return config


def _kinds(config: Any) -> set[str]:
    """Kinds of the layers, deduced if `layer_types` is missing, as transformers does."""
    if types := getattr(config, "layer_types", None):
        return set(types)
    if getattr(config, "attention_chunk_size", None):
        return {_FULL, _CHUNKED}
    return {_SLIDING if getattr(config, "sliding_window", None) else _FULL}


def _recurrence(module: nn.Module, config: Any, seq_len: int, mask: Mask | None) -> Problem:
    others = sorted(_kinds(config) - _OF_TOKENS)
    if not others and (not getattr(module, "_is_stateful", False) or getattr(config, "layer_types", None)):
        return None
    layers = f"layers of type {', '.join(others)}" if others else "recurrent layers"
    return f"has {layers}, which would see one rank's tokens only", _check(seq_len)


def _window(module: nn.Module, config: Any, seq_len: int, mask: Mask | None) -> Problem:
    kinds, window = _kinds(config), getattr(config, "sliding_window", None)
    if _SLIDING not in kinds or not window or window >= seq_len:
        return None
    has = f"has windows of {window} tokens (sliding_window)"
    if mask is None:
        return f"{has}, which would apply to one rank's tokens, not to the {seq_len} of the sequence", HF_WAY_OUT
    if (reach := int(mask.array[:, 5].max())) >= window:
        return f"{has}, but mask= lets queries see keys {reach} tokens back", HF_WAY_OUT
    if _FULL in kinds and _is_windowed(mask):
        return f"{has} in some layers only, but the window of mask= applies to all layers", HF_WAY_OUT
    return None


def _is_windowed(mask: Mask) -> bool:
    _, q1, k0, _, _, hi = mask.array.T
    return bool((hi < q1 - 1 - k0).any())


def _chunk(module: nn.Module, config: Any, seq_len: int, mask: Mask | None) -> Problem:
    chunk = getattr(config, "attention_chunk_size", None)
    if _CHUNKED not in _kinds(config) or not chunk or chunk >= seq_len:
        return None
    has = f"has chunks of {chunk} tokens (attention_chunk_size)"
    return f"{has}, which would apply to one rank's tokens, not to the {seq_len} of the sequence", HF_WAY_OUT


def _rotation(module: nn.Module, config: Any, seq_len: int, mask: Mask | None) -> Problem:
    """Rotation whose frequencies depend on the longest position, if the sequence is longer than the original one."""
    rope = getattr(config, "rope_parameters", None) or {}
    for entry in (rope, *rope.values()):
        kind = entry.get("rope_type") if isinstance(entry, dict) else None
        if kind is not None and ("dynamic" in kind or kind == "longrope"):
            original = "original_max_position_embeddings"
            limit = entry.get(original) or getattr(config, original, None) or config.max_position_embeddings
            if limit < seq_len:
                has = (
                    f"has rope_type {kind!r}, whose frequencies beyond {limit} tokens depend on a rank's last position"
                )
                return has, 'choose a rope_type of fixed frequencies, such as "yarn"'
    return None


def _eager(module: nn.Module, config: Any, seq_len: int, mask: Mask | None) -> Problem:
    if getattr(config, "_attn_implementation", None) != "eager":
        return None
    has = "computes attention by hand (attn_implementation 'eager'), over one rank's tokens only"
    return has, f"{HF_WAY_OUT}; {_check(seq_len)}"


def _check(seq_len: int) -> str:
    return f"longspan.hf.check(model, seq_len={seq_len}) says whether longspan can run this model"
