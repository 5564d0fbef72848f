"""Cut a run to fewer layers and shorter rows, so that its CP=1 baseline fits on one rank.

The cut keeps all that CP affects: hidden size, heads, vocabulary, every kind of mask, degrees, layout, route, kernel, dtypes.
It removes repetitions: layers with the same mask, and tokens beyond the number that each window needs to mask some.
"""

from collections.abc import Sequence
from typing import Any

from longspan.errors import SpecError
from longspan.model import ModelConfig, TransformersConfig
from longspan.train.train_config import TrainConfig, model_config
from longspan.verify.verify_config import VerifyConfig


def cut(config: TrainConfig, cases: VerifyConfig) -> TrainConfig:
    """Return the run with `cases.layers` layers and `cases.tokens` tokens per row, where given. Idempotent.

    The cut keeps the first layer of each window, then the first of the other layers. If layers are cut, a run with `init_from`
    starts from random weights. Shorter rows are packed again, without the manifest.

    Raises `SpecError`: more layers or tokens than the run has, fewer layers than kinds of masks, or rows no longer than a
    window.
    """
    values: dict[str, Any] = {name: getattr(config, name) for name in type(config).model_fields}
    model = model_config(config)
    for name, asked, there in (
        ("layers", cases.layers, model.num_layers), ("tokens", cases.tokens, config.data.seq_len),
    ):  # fmt: skip
        if asked is not None and asked > there:
            raise SpecError(
                f"{name}={asked} cuts nothing: the run has {there} {name}",
                hint=f"give at most {there}, or leave {name} out",
            )
    windows = _windows(model)
    if cases.layers is not None and cases.layers < model.num_layers:
        kinds = tuple(dict.fromkeys(windows))
        if cases.layers < len(kinds):
            raise SpecError(
                f"{cases.layers} layers are too few for the {len(kinds)} kinds of masks of {model.num_layers}: windows {kinds}",
                hint=f"cut to at least {len(kinds)} layers",
            )
        first = [windows.index(window) for window in kinds]
        others = [layer for layer in range(model.num_layers) if layer not in first]
        kept = sorted((first + others)[: cases.layers])
        values |= {"model": _with_layers(model, kept), "init_from": None}
    if cases.tokens is not None and cases.tokens < config.data.seq_len:
        hidden = [window for window in windows if window is not None and cases.tokens <= window < config.data.seq_len]
        if hidden:
            raise SpecError(
                f"a window of {max(hidden)} would mask nothing in rows of {cases.tokens} tokens",
                hint=f"cut to more than {max(hidden)} tokens",
            )
        data = config.data.model_dump() | {"seq_len": cases.tokens, "manifest": None}
        if data["fit"] is not None:
            data["fit"]["buckets"] = [bucket for bucket in data["fit"]["buckets"] if bucket < cases.tokens]
        values["data"] = type(config.data).model_validate(data)
    return type(config).model_validate(values)


def _windows(model: ModelConfig | TransformersConfig) -> tuple[int | None, ...]:
    """Return the window of each layer, or the length of its chunks; None for full attention."""
    if isinstance(model, ModelConfig):
        return model.windows or (None,) * model.num_layers
    sizes = {
        "sliding": getattr(model.text, "sliding_window", None),
        "chunk": getattr(model.text, "attention_chunk_size", None),
    }
    kinds = getattr(model.text, "layer_types", None)
    if not kinds:
        used = getattr(model.text, "use_sliding_window", True)
        return (sizes["sliding"] if used else None,) * model.num_layers
    return tuple(next((size for word, size in sizes.items() if word in kind), None) for kind in kinds)


def _with_layers(model: ModelConfig | TransformersConfig, kept: Sequence[int]) -> ModelConfig | TransformersConfig:
    """Return the model with only the layers `kept`."""
    if isinstance(model, ModelConfig):
        own = [model.windows[layer] for layer in kept] if model.windows else ()
        return ModelConfig.model_validate({**model.model_dump(), "num_layers": len(kept), "windows": own})
    entries = model.entries()
    by_layer = {
        key: [value[layer] for layer in kept]
        for key, value in entries.items()
        if isinstance(value, list) and len(value) == model.num_layers
    }
    return TransformersConfig(model_type=model.model_type, config=entries | by_layer | {"num_hidden_layers": len(kept)})


def describe_cut(config: TrainConfig, cases: VerifyConfig) -> dict[str, tuple[int, int]]:
    """Return (after, before) of "layers" and "seq_len" for those that `cut` reduces."""
    left = cut(config, cases)
    sizes = {
        "layers": (model_config(left).num_layers, model_config(config).num_layers),
        "seq_len": (left.data.seq_len, config.data.seq_len),
    }
    return {name: (now, before) for name, (now, before) in sizes.items() if now < before}
