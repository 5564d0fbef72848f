"""Read and write Hugging Face Llama folders (config.json and safetensors), without transformers.
An option of a folder that longspan does not implement raises an error that names the option; none is ignored."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ValidationError
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longspan.errors import SpecError
from longspan.model.decoder import Decoder, Recompute
from longspan.model.model_config import Llama3RopeScaling, ModelConfig
from longspan.model.regions import local_region
from longspan.model.transformers_config import CONFIG, RopeChanges, read_entries

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9

_FIELDS = {  # ModelConfig field: entry of config.json
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
}
_DEFAULTS = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "initializer_range": 0.02}  # defaults of LlamaConfig
_SCALING_FIELDS = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_positions": "original_max_position_embeddings",
}
_ONLY: dict[str, tuple[Any, ...]] = {  # entries that change the computation: their supported values
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0, None),
    "partial_rotary_factor": (1, None),
    "sliding_window": (None,),
    "quantization_config": (None,),
}


def load_pretrained(
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    recompute: Recompute = "none",
) -> Decoder:
    """Load a Hugging Face Llama folder in `dtype` (default: dtype of its embedding) on `device` (default: cpu).

    Raises SpecError: another architecture, an unsupported option (biases, dropout, RoPE scaling other than llama3,
    quantization), or tensors that are missing, unexpected or of another shape.
    """
    with torch.device("meta"):
        model = Decoder(read_config(path), recompute=recompute)
    files = _files(Path(path), model.config)
    if dtype is None:
        file, key = files["embed_tokens.weight"]
        with safe_open(file, framework="pt") as opened:
            dtype = opened.get_slice(key)[:0].dtype
    model = model.to(dtype).to_empty(device=device or "cpu")
    load_weights(model, path)
    return model


@torch.no_grad()
def load_weights(model: Decoder, path: str | Path) -> None:
    """Read the weights of a folder into a model of the same shape. A rank reads only the local part of sharded parameters
    and only its pipeline stage. Raises SpecError: see `load_pretrained`."""
    places: dict[Path, list[tuple[str, nn.Parameter]]] = {}
    files = _files(Path(path), model.config)
    for name, parameter in model.named_parameters():
        file, key = files[name]
        places.setdefault(file, []).append((key, parameter))
    for file, parameters in places.items():
        with safe_open(file, framework="pt") as opened:
            for key, parameter in parameters:
                local, region = local_region(parameter)
                if local.numel():
                    local.copy_(opened.get_slice(key)[region])


def save_pretrained(
    model: Decoder,
    path: str | Path,
    *,
    state_dict: Mapping[str, Tensor] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write `model` as a folder for transformers (4 and 5) and `load_pretrained`. Call on one rank.

    state_dict: gathered weights by `Decoder` names, required if the weights of `model` are sharded. max_shard_bytes: limit of
    weights per file; a larger tensor gets a separate file. extra: further entries of config.json, such as
    `max_position_embeddings` or `eos_token_id`; token ids default to null.

    Raises SpecError: windows, QK-norm or experts, which a Llama folder cannot describe; sharded weights; a folder that
    already holds weights.
    """
    path = Path(path)
    state = {
        name: tensor.detach() for name, tensor in (model.state_dict() if state_dict is None else state_dict).items()
    }
    _check_state(model, state)
    entries = _config_entries(model.config, state["embed_tokens.weight"].dtype, extra or {})
    path.mkdir(parents=True, exist_ok=True)
    if stale := sorted(file.name for file in path.glob("*.safetensors*")):
        raise SpecError(
            f"{path} already holds weights: {_first(stale)}", hint="save to a new folder, or remove these files"
        )
    shards = _split({_theirs(name): tensor for name, tensor in state.items()}, max_shard_bytes)
    files = [WEIGHTS] if len(shards) == 1 else [_shard_name(i, len(shards)) for i in range(len(shards))]
    for file, shard in zip(files, shards, strict=True):
        save_file({key: tensor.cpu().contiguous() for key, tensor in shard.items()}, path / file, {"format": "pt"})
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in state.values())
        weight_map = {key: file for file, shard in zip(files, shards, strict=True) for key in shard}
        _write_json(path / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    _write_json(path / CONFIG, entries)  # written last, so that a partly written folder does not load


def read_config(path: str | Path, changes: RopeChanges | None = None) -> ModelConfig:
    """Read the ModelConfig of a Hugging Face Llama folder from config.json, with `changes` of its RoPE.

    Raises SpecError: see `load_pretrained`.
    """
    file = Path(path) / CONFIG
    entries = read_entries(Path(path))
    architectures = entries.get("architectures") or []
    if architectures != ["LlamaForCausalLM"]:
        raise UnservedError(f"{file}: architectures {architectures} are not supported", hint="use a LlamaForCausalLM")
    for key, allowed in _ONLY.items():
        if key in entries and entries[key] not in allowed:
            raise UnservedError(f"{file}: {key}={entries[key]!r} is not supported", hint=f"only {allowed[0]!r} is")
    given: dict[str, Any] = (
        _DEFAULTS | {"num_key_value_heads": entries.get("num_attention_heads")} | _without_none(entries)
    )
    fields = {ours: given[theirs] for ours, theirs in _FIELDS.items() if theirs in given}
    try:
        return ModelConfig(**fields, **_changed(_rope_fields(file, entries), changes))
    except ValidationError as error:
        raise SpecError(
            f"{file}: {error}", hint=f"change the entries of the file; by ModelConfig field they are {_FIELDS}"
        ) from error


def is_served(path: str | Path, changes: RopeChanges) -> bool:
    """Whether the decoder computes the model of a folder with these changes. Raises SpecError for a folder that is not valid."""
    try:
        read_config(path, changes)
    except UnservedError:
        return False
    return True


class UnservedError(SpecError):
    """A model that the decoder does not compute, though its folder may be valid."""


def _changed(fields: dict[str, Any], changes: RopeChanges | None) -> dict[str, Any]:
    """Return the RoPE fields of ModelConfig with the changes of a run."""
    if changes is None:
        return fields
    scaling = changes.rope_scaling
    if scaling is not None and not isinstance(scaling, Llama3RopeScaling):
        raise UnservedError(
            f"rope_scaling {scaling.kind!r} is not supported by longspan's decoder",
            hint='use kind "llama3", or model.implementation="transformers"',
        )
    given: dict[str, Any] = {"rope_theta": changes.rope_theta, "rope_scaling": scaling}
    return fields | {key: value for key, value in given.items() if value is not None}


def _rope_fields(file: Path, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Read `rope_theta` and `rope_scaling`: in `rope_parameters` for transformers 5, two separate entries for 4."""
    new, old = entries.get("rope_parameters") or {}, entries.get("rope_scaling") or {}
    rope = old | new
    thetas = {value for value in (entries.get("rope_theta"), rope.get("rope_theta")) if value is not None}
    if len(thetas) > 1 or (new and old and old != {key: new.get(key) for key in old}):
        raise SpecError(
            f"{file}: rope_parameters {new} contradicts rope_theta {entries.get('rope_theta')}, rope_scaling {old}",
            hint="keep rope_parameters, the newer format, and remove rope_theta and rope_scaling",
        )
    if rope.get("partial_rotary_factor", 1) != 1:
        raise UnservedError(
            f"{file}: partial_rotary_factor {rope['partial_rotary_factor']} is not supported", hint="only 1 is"
        )
    fields: dict[str, Any] = {"rope_theta": thetas.pop()} if thetas else {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "llama3":
        fields["rope_scaling"] = {ours: rope[theirs] for ours, theirs in _SCALING_FIELDS.items() if theirs in rope}
    elif kind != "default":
        raise UnservedError(f"{file}: RoPE type {kind!r} is not supported", hint="use 'default' or 'llama3'")
    return fields


def _config_entries(config: ModelConfig, dtype: torch.dtype, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json in the format of transformers 4, which transformers 5 also reads."""
    if config.qk_norm or set(config.mask_names) != {"full"} or config.experts is not None:
        raise SpecError(
            f"a Llama folder cannot describe qk_norm={config.qk_norm}, windows={config.windows}, experts={config.experts}",
            hint="save a training checkpoint instead",
        )
    scaling = config.rope_scaling
    entries = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **_translate(config, _FIELDS),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling and {"rope_type": "llama3", **_translate(scaling, _SCALING_FIELDS)},
    }
    if taken := sorted(entries.keys() & extra.keys()):
        raise SpecError(
            f"extra would override {taken}, which follow from the model's config", hint="leave these keys out of extra"
        )
    return entries | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None} | dict(extra)


