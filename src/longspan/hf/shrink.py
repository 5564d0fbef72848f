"""A small copy of a model: same class, same layer pattern, random weights, a few thousand parameters.

    tiny = shrink(type(model), model.config, tokens)

Only the class and the configuration are read. Sizes shrink by the role of their name, in every part of the configuration:

    heads 32, KV heads 8, head_dim 128, hidden_size 4096, n_routed_experts 256   ->   4, 2, 16, 64, 8

Equal sizes stay equal, larger ones larger, and what divided still divides. Windows, chunks and lengths are kept.
"""

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 64
"""Number of tokens a shrunken model has."""
_LARGEST = 30_000_000
"""Number of parameters above which a shrunken model is not built."""


def shrink(cls: Any, config: Any, tokens: Tensor, dtype: torch.dtype = torch.float32) -> Any:
    """Return a small model of a class on the CPU, in training mode, with random weights and every kind of layer of the large one.

    config: of the large model; not changed.
    tokens: (1, length) that the small model takes as it is; the ways of shrinking are tried until one makes such a model.
    Raises what the class raises if none does.
    """
    failure: Exception | None = None
    for way in WAYS:
        try:
            small = _prepared(way(config))
            with torch.device("meta"):
                whole = cls(copy.deepcopy(small))
        except Exception as error:
            failure = failure or error
            continue
        for made in (_shallow, _shortened, _whole):
            try:
                model = made(cls, copy.deepcopy(small), whole)
                if model is not None:
                    randomize(model.to(dtype).eval())
                    with torch.no_grad():
                        model(tokens, use_cache=False)
                    return model.train()
            except Exception as error:
                failure = failure or error
    assert failure is not None
    raise failure


def _checked(meta: nn.Module) -> None:
    if (size := sum(p.numel() for p in meta.parameters())) > _LARGEST:
        raise MemoryError(f"{size:,} parameters are left in the small copy")


def _prepared(config: Any) -> Any:
    for each in _configs(config):
        vars(each).pop("quantization_config", None)
        each._experts_implementation = "eager"
    return config


def _shallow(cls: Any, config: Any, whole: nn.Module) -> Any:
    """A model whose configuration asks for as few layers as hold every kind, if these are the first ones of the whole model."""
    for _, _, layers in _layer_lists(whole):
        kinds = _signatures(layers, whole.config)
        least = _first_of_each(kinds)
        if least == len(layers) or not sum(at_depth(each, len(layers), least) for each in _configs(config)):
            continue
        with torch.device("meta"):
            _checked(cls(copy.deepcopy(config)))
        model = cls(config)
        made = [_signatures(each, config) for _, _, each in _layer_lists(model) if len(each) == least]
        return model if least == 1 or kinds[:least] in made else None
    return None


def _shortened(cls: Any, config: Any, whole: nn.Module) -> Any:
    _checked(whole)
    model = cls(config)
    for owner, name, layers in list(_layer_lists(model)):
        setattr(owner, name, layers[: _first_of_each(_signatures(layers, model.config))])
    return model


def _whole(cls: Any, config: Any, whole: nn.Module) -> Any:
    _checked(whole)
    return cls(config)


def _first_of_each(kinds: list[Any]) -> int:
    return max(kinds.index(kind) for kind in kinds) + 1


def at_depth(config: Any, depth: int, layers: int) -> bool:
    """Give a configuration of `depth` layers fewer of them, in place. Returns whether a setting says how many there are."""
    values = vars(config)
    names = [name for name, value in values.items() if _int(value) and value == depth and re.search(r"layers?$", name)]
    for name in names:
        values[name] = layers
    if names:
        for name, value in values.items():
            if isinstance(value, list | tuple) and len(value) == depth:
                values[name] = value[:layers]
    return bool(names)


def randomize(model: nn.Module) -> None:
    """Fill matrices with normal values of their inputs' scale and add noise to vectors, from torch's generator."""
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, dtype=torch.float64)
            if parameter.dim() > 1:
                parameter.copy_(noise / max(parameter.shape[-1], 1) ** 0.5)
            else:
                parameter.add_(0.1 * noise.to(parameter.dtype))


