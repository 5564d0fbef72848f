"""The configuration of a run: one frozen record from a TOML file and `--set` overrides, checked when it is made."""

import tomllib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from longspan.data.data_config import DataConfig
from longspan.errors import SpecError
from longspan.model.model_config import ModelConfig
from longspan.names import AUTO, BALANCED, COMM_DTYPES, DTYPES, KERNELS, LAYOUTS, RENAMED, ROUTES, check_name

Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Dtype = Annotated[str, AfterValidator(partial(check_name, "dtype", known=DTYPES))]
LayoutName = Annotated[str, AfterValidator(partial(check_name, "layout", known=LAYOUTS))]
RouteName = Annotated[str, AfterValidator(partial(check_name, "route", known=(AUTO, *ROUTES)))]
CommDtype = Annotated[str, AfterValidator(partial(check_name, "comm_dtype", known=COMM_DTYPES))]
KernelName = Annotated[str, AfterValidator(partial(check_name, "kernel", known=(AUTO, *KERNELS)))]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ParallelConfig(_Record):
    """How the ranks share the work. World = dp x tp x pp x cp; experts are on ep of the dp x tp x cp ranks of a stage."""

    cp: Positive = 1
    """Ranks that share one sequence."""
    dp: Positive | None = None
    """Groups of ranks that read different rows; None: what the world leaves under torchrun, else 1."""
    tp: Positive = 1
    """Ranks that share heads, MLP features and vocabulary."""
    sp: bool = True
    """Megatron's sequence parallelism: norms, residuals and dropout work on 1/tp of a rank's tokens. Means nothing to tp=1."""
    pp: Positive = 1
    """Ranks that share the layers, as stages of a pipeline. `gradient_accumulation_steps` micro-batches run through
    it in each step."""
    schedule: Literal["1f1b", "interleaved", "zero-bubble"] = "1f1b"
    """In what order the stages of a pipeline work."""
    stages_per_rank: Positive | None = None
    """Stages of each rank; None: 1, or 2 for schedule "interleaved"."""
    ep: Positive = 1
    """Ranks that share the experts of a layer."""
    dp_replicate: Positive = 1
    """HSDP: copies of the sharded weights, over dp; 1: weights are sharded over all of dp x cp."""
    order: str = "tp-cp-ep-dp-pp"
    """The axes, neighbouring ranks first."""
    ranks_per_node: Positive | None = None
    """Ranks that a fast link joins, which a TP group may not leave; None: those that torchrun has on a machine."""
    layout: LayoutName = "zigzag"
    route: RouteName = "ring"
    """How keys and values reach the queries; "auto" chooses. `docs/concepts/routes.md` lists the names."""
    inner: Positive | None = None
    """Inner degree of a route with two levels; None: chosen."""
    heads_per_stage: Positive | None = None
    """Query heads that route "upipe" works on at a time; None: the least that fits."""
    comm_dtype: CommDtype | None = None
    """Keys and values are rounded to this type on their way to other ranks; None: they travel as they are."""
    costs: Path | None = None
    """What `longspan bench calibrate` measured on this cluster: for route "auto", and for layout "balanced", which then keeps
    documents whole that are too short for a cut to pay."""
    kernel: KernelName = AUTO
    pad_to_multiple_of: Positive | None = None
    """Pad each rank's local length with dead slots to a multiple; None: exact lengths."""
    wrapper: Literal["fsdp", "ddp"] = "fsdp"
    """FSDP2 shards parameters, gradients and moments over dp x cp; DDP keeps them whole (fp32 and fp64, tp, pp, ep of 1)."""
    defer_reduction: bool = True
    """Sum gradients over ranks once a step, behind its last micro-batch; false: behind each, and keep shards alone."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where ranks compute; "auto" takes CUDA if it is available. On CUDA each rank of a machine needs a device of its own."""
    threads: Positive | None = None
    """CPU threads of a rank; None: the cores over the ranks of this machine."""
    timeout_seconds: Annotated[float, Field(gt=0)] = 600.0
    """After this long without an answer from a peer, a rank gives up: in every group, whatever travels in it."""

    @property
    def is_staged(self) -> bool:
        """Whether the route works on a few heads at a time, from the input of the projections: "upipe"."""
        return self.route != AUTO and ROUTES[self.route].staged