def _translate(record: BaseModel, fields: Mapping[str, str]) -> dict[str, Any]:
    return {theirs: getattr(record, ours) for ours, theirs in fields.items()}


def _check_state(model: Decoder, state: Mapping[str, Tensor]) -> None:
    wanted = {name: tuple(parameter.shape) for name, parameter in model.state_dict().items()}
    wrong = []
    for name in sorted(wanted.keys() | state.keys()):
        if name not in state:
            wrong.append(f"{name} is missing")
        elif name not in wanted:
            wrong.append(f"{name} is unexpected")
        elif tuple(state[name].shape) != wanted[name]:
            wrong.append(f"{name} has shape {tuple(state[name].shape)}, not {wanted[name]}")
    if wrong:
        raise SpecError(
            f"state_dict does not match the model: {_first(wrong)}",
            hint="give every tensor of the model, with unsharded shapes, and no other",
        )
    sharded = [name for name, tensor in state.items() if isinstance(tensor, DTensor) or tensor.is_meta]
    if sharded:
        raise SpecError(
            f"weights are sharded or on the meta device: {_first(sharded)}",
            hint="gather the weights and pass state_dict: torch.distributed.checkpoint.state_dict.get_model_state_dict "
            "with StateDictOptions(full_state_dict=True)",
        )