def _layer_lists(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.ModuleList]]:
    """The outermost lists of modules, with their owners."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            if len(child) > 1:
                yield module, name, child
        else:
            yield from _layer_lists(child)


def _signatures(layers: nn.ModuleList, config: Any) -> list[Any]:
    """What each layer is made of: classes, shapes and settings of its modules, and its entries of the configuration's lists."""
    plain = [[_settings(name, m) for name, m in layer.named_modules()] for layer in layers]
    # A setting that counts the layers says nothing of their kind.
    counts = {
        (part, key)
        for part, (_, _, settings, _) in enumerate(plain[0])
        for key in settings
        if all(part < len(each) and each[part][2].get(key, -1) == n for n, each in enumerate(plain))
    }
    lists = [
        value
        for each in _configs(config)
        for value in vars(each).values()
        if isinstance(value, list | tuple) and len(value) == len(layers)
    ]
    return [
        (
            [
                (name, cls, {k: v for k, v in settings.items() if (part, k) not in counts}, shapes)
                for part, (name, cls, settings, shapes) in enumerate(each)
            ],
            [str(value[n]) for value in lists if not isinstance(value[n], float)],
        )
        for n, each in enumerate(plain)
    ]


def _settings(name: str, module: nn.Module) -> tuple[str, type, dict[str, Any], list[Any]]:
    values = {
        # Two fractions make no other kind of layer; a fraction and zero do.
        key: bool(value) if isinstance(value, float) else value
        for key, value in vars(module).items()
        if key != "training" and isinstance(value, bool | int | float | str | type(None))
    }
    return name, type(module), values, [tuple(p.shape) for p in module.parameters(recurse=False)]


def _configs(config: Any) -> Iterator[Any]:
    """The configuration and those inside it, outermost first."""
    yield config
    for value in vars(config).values():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from _configs(value)


def _by_role(config: Any) -> Any:
    """All sizes by the role of their name, each role on a scale of its own."""
    return _shrunk(config, _role_sizes)


def _by_scale(config: Any) -> Any:
    """All dimensions divided by one power of two, so that products of them and of the counts, which are kept, still agree."""
    return _shrunk(config, _scaled_sizes)


def _shrunk(
    config: Any, sizes_of: Callable[[dict[str, Any], dict[str, set[int]]], dict[str, Callable[[int], int]]]
) -> Any:
    config = copy.deepcopy(config)
    for each in _configs(config):
        overrides = getattr(vars(each).get("_heterogeneity_spec"), "per_layer_overrides", {}).values()
        places, old = [vars(each), *overrides], dict(vars(each))
        roles: dict[str, set[int]] = {}
        for place in places:
            for name, value in place.items():
                if _is_size(value):
                    roles.setdefault(_role(name), set()).update(_numbers(value))
        new = {**_COMMON, **sizes_of(vars(each), roles)}
        for place in places:
            for name, value in list(place.items()):
                if _is_size(value) and _role(name) in new:
                    place[name] = _mapped(value, new[_role(name)])
            parts = [place.get(f"qk_{part}head_dim") for part in ("nope_", "rope_", "")]
            if all(map(_int, parts)):
                place["qk_head_dim"] = parts[0] + parts[1]
        _keep_products(old, vars(each))
        _shrink_rope(vars(each))
    return config


def _keep_products(old: dict[str, Any], new: dict[str, Any]) -> None:
    """Let heads times head dim be what it was: a multiple of the width, or another size, as of state-space layers."""
    hidden = next((name for name in _WIDTHS if _int(old.get(name))), None)
    expand = next((name for name in old if re.search("expand$", name) and _int(old[name])), None)
    for heads, count in old.items():
        for dim, size in old.items():
            if not (_role(heads) == "heads" and _role(dim) == "head dim" and _int(count) and _int(size)):
                continue
            if hidden and expand and count * size == old[expand] * old[hidden] and old[expand] > 1:
                new[heads] = new[expand] * new[hidden] // new[dim]
            prefix = heads.partition("_")[0]
            for name, product in old.items():
                if _int(product) and product == count * size and name.startswith(prefix) and dim.startswith(prefix):
                    new[name] = new[heads] * new[dim]


_WIDTHS = ("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_dim")

_COMMON: dict[str, Callable[[int], int]] = {
    "vocabulary": lambda n: min(n, VOCABULARY),
    "token": lambda n: n if n < 8 else VOCABULARY - 1 - n % 8,
    "experts": lambda n: min(n, 8),
    "chosen": lambda n: min(n, 2),
    "groups": lambda n: min(n, 2),
}


def _main(values: dict[str, Any]) -> tuple[int, int, int]:
    """Width, number of heads and head dim of a configuration; 0 for what it does not say."""
    hidden, heads, dim = (
        next((values[name] for name in names if _int(values.get(name))), 0)
        for names in (
            _WIDTHS,
            ("num_attention_heads", "n_head", "n_heads", "num_heads"),
            ("head_dim", "d_kv"),
        )
    )
    return hidden, heads, dim


