"""Build a causal language model of transformers, for a run and for the CP=1 side of `verify`; write it as a folder.

Imports nothing of plan/ or cp/: the caller sets the model's attention. Weights are made in fp32 on the CPU, so that those of a
seed are the same in every dtype and at every degree.
"""

import copy
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from longspan.errors import SpecError
from longspan.model.decoder import SAVED_OPS, Recompute, keep_saved_ops
from longspan.model.transformers_config import TransformersConfig, max_positions
from longspan.names import IGNORED

BESIDE_WEIGHTS = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model", "vocab.json",
    "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip
"""Files of a folder that describe its text, not its weights: tokenizer, chat template, defaults of generation."""
CHAT_TEMPLATES = "additional_chat_templates"


def build(model: TransformersConfig, *, seed: int, dtype: torch.dtype) -> nn.Module:
    """Build the model on the CPU, with random weights of `seed` as transformers initialises them, or those of its folder.

    Raises `SpecError` if tensors of the folder are missing, unexpected or of another shape.
    """
    if model.folder is None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            built = _auto().from_config(copy.deepcopy(model.resolved), dtype=torch.float32)
    else:
        built = _read(model)
    return _prepared(built.train(), dtype)


def build_empty(model: TransformersConfig, *, dtype: torch.dtype) -> nn.Module:
    """Build the model on the meta device."""
    with torch.device("meta"):
        built = _auto().from_config(copy.deepcopy(model.resolved), dtype=torch.float32)
    return _prepared(built.train(), dtype)


def to_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert the parameters in place, not the buffers: transformers keeps rotary frequencies in fp32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of the model: the units of FSDP2 and of compilation."""
    kinds = getattr(model, "_no_split_modules", None) or ()
    return [module for module in model.modules() if type(module).__name__ in kinds]


def set_recompute(model: Any, recompute: Recompute) -> None:
    """Set activation checkpointing of every layer: see `longspan.model.Decoder`. Raises `SpecError` if the model has none."""
    if recompute == "none":
        return
    if not model.supports_gradient_checkpointing:
        raise SpecError(
            f'recompute="{recompute}": {type(model).__name__} does not support activation checkpointing',
            hint='set recompute="none"',
        )
    kept = partial(keep_saved_ops, SAVED_OPS if recompute == "block" else ())
    options = {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, kept)}
    # The older name warns in newer versions.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(options)


def multiplying_parameters(model: TransformersConfig) -> int:
    """Count the parameters that multiply each token: all matrices but embeddings, the output head, and the chosen experts.

    Experts are found by the name `experts` of their module; a token multiplies `num_experts_per_tok` of them.
    """
    empty: Any = build_empty(model, dtype=torch.float32)
    looked_up = {id(part.weight) for part in empty.modules() if isinstance(part, nn.Embedding)}
    head = empty.get_output_embeddings()
    chosen = getattr(model.text, "num_experts_per_tok", None)
    of = getattr(model.text, "num_local_experts", None) or getattr(model.text, "num_experts", None)
    total = 0
    for name, parameter in empty.named_parameters():
        if parameter.ndim < 2 or (id(parameter) in looked_up and (head is None or parameter is not head.weight)):
            continue
        routed = ".experts." in name and chosen and of
        total += parameter.numel() * chosen // of if routed else parameter.numel()
    return total


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of every parameter and buffer, tied ones once."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def save_transformers(model: TransformersConfig, weights: Mapping[str, Tensor], path: Path, *, longest: int) -> None:
    """Write a folder that transformers loads: configuration, weights, and defaults of generation. Call on one rank.

    `longest`: tokens of the longest row of the run, a lower bound of `max_position_embeddings` (see `RopeChanges`).
    """
    whole: Any = build_empty(model, dtype=next(iter(weights.values())).dtype)
    whole.load_state_dict(dict(weights), strict=False, assign=True)
    whole.tie_weights()
    text = whole.config.get_text_config()
    if (own := getattr(text, "max_position_embeddings", None)) is not None:
        text.max_position_embeddings = max_positions(own, model, longest)
    with _without_bars(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole.save_pretrained(path)


def copy_beside(source: Path | None, path: Path) -> None:
    """Copy tokenizer, chat templates and defaults of generation from a folder, or a tokenizer.json alone, to another folder."""
    if source is None:
        return
    if source.is_file():
        shutil.copyfile(source, path / "tokenizer.json")
        return
    for name in BESIDE_WEIGHTS:
        if (source / name).is_file():
            shutil.copyfile(source / name, path / name)
    if (source / CHAT_TEMPLATES).is_dir():
        shutil.copytree(source / CHAT_TEMPLATES, path / CHAT_TEMPLATES)


def _auto() -> Any:
    from transformers import AutoModelForCausalLM  # slow to import

    return AutoModelForCausalLM


@contextmanager
def _without_bars() -> Iterator[None]:
    """Switch off the progress bars of transformers inside the block: a run has its own."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _read(model: TransformersConfig) -> Any:
    with _without_bars():
        built, found = _auto().from_pretrained(
            model.folder,
            config=copy.deepcopy(model.resolved),
            dtype=torch.float32,
            local_files_only=True,
            output_loading_info=True,
        )
    for what in ("missing", "unexpected", "mismatched"):
        if names := sorted(map(str, found[f"{what}_keys"])):
            raise SpecError(
                f"{model.folder}: {what} tensors, {len(names)}: {', '.join(names[:5])}",
                hint="config.json and the weights must belong to one model",
            )
    untied = {name for name, _ in build_empty(model, dtype=torch.float32).named_parameters()}
    if extra := sorted({name for name, _ in built.named_parameters()} - untied):
        raise SpecError(
            f"{model.folder}: config.json ties {', '.join(extra)} to another tensor, but the two differ in the weights",
            hint="set tie_word_embeddings to false in config.json, or remove the tensor from the weights",
        )
    return built


def _prepared(model: Any, dtype: torch.dtype) -> nn.Module:
    """Set what a run needs of every model: its dtype, and a router loss that the run itself adds."""
    if dtype == torch.float64:
        model.config._experts_implementation = "eager"  # the default, "grouped_mm", takes no fp64
        model.loss_function = _wide_loss
    if hasattr(model, "router_aux_loss_coef"):
        model.router_aux_loss_coef = 0.0
    elif getattr(model.config.get_text_config(), "output_router_logits", False):
        raise SpecError(
            f"output_router_logits is set, but {type(model).__name__} computes no load-balancing loss that the run can weigh",
            hint="remove output_router_logits",
        )
    return to_dtype(model, dtype)


def _wide_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | float = 1,
    *,
    shift_labels: Tensor,
    **_: Any,
) -> Tensor:
    """Compute transformers' loss of a causal language model without its conversion to fp32."""
    total = F.cross_entropy(logits.view(-1, vocab_size), shift_labels.view(-1), ignore_index=IGNORED, reduction="sum")
    return total / num_items_in_batch