class OptimConfig(_Record):
    """AdamW with linear warm-up and a cosine down to `min_lr_ratio * lr`; the norm of all gradients is clipped."""

    lr: Annotated[float, Field(gt=0)] = 3e-4
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """On matrices; norms are left alone."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0


class TrainConfig(_Record):
    """Everything that decides a run. Sizes in tokens and steps; `longspan train --help` shows how to set them."""

    data: DataConfig
    model: ModelConfig | None = None
    """The decoder to make; exactly one of `model` and `init_from`."""
    init_from: Path | None = None
    """A Hugging Face Llama folder whose weights to start from."""
    parallel: ParallelConfig = ParallelConfig()
    optim: OptimConfig = OptimConfig()
    run_dir: Path = Path("runs/default")
    """Metrics, TensorBoard events and checkpoints go here."""
    steps: Positive = 100
    micro_batch_size: Positive = 1
    """Rows of `data.seq_len` on the token axis of one micro-batch."""
    gradient_accumulation_steps: Positive = 1
    """Micro-batches of an optimizer step. Global batch = micro_batch_size x dp x gradient_accumulation_steps rows."""
    dropout: Fraction = 0.0
    """Of what attention and MLP add to a token. Which elements it meets follows from the token, so losses stay the same at
    every degree."""
    dtype: Dtype = "fp32"
    """Of activations and of the weights in use; bf16 and fp16 keep fp32 weights, gradients and moments beside them."""
    recompute: Literal["none", "block", "full"] = "none"
    """"block": keep each block's input and attention output, compute the rest again in backward (repeats no hop). "full":
    keep the input alone, and attend again."""
    compile: bool = False
    """Compile each block, in one graph. New local lengths compile anew: parallel.pad_to_multiple_of keeps them few."""
    eval_every: Positive | None = None
    """Steps between evaluations on held-out rows; there is one at the end too. None: never."""
    eval_rows: Positive | None = 8
    """Held-out rows of an evaluation; None: all."""
    checkpoint_every: Positive | None = None
    """Steps between checkpoints; there is one at the end too. None: never."""
    imbalance_limit: Annotated[float, Field(gt=1)] | None = 1.25
    """Warn when in each of ten steps a rank had over so many times the mean pairs, or time in attention; None: never."""
    preflight: bool = False
    """Before the first step, run one at the longest row the data can give, tell every rank's peak memory, and undo it."""
    resume: bool = False
    """Go on from the newest checkpoint in `run_dir`."""
    export: bool = False
    """At the end, write the weights as a Hugging Face folder into `run_dir/model`."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of the initial weights and of dropout."""

    _needs_model: ClassVar[bool] = True

    @model_validator(mode="after")
    def _check(self) -> "TrainConfig":
        starts = [self.model is not None, self.init_from is not None]
        if all(starts) or (self._needs_model and not any(starts)):
            raise SpecError(
                "both model and init_from are given" if self.model else "neither model nor init_from is given",
                hint="give [model] to start from random weights, or init_from to start from a folder",
            )
        if self.parallel.wrapper == "ddp" and DTYPES[self.dtype].mixed:
            raise SpecError(
                f'dtype="{self.dtype}" with parallel.wrapper="ddp": DDP keeps one copy of the weights, in fp32',
                hint='use parallel.wrapper="fsdp" for bf16 and fp16',
            )
        sharded = {name: getattr(self.parallel, name) for name in ("tp", "pp", "ep", "dp_replicate")}
        if self.parallel.wrapper == "ddp" and (above := {name: size for name, size in sharded.items() if size > 1}):
            given = ", ".join(f"{name}={size}" for name, size in above.items())
            raise SpecError(
                f'parallel.wrapper="ddp" with {given}: DDP knows dp x cp alone',
                hint='use parallel.wrapper="fsdp"',
            )
        if self.parallel.pp > 1 and not self.parallel.defer_reduction:
            raise SpecError(
                f"defer_reduction=false with pp={self.parallel.pp}: a pipeline reduces once, behind its last micro-batch",
                hint="leave defer_reduction at true",
            )
        staged = self.parallel.is_staged
        if staged and self.parallel.tp > 1:
            raise SpecError(
                f'route "{self.parallel.route}" with tp={self.parallel.tp}: it holds the projections of a layer whole',
                hint='set tp=1, or route "ulysses"',
            )
        if self.compile and (self.parallel.tp > 1 or self.parallel.pp > 1):
            raise SpecError(
                f"compile=true with tp={self.parallel.tp}, pp={self.parallel.pp} is not supported",
                hint="set compile=false, or tp=1 and pp=1",
            )
        if self.compile and self.model is not None and self.model.experts is not None:
            raise SpecError(
                "compile=true with experts: how many rows each gets is known on the host alone",
                hint="set compile=false",
            )
        if self.parallel.schedule == "zero-bubble" and self.recompute != "none":
            raise SpecError(
                f'recompute="{self.recompute}" with schedule "zero-bubble", which runs backward in two parts: each would compute '
                "the block again",
                hint='set recompute="none", or schedule "1f1b" or "interleaved"',
            )
        if self.parallel.heads_per_stage is not None and not staged:
            raise SpecError(
                f"parallel.heads_per_stage={self.parallel.heads_per_stage} means nothing to route {self.parallel.route!r}",
                hint=f'leave it out, or set parallel.route="{next(name for name, route in ROUTES.items() if route.staged)}"',
            )
        if self.parallel.costs is not None and self.parallel.route != AUTO and self.parallel.layout != BALANCED:
            raise SpecError(
                f"parallel.costs={self.parallel.costs} means nothing to route {self.parallel.route!r}, which is chosen, and "
                f"layout {self.parallel.layout!r}",
                hint='leave it out, or set parallel.route="auto" or parallel.layout="balanced"',
            )
        if staged and self.recompute != "none":
            raise SpecError(
                f'recompute="{self.recompute}" with route "{self.parallel.route}", '
                "which computes attention again in backward by itself",
                hint='set recompute="none", or another route',
            )
        if staged and self.compile:
            raise SpecError(
                f'compile=true with route "{self.parallel.route}", which is no operator that compiled code could call',
                hint="set compile=false, or another route",
            )
        if self.optim.warmup_steps > self.steps:
            raise SpecError(
                f"optim.warmup_steps {self.optim.warmup_steps} is more than steps {self.steps}",
                hint="lower the one or raise the other",
            )
        return self