def _role_sizes(values: dict[str, Any], roles: dict[str, set[int]]) -> dict[str, Callable[[int], int]]:
    hidden, heads, dim = _main(values)
    inner = hidden // heads if not dim and heads and hidden % heads == 0 else 0
    counts = _ranked(roles.get("heads", set()) | {1}, 1)
    dims = _ranked(roles.get("head dim", set()) | {inner}, 16)
    small = max(counts.get(heads, 4), 2) * (dims[inner] or 16)
    widths = {0: 0, hidden: small} | _ranked(roles.get("width", set()) - {hidden}, small)
    return {
        "heads": lambda n: counts[n],
        "head dim": lambda n: dims[n],
        "width": lambda n: widths[n],
        "inner width": lambda n: min(n, 2 * small),
        "rank": lambda n: min(n, 16),
        "state": lambda n: min(n, 8),
    }


def _scaled_sizes(values: dict[str, Any], roles: dict[str, set[int]]) -> dict[str, Callable[[int], int]]:
    hidden, heads, dim = _main(values)
    dims = {n for n in (*roles.get("head dim", ()), dim or (hidden // heads if heads else 0)) if n}
    factor = max(1, 1 << (min(dims, default=8) // 8).bit_length() - 1)

    def scaled(n: int) -> int:
        return max(n // factor, min(n, 1))

    return dict.fromkeys(("head dim", "width", "inner width"), scaled) | {"rank": lambda n: min(n, 16)}


_ROLES = (
    ("keep", r"max|layers?$|^layer|positions?$|per_layer$(?<!heads_per_layer)|version|_types?$|kernel|window|chunk|size_pattern"),
    ("vocabulary", r"vocab"),
    ("token", r"token_ids?$|token_index$|_idx$"),
    ("rank", r"rank|d_rel"),
    ("state", r"d_state|state_size"),
    ("head dim", r"head_?dim|d_head|dim_head|head_size|kv_channels|rotary_dim|d_kv"),
    ("heads", r"head|query_groups"),
    ("chosen", r"per_tok|topk|top_k|moe_k$"),
    ("groups", r"n_group$|expert_group"),
    ("experts", r"experts?$|expert_num"),
    ("inner width", r"intermediate|ffn|dff|dim_ff|inner|feed_forward|mlp_dim|mid_dim"),
    ("width", r"hidden_size|d_model|n_embd|emb_dim|embed\w*_dim|embedding_size|proj_dim|lru_width|embedding_dim"),
)  # fmt: skip


def _role(name: str) -> str:
    if name == "num_attention_heads_per_layer":
        return "heads"
    return next((role for role, pattern in _ROLES if re.search(pattern, name)), "keep")


def _ranked(values: set[int], least: int) -> dict[int, int]:
    """Powers of two in the order of the values: 8, 32, 128 become least, 2 least, 4 least. None grows."""
    return {n: min(n, least << rank) for rank, n in enumerate(sorted(n for n in values if n > 0))} | {0: 0}


def _shrink_rope(values: dict[str, Any]) -> None:
    """Fit the lists of rotary settings, whose lengths are half the rotated dimension."""
    rope = values.get("rope_parameters")
    if not isinstance(rope, dict):
        return
    hidden, heads, dim = _main(values)
    dim = values.get("qk_rope_head_dim") or dim or (hidden // heads if heads else 0)
    for each in [rope, *(part for part in rope.values() if isinstance(part, dict))]:
        half = int(dim * each.get("partial_rotary_factor", 1.0)) // 2
        if sections := each.get("mrope_section"):
            count = len(sections)
            each["mrope_section"] = [half - (count - 1) * (half // count), *[half // count] * (count - 1)]
        for key in ("short_factor", "long_factor"):
            if factors := each.get(key):
                each[key] = factors[:half]


def _is_size(value: Any) -> bool:
    return _int(value) or (isinstance(value, list | tuple) and bool(value) and all(map(_int, value)))


def _int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _numbers(value: Any) -> list[int]:
    return [value] if _int(value) else list(value)


def _mapped(value: Any, new: Callable[[int], int]) -> Any:
    return new(value) if _int(value) else type(value)(new(n) for n in value)


WAYS: tuple[Callable[[Any], Any], ...] = (_by_role, _by_scale)
"""Ways of shrinking a configuration, from the smallest model to larger ones."""