def _files(path: Path, config: ModelConfig) -> dict[str, tuple[Path, str]]:
    """Return, by `Decoder` name, the (file, key in the file) of every parameter of the complete model."""
    with torch.device("meta"):
        wanted = {name: tuple(tensor.shape) for name, tensor in Decoder(config).state_dict().items()}
    found: dict[str, tuple[Path, str]] = {}
    unexpected, misshapen = [], []
    for file in _weight_files(path):
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 (not a mapping)
                name, shape = _ours(key), tuple(opened.get_slice(key).get_shape())
                if key.endswith("rotary_emb.inv_freq"):
                    continue  # a buffer written by old transformers
                found[name] = file, key
                if name not in wanted:
                    unexpected.append(key)
                elif shape != wanted[name]:
                    misshapen.append(f"{key} has shape {shape}, not {wanted[name]}")
    if config.tie_embeddings and "lm_head.weight" in unexpected:
        _check_tied(path, found["lm_head.weight"], found["embed_tokens.weight"])
        unexpected.remove("lm_head.weight")
    missing = [_theirs(name) for name in wanted if name not in found]
    for what, names in (("missing", missing), ("unexpected", unexpected), ("wrongly shaped", misshapen)):
        if names:
            raise SpecError(
                f"{path}: {what} tensors, {len(names)}: {_first(names)}",
                hint=f"{CONFIG} and the weights must belong to one model; tie_word_embeddings is {config.tie_embeddings}",
            )
    return found


def _check_tied(path: Path, head: tuple[Path, str], embedding: tuple[Path, str]) -> None:
    """Raise SpecError unless the two tensors are equal."""
    tensors = []
    for file, key in (head, embedding):
        with safe_open(file, framework="pt") as opened:
            tensors.append(opened.get_tensor(key))
    if not torch.equal(*tensors):
        raise SpecError(
            f"{path}: tie_word_embeddings is true, but {head[1]} is not equal to {embedding[1]}",
            hint=f"set tie_word_embeddings to false in {CONFIG}, or remove {head[1]} from the weights",
        )


def _weight_files(path: Path) -> list[Path]:
    if (path / WEIGHTS).is_file():
        return [path / WEIGHTS]
    if not (path / INDEX).is_file():
        raise SpecError(
            f"{path} has neither {WEIGHTS} nor {INDEX}",
            hint="convert other weights with from_pretrained and save_pretrained of transformers",
        )
    files = sorted(set(json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    for file in files:
        if not (path / file).is_file():
            raise SpecError(f"{path / file} is listed in {INDEX} but missing", hint="complete the download")
    return [path / file for file in files]


def _split(tensors: Mapping[str, Tensor], max_bytes: int) -> list[dict[str, Tensor]]:
    if max_bytes < 1:
        raise SpecError(
            f"max_shard_bytes {max_bytes} is below 1", hint=f"leave it out for the default {MAX_SHARD_BYTES}"
        )
    shards: list[dict[str, Tensor]] = [{}]
    room = max_bytes
    for key, tensor in tensors.items():
        if tensor.nbytes > room and shards[-1]:
            shards.append({})
            room = max_bytes
        shards[-1][key] = tensor
        room -= tensor.nbytes
    return shards


def _shard_name(index: int, count: int) -> str:
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _ours(key: str) -> str:
    return key.removeprefix("model.")


def _theirs(name: str) -> str:
    return name if name.startswith("lm_head.") else f"model.{name}"


def _without_none(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entries.items() if value is not None}


def _first(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
