"""A causal language model of transformers as a frozen record: its type, its configuration, and what a run changes of its RoPE.

Imports nothing of plan/ or cp/. transformers is imported when a number of the model is first read.
"""

import json
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from longspan.errors import SpecError
from longspan.model.model_config import RopeScaling

CONFIG = "config.json"
_VARYING = {"transformers_version", "dtype", "torch_dtype", "_name_or_path", "_attn_implementation", "use_cache"}
"""Entries of a configuration that do not change the model."""


class RopeChanges(BaseModel):
    """Changes of the rotary embedding, for contexts longer than those of the folder a run starts from."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    rope_theta: float | None = Field(default=None, gt=0.0)
    """Base of the rotary frequencies. Default: that of the model."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies: kind "linear", "yarn" or "llama3" with its numbers. Default: that of the model."""
    max_position_embeddings: int | None = Field(default=None, gt=0)
    """Entry of the exported config.json. Default: the largest of the model's own, that of `rope_scaling`, and `data.seq_len`."""


class FolderChanges(RopeChanges):
    """What a run changes of the model in the folder `init_from`."""

    implementation: Literal["auto", "longspan", "transformers"] = "auto"
    """Code that computes the model: longspan's decoder, or the model's class in transformers.
    Default: longspan's decoder for the folders that it reads, else transformers."""


