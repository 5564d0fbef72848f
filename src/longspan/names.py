"""Names and numbers that several folders share: layouts, routes, kernels, types, labels.

The configuration serves the CP=1 side of `verify` as well, which imports nothing of plan/ or cp/: it reads the names here.
"""

from collections.abc import Iterable
from enum import Enum
from typing import Any, Literal, NamedTuple

from longspan.errors import SpecError

AUTO = "auto"
"""The value that leaves a choice to longspan: of a route to `longspan.advise.Planner`, of a kernel to `choose_kernel`."""

IGNORED = -100
"""The label of a token that is no target, as in `torch.nn.functional.cross_entropy`."""

BALANCED = "balanced"
LAYOUTS = ("contiguous", "zigzag", "striped", BALANCED)
"""Layouts by name; `Layout.named` has a constructor for each."""

KERNELS = ("flash3", "cudnn", "sdpa", "flash2", "efficient", "flex", "reference")
"""Attention kernels in the order in which "auto" tries them: fastest first."""


class Dtype(NamedTuple):
    """A floating type of activations."""

    torch_name: str
    itemsize: int
    """Bytes of an element."""
    mixed: bool
    """Whether fp32 weights, gradients and moments are kept beside the weights in this type."""


DTYPES = {
    "fp64": Dtype("float64", 8, False),
    "fp32": Dtype("float32", 4, False),
    "bf16": Dtype("bfloat16", 2, True),
    "fp16": Dtype("float16", 2, True),
}

COMM_DTYPES = {"bf16": "bfloat16", "fp8": "float8_e4m3fn"}
"""Types in which keys and values may travel, with torch's name of each."""


class Rows(Enum):
    """How rows of keys and values travel among the ranks that work on the same heads."""

    RING = "hop by hop"
    ROTATE = "hop by hop, each hop one all-to-all collective"
    ALLGATHER = "all rows gathered at once"
    EXCHANGE = "the rows that are needed, in a few stages"


class Route(NamedTuple):
    """What the name of a route stands for."""

    rows: Rows
    heads: Literal["none", "all", "inner", "outer"] = "none"
    """The ranks that exchange heads: none, all, or one level of two."""
    staged: bool = False
    """Whether attention works on a few heads at a time, from the input of the projections (Untied Ulysses)."""
    candidate: bool = False
    """Whether "auto" tries this route. The others send no less than a candidate does."""


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
"""Routes by name. A name of two parts is outer-inner, as a mesh of two axes is; "usp" is ring outside, Ulysses inside."""


def check_name(kind: str, name: str, known: Iterable[str]) -> str:
    """`name` if it is one of `known`, else a `SpecError` that lists them. `kind` is what is named, such as "route"."""
    if name not in (names := tuple(known)):
        raise SpecError(f"{kind} {name!r} is not known", hint=f"choose one of {', '.join(names)}")
    return name


def mask_name(window: int | None) -> str:
    """The mask of a layer by name: "full", or "window-<w>"."""
    return "full" if window is None else f"window-{window}"


def window_of(mask_name: str) -> int | None:
    """The window of a mask by its name; None for "full"."""
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
"""Keys of configurations, checkpoints and manifests before version 0.2, each with the name it has now."""


def with_current_names(record: Any) -> Any:
    """A record read from a checkpoint or a manifest, with every old key replaced by the current one."""
    if isinstance(record, dict):
        return {RENAMED.get(key, key): with_current_names(value) for key, value in record.items()}
    return [with_current_names(value) for value in record] if isinstance(record, list) else record
