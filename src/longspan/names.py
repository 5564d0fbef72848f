"""Names and constants shared by several folders: layouts, routes, kernels, dtypes, labels.

They are outside plan/ and cp/, because the CP=1 side of `verify` reads the configuration but imports neither folder.
"""

from collections.abc import Iterable
from enum import Enum
from typing import Any, Literal, NamedTuple

from longspan.errors import SpecError

AUTO = "auto"
"""Value of an option that longspan chooses: a route in `longspan.advise.Planner`, a kernel in `choose_kernel`."""

IGNORED = -100
"""Label of a token that is not a target: `ignore_index` of `torch.nn.functional.cross_entropy`."""

BALANCED = "balanced"
EVEN_LAYOUTS = (BALANCED, "zigzag")
"""Layouts that give all ranks of a packed row nearly the same visible pairs, the most even first: what warnings suggest."""
LAYOUTS = ("contiguous", "zigzag", "striped", BALANCED)
"""Names of the layouts that `Layout.named` makes."""

KERNELS = ("flash3", "cudnn", "sdpa", "flash2", "efficient", "flex", "reference")
"""Names of the attention kernels, in the order in which "auto" tries them: fastest first."""


class Dtype(NamedTuple):
    """A dtype of activations."""

    torch_name: str
    itemsize: int
    """Bytes of an element."""
    mixed: bool
    """Whether training keeps fp32 weights, gradients and moments beside the weights in this dtype."""


DTYPES = {
    "fp64": Dtype("float64", 8, False),
    "fp32": Dtype("float32", 4, False),
    "bf16": Dtype("bfloat16", 2, True),
    "fp16": Dtype("float16", 2, True),
}

COMM_DTYPES = {"bf16": "bfloat16", "fp8": "float8_e4m3fn"}
"""Communication dtypes of keys and values: longspan's name -> torch's name."""


class Rows(Enum):
    """How KV rows travel among the ranks that attend with the same heads."""

    RING = "hop by hop"
    ROTATE = "hop by hop, each hop one all-to-all collective"
    ALLGATHER = "all rows gathered at once"
    EXCHANGE = "the rows that are needed, in a few stages"


class Route(NamedTuple):
    """How a route moves rows and heads."""

    rows: Rows
    heads: Literal["none", "all", "inner", "outer"] = "none"
    """Which ranks exchange heads: none, all, or those of one of two levels."""
    staged: bool = False
    """Whether the module projects, exchanges and attends a few heads at a time (Untied Ulysses)."""
    candidate: bool = False
    """Whether "auto" tries this route. Every other route sends at least as much as some candidate."""


ROUTES = {
    "ring": Route(Rows.RING, candidate=True),
    "allgather": Route(Rows.ALLGATHER),
    "rotate": Route(Rows.ROTATE),
    "exchange": Route(Rows.EXCHANGE, candidate=True),
    "ulysses": Route(Rows.RING, "all", candidate=True),
    "upipe": Route(Rows.RING, "all", staged=True),
    "usp": Route(Rows.RING, "inner", candidate=True),
    "allgather-ulysses": Route(Rows.ALLGATHER, "inner"),
    "exchange-ulysses": Route(Rows.EXCHANGE, "inner", candidate=True),
    "ulysses-ring": Route(Rows.RING, "outer", candidate=True),
}
"""Routes by name. A name of two parts is outer-inner, like a 2-D mesh; "usp" is ring outside, Ulysses inside."""


def check_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Return `name`. Raises `SpecError` that lists `known` unless it is one of them. `kind` is a noun, such as "route"."""
    if name not in (names := tuple(known)):
        raise SpecError(f"{kind} {name!r} is not known", hint=f"choose one of {', '.join(names)}")
    return name


CHUNK = "chunk-"
"""Prefix of the name of a mask of chunks, before their length: only models of transformers have such layers."""

ROUTER_LOSS = "load_balancing_loss_func"
"""Function with which a model file of transformers computes the load-balancing loss of its experts."""


def mask_name(window: int | None) -> str:
    """Name the mask of a layer: "full", or "window-<w>"."""
    return "full" if window is None else f"window-{window}"


def window_of(mask_name: str) -> int | None:
    """Parse the window from a mask's name; None for "full"."""
    return None if mask_name == "full" else int(mask_name.removeprefix("window-"))


RENAMED = {
    "row_tokens": "seq_len",
    "width": "hidden_size",
    "ffn_width": "intermediate_size",
    "shared_ffn_width": "shared_intermediate_size",
    "rows_per_batch": "micro_batch_size",
    "accumulation": "gradient_accumulation_steps",
    "replicas": "dp_replicate",
    "wire_dtype": "comm_dtype",
    "wire_dtypes": "comm_dtypes",
    "slots_multiple_of": "pad_to_multiple_of",
    "whole_below": "min_split_tokens",
}
"""Keys of configurations, checkpoints and manifests: name before version 0.2 -> current name."""


def with_current_names(record: Any) -> Any:
    """Replace every old key in a record read from a checkpoint or a manifest."""
    if isinstance(record, dict):
        return {RENAMED.get(key, key): with_current_names(value) for key, value in record.items()}
    return [with_current_names(value) for value in record] if isinstance(record, list) else record