class TransformersConfig(RopeChanges):
    """A causal language model of transformers, by its type and the entries of its configuration.

    Raises `SpecError` when its numbers are first read: an unknown type or entry, a value that transformers refuses.
    """

    model_type: str
    """Type of the model, such as "qwen3": `model_type` of a config.json."""
    config: dict[str, Any] = {}
    """Entries of config.json, such as hidden_size. Default of each: that of transformers."""
    folder: Path | None = Field(default=None, exclude=True)
    """Folder that `config` was read from."""

    @cached_property
    def resolved(self) -> Any:
        """The configuration object of transformers, with the changes of RoPE."""
        config = _made(self.model_type, self.config, strict=self.folder is None)
        _change_rope(config.get_text_config(), self)
        return config

    @cached_property
    def text(self) -> Any:
        """The part of the configuration that describes the text decoder."""
        return self.resolved.get_text_config()

    @property
    def vocab_size(self) -> int:
        """Number of rows of the embedding."""
        return int(self.text.vocab_size)

    @property
    def hidden_size(self) -> int:
        """Number of features of a token between layers."""
        return int(self.text.hidden_size)

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return int(self.text.num_hidden_layers)

    @property
    def heads(self) -> tuple[int, int] | None:
        """(query heads, KV heads) of every layer as the configuration gives them, or None."""
        heads = getattr(self.text, "num_attention_heads", None)
        kv_heads = getattr(self.text, "num_key_value_heads", None) or heads
        return (heads, kv_heads) if isinstance(heads, int) and isinstance(kv_heads, int) else None

    @property
    def head_dim(self) -> int | None:
        """Dimension of a head, or None if the configuration does not give one for keys and values alike."""
        if getattr(self.text, "kv_lora_rank", None) or self.heads is None:
            return None
        return int(getattr(self.text, "head_dim", None) or self.hidden_size // self.heads[0])

    @property
    def router_loss(self) -> float:
        """Coefficient of the router's load-balancing loss; 0 unless the configuration sets `output_router_logits`."""
        on = getattr(self.text, "output_router_logits", False)
        return float(getattr(self.text, "router_aux_loss_coef", 0.0)) if on else 0.0

    @cached_property
    def multiplying_parameters(self) -> int:
        """Number of parameters that multiply each token: see `longspan.model.transformers_model.multiplying_parameters`."""
        from longspan.model.transformers_model import multiplying_parameters  # loads torch

        return multiplying_parameters(self)

    def entries(self) -> dict[str, Any]:
        """Return the entries of the configuration that determine the model, as plain values."""
        given: dict[str, Any] = json.loads(self.resolved.to_json_string(use_diff=False))
        return {key: value for key, value in given.items() if key not in _VARYING}


def read_transformers_config(folder: Path, changes: RopeChanges) -> TransformersConfig:
    """Read the record of a folder from its config.json. Raises `SpecError` for a file that is missing or no configuration."""
    entries = read_entries(folder)
    if not isinstance(entries.get("model_type"), str):
        raise SpecError(
            f"{folder / CONFIG} has no model_type", hint="give a folder written by save_pretrained of transformers"
        )
    return TransformersConfig(
        model_type=entries["model_type"],
        config=entries,
        folder=folder,
        rope_theta=changes.rope_theta,
        rope_scaling=changes.rope_scaling,
        max_position_embeddings=changes.max_position_embeddings,
    )


def max_positions(own: int, changes: RopeChanges, longest: int) -> int:
    """Return `max_position_embeddings` of an export: `own` is that of the model, `longest` the longest row of the run."""
    stated = changes.rope_scaling.max_positions(own) if changes.rope_scaling else 0
    return changes.max_position_embeddings or max(own, stated, longest)


def read_entries(folder: Path) -> dict[str, Any]:
    """Read the entries of a folder's config.json. Raises `SpecError` for a file that is missing or not a JSON object."""
    file = folder / CONFIG
    if not file.is_file():
        raise SpecError(f"{folder} has no {CONFIG}", hint="give a folder written by save_pretrained of transformers")
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SpecError(f"{file} is not JSON: {error}", hint="complete the download") from None
    if not isinstance(entries, dict):
        raise SpecError(f"{file} holds a {type(entries).__name__}, not an object", hint="complete the download")
    return entries


def _made(model_type: str, entries: dict[str, Any], *, strict: bool) -> Any:
    """Make the configuration object. `strict`: refuse entries that this type of model does not read."""
    try:
        from transformers import CONFIG_MAPPING
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
    except ImportError:
        raise SpecError(
            f"model_type {model_type!r} is computed by transformers, which is not installed",
            hint="pip install 'longspan[hf]'",
        ) from None

    if model_type not in CONFIG_MAPPING or model_type not in CAUSAL:
        raise SpecError(
            f"model_type {model_type!r} is not a causal language model of the installed transformers",
            hint='use a type of AutoModelForCausalLM, such as "qwen3"; or install a newer transformers',
        )
    kind = CONFIG_MAPPING[model_type]
    if strict:
        default = kind()
        known = {"head_dim", *kind.attribute_map}  # models read head_dim, though some configurations do not list it
        unknown = sorted(key for key in entries if not hasattr(default, key) and key not in known)
        if unknown:
            raise SpecError(
                f"model.config has entries that {kind.__name__} does not read: {', '.join(unknown)}",
                hint="use the entries of a config.json of this model_type",
            )
    try:
        return kind.from_dict(dict(entries))
    except Exception as error:  # the checks of each configuration class raise their own types
        raise SpecError(
            f"the configuration of model_type {model_type!r} is not valid: {' '.join(str(error).split())}",
            hint="correct these entries of model.config, or of config.json",
        ) from error


def _change_rope(text: Any, changes: RopeChanges) -> None:
    """Set the changed RoPE in a configuration, in the layers of full attention if each kind of layer has its own."""
    if changes.rope_theta is None and changes.rope_scaling is None:
        return
    rope = getattr(text, "rope_parameters", None)
    if not isinstance(rope, dict):
        raise SpecError(
            f"model.rope_theta or model.rope_scaling is given, but {type(text).__name__} has no rotary embedding",
            hint="remove these keys",
        )
    nested = all(isinstance(value, dict) for value in rope.values())
    if nested and "full_attention" not in rope:
        raise SpecError(
            f"model.rope_theta or model.rope_scaling is given, but {type(text).__name__} has a RoPE for each of {sorted(rope)}",
            hint="change rope_parameters in config.json",
        )
    own = dict(rope["full_attention"] if nested else rope)
    if changes.rope_scaling is not None:
        own = {"rope_theta": own.get("rope_theta"), **changes.rope_scaling.transformers_entries()} | {
            key: own[key] for key in ("partial_rotary_factor",) if key in own
        }
    if changes.rope_theta is not None:
        own["rope_theta"] = changes.rope_theta
    text.rope_parameters = rope | {"full_attention": own} if nested else own