class PackConfig(TrainConfig):
    """The same file for `longspan pack`, which needs no model: `model` and `init_from` may both be missing."""

    _needs_model: ClassVar[bool] = False


def model_config(config: TrainConfig) -> ModelConfig:
    """The decoder's configuration, from [model] or from the folder `init_from`."""
    if config.model is not None:
        return config.model
    assert config.init_from is not None, "the configuration checks that one of the two is given"
    from longspan.model import read_config  # loads torch, which a configuration with [model] does not need

    return read_config(config.init_from)


def load_config(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """The run that a TOML file with overrides describes: see `read_values`.

    Raises `SpecError` (file, override) or `pydantic.ValidationError` (values).
    """
    return TrainConfig.model_validate(read_values(path, overrides))


def read_values(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a TOML file and apply overrides such as `parallel.cp=2`, whose values are TOML (bare words are strings).

    Raises `SpecError`: a file or an override that cannot be read.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror}", hint="give the path of a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(
            f"{path} is not TOML: {error}", hint="correct the file; its keys are those of TrainConfig"
        ) from None
    for override in overrides:
        _apply(values, override)
    if old := list(_old_keys(values)):
        raise SpecError(
            f"{path}: {', '.join(f'{place} is now {new}' for place, new in old)}", hint="give these keys the new names"
        )
    return values


def _old_keys(values: dict[str, Any], section: str = "") -> Iterator[tuple[str, str]]:
    """Keys that had another name before, each with its section, and the new name."""
    for key, value in values.items():
        if key in RENAMED:
            yield section + key, section + RENAMED[key]
        if isinstance(value, dict):
            yield from _old_keys(value, f"{section}{key}.")


def _apply(values: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    *sections, key = name.strip().split(".")
    if not equals or not key:
        raise SpecError(f"--set {override!r} is not of the form section.key=value", hint="such as --set parallel.cp=2")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise SpecError(
                f"--set {override!r}: {section} is a value, not a section", hint=f"set it whole: --set {section}=value"
            )
    try:
        values[key] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        values[key] = None if text == "none" else text
