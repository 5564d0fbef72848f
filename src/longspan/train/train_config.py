"""The configuration of a run: a frozen record, read from a TOML file and `--set` overrides and validated when made."""

import tomllib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from longspan.data.data_config import DataConfig
from longspan.errors import SpecError
from longspan.model.model_config import ModelConfig
from longspan.model.transformers_config import FolderChanges, TransformersConfig, read_transformers_config
from longspan.names import AUTO, BALANCED, COMM_DTYPES, DTYPES, KERNELS, LAYOUTS, RENAMED, ROUTES, check_name

Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Dtype = Annotated[str, AfterValidator(partial(check_name, "dtype", known=DTYPES))]
LayoutName = Annotated[str, AfterValidator(partial(check_name, "layout", known=LAYOUTS))]
RouteName = Annotated[str, AfterValidator(partial(check_name, "route", known=(AUTO, *ROUTES)))]
CommDtype = Annotated[str, AfterValidator(partial(check_name, "comm_dtype", known=COMM_DTYPES))]
KernelName = Annotated[str, AfterValidator(partial(check_name, "kernel", known=(AUTO, *KERNELS)))]


def _model_section(value: Any) -> Any:
    """Make the record that a [model] section is, by its keys."""
    if not isinstance(value, dict):
        return value
    if "model_type" in value:
        return TransformersConfig.model_validate(value)
    changes = bool(value) and value.keys() <= FolderChanges.model_fields.keys()
    return (FolderChanges if changes else ModelConfig).model_validate(value)


ModelSection = Annotated[ModelConfig | TransformersConfig | FolderChanges, BeforeValidator(_model_section)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ParallelConfig(_Record):
    """Parallel degrees and how the ranks communicate. World size = dp x tp x pp x cp.

    Experts are sharded over ep of the dp x tp x cp ranks of a pipeline stage.
    """

    cp: Positive = 1
    """Context-parallel degree: number of ranks that share one sequence. Default: 1."""
    dp: Positive | None = None
    """Data-parallel degree: number of groups of ranks that read different rows.
    Default: world size / (tp x pp x cp) under torchrun, else 1."""
    tp: Positive = 1
    """Tensor-parallel degree: number of ranks that share heads, MLP features and vocabulary. Default: 1."""
    sp: bool = True
    """Use Megatron's sequence parallelism: norms, residuals and dropout run on 1/tp of a rank's tokens. No effect at
    tp=1. Default: true."""
    pp: Positive = 1
    """Pipeline-parallel degree. A step runs `gradient_accumulation_steps` micro-batches through the pipeline.
    Default: 1."""
    schedule: Literal["1f1b", "interleaved", "zero-bubble"] = "1f1b"
    """Pipeline schedule. Default: "1f1b"."""
    stages_per_rank: Positive | None = None
    """Number of pipeline stages on each rank. Default: 2 for schedule "interleaved", else 1."""
    ep: Positive = 1
    """Expert-parallel degree: number of ranks that share the experts of a layer. Default: 1."""
    dp_replicate: Positive = 1
    """HSDP: number of replicas of the sharded weights, a divisor of dp.
    Default: 1: weights are sharded over all of dp x cp."""
    order: str = "tp-cp-ep-dp-pp"
    """Order of the axes in the world, fastest-varying (neighbouring ranks) first. Default: "tp-cp-ep-dp-pp"."""
    ranks_per_node: Positive | None = None
    """Number of consecutive ranks joined by a fast link, such as NVLink. A TP group must lie within them.
    Default: LOCAL_WORLD_SIZE."""
    layout: LayoutName = "zigzag"
    """Which rank holds which tokens: "contiguous", "zigzag", "striped" or "balanced". Default: "zigzag"."""
    route: RouteName = "ring"
    """How keys and values reach the queries: see `docs/concepts/routes.md`. "auto" takes the one with the lowest estimate.
    Default: "ring"."""
    inner: Positive | None = None
    """Inner degree of a two-level route, such as "usp". Default: the largest degree that KV heads and a node allow."""
    heads_per_stage: Positive | None = None
    """Number of query heads that route "upipe" attends at a time. Default: the fewest that fit."""
    comm_dtype: CommDtype | None = None
    """Communication dtype, "bf16" or "fp8": keys and values are rounded to this dtype before they are sent.
    Default: `dtype`."""
    costs: Path | None = None
    """File written by `longspan bench calibrate` on this cluster. Route "auto" estimates times from these costs; layout
    "balanced" keeps a document on one rank if splitting the document would cost more time than it saves.
    Default: typical costs for "auto"; layout "balanced" may split every document."""
    kernel: KernelName = AUTO
    """Attention kernel. Default: "auto", the fastest that supports the device, the dtype and the tile."""
    pad_to_multiple_of: Positive | None = None
    """Pad each rank's local sequence length, in tokens, to a multiple with padding slots.
    Default: no padding beyond what tp and pp need."""
    wrapper: Literal["fsdp", "ddp"] = "fsdp"
    """"fsdp": shard parameters, gradients and moments over dp x cp (FSDP2). "ddp": replicate all three; requires
    fp32 or fp64, and tp, pp, ep and dp_replicate of 1. Default: "fsdp"."""
    defer_reduction: bool = True
    """true: reduce gradients over ranks once per step, after the last micro-batch. false: reduce after every
    micro-batch, so that a rank keeps only its shard of the gradients. Default: true."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the run. On CUDA every rank of a machine needs its own device. Default: "auto", CUDA if available."""
    threads: Positive | None = None
    """CPU threads of each rank. Default: cores / ranks on this machine."""
    timeout_seconds: Annotated[float, Field(gt=0)] = 600.0
    """Timeout of every collective and message of every group, in seconds. Default: 600."""

    @property
    def is_staged(self) -> bool:
        """Whether the route is "upipe", which projects and attends a few heads at a time."""
        return self.route != AUTO and ROUTES[self.route].staged


class OptimConfig(_Record):
    """AdamW; linear warm-up, then cosine decay to `min_lr_ratio * lr`; clipping of the global gradient norm."""

    lr: Annotated[float, Field(gt=0)] = 3e-4
    """Peak learning rate. Default: 3e-4."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Weight decay of matrices; norm weights have none. Default: 0.1."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Length of the linear warm-up, in optimizer steps. Default: 0."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Final learning rate / `lr`. Default: 0.1."""
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Upper bound of the global gradient norm; None: no clipping. Default: 1.0."""


class TrainConfig(_Record):
    """The configuration of a run. `longspan train --help` shows how to set a value."""

    data: DataConfig
    model: ModelSection | None = None
    """The model, with random initial weights: a decoder of longspan, or with `model_type` and `config` a model of transformers.
    Beside `init_from`: changes of the folder's model. One of `model` and `init_from` is required."""
    init_from: Path | None = None
    """Hugging Face folder with the initial weights, of any causal language model."""
    parallel: ParallelConfig = ParallelConfig()
    optim: OptimConfig = OptimConfig()
    run_dir: Path = Path("runs/default")
    """Folder for metrics, TensorBoard events and checkpoints. Default: "runs/default"."""
    steps: Positive = 100
    """Number of optimizer steps. Default: 100."""
    micro_batch_size: Positive = 1
    """Rows of `data.seq_len` tokens in a micro-batch, concatenated on one token axis. Default: 1."""
    gradient_accumulation_steps: Positive = 1
    """Micro-batches per optimizer step. Global batch = micro_batch_size x dp x gradient_accumulation_steps rows.
    Default: 1."""
    dropout: Fraction = 0.0
    """Dropout probability on the outputs of attention and MLP. The dropped elements depend only on the seed and the
    token, so losses are the same at every degree. Default: 0."""
    dtype: Dtype = "fp32"
    """Dtype of activations and compute weights. bf16 and fp16 keep fp32 master weights, gradients and moments.
    Default: "fp32"."""
    recompute: Literal["none", "block", "full"] = "none"
    """Activation checkpointing. "block": keep each block's input and attention output and recompute the rest in
    backward, without repeating communication. "full": keep only the input, and repeat attention too.
    Default: "none"."""
    compile: bool = False
    """torch.compile every block as one graph. Every new local sequence length recompiles; set
    parallel.pad_to_multiple_of to reduce the number of lengths. Default: false."""
    eval_every: Positive | None = None
    """Optimizer steps between evaluations on held-out rows. An evaluation also follows the last step.
    Default: no evaluation."""
    eval_rows: Positive | None = 8
    """Held-out rows per evaluation; None: all. Default: 8."""
    checkpoint_every: Positive | None = None
    """Optimizer steps between checkpoints. A checkpoint is also written after the last step. Default: no checkpoint."""
    imbalance_limit: Annotated[float, Field(gt=1)] | None = 1.25
    """Warn if the max / mean over ranks of visible pairs, or of time in attention, exceeds this ratio for ten
    consecutive steps; None: never. Default: 1.25."""
    preflight: bool = False
    """Before training, run one step on the longest row the data can give, report every rank's peak memory, and undo the
    step. Default: false."""
    resume: bool = False
    """Resume from the newest checkpoint in `run_dir`. Default: false."""
    export: bool = False
    """After the last step, write the weights as a Hugging Face folder to `run_dir/model`. Default: false."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the initial weights and of dropout. Default: 0."""

    _needs_model: ClassVar[bool] = True

    @model_validator(mode="after")
    def _check(self) -> "TrainConfig":
        starts = [self.model is not None and not isinstance(self.model, FolderChanges), self.init_from is not None]
        if all(starts) or (self._needs_model and not any(starts)):
            raise SpecError(
                "both model and init_from are given" if all(starts) else "neither model nor init_from is given",
                hint="give [model] to start from random weights, or init_from to start from a folder",
            )
        if isinstance(self.model, FolderChanges) and self.init_from is None:
            raise SpecError(
                f"[model] has only {', '.join(sorted(self.model.model_fields_set))}, and init_from is not given",
                hint="give the sizes of the model too, or init_from to change the model of a folder",
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
                f'parallel.wrapper="ddp" with {given}: DDP supports only dp and cp',
                hint='use parallel.wrapper="fsdp"',
            )
        if self.parallel.pp > 1 and not self.parallel.defer_reduction:
            raise SpecError(
                f"parallel.defer_reduction=false with parallel.pp={self.parallel.pp}: a pipeline reduces gradients once a step",
                hint="set parallel.defer_reduction=true",
            )
        staged = self.parallel.is_staged
        if staged and self.parallel.tp > 1:
            raise SpecError(
                f'route "{self.parallel.route}" with parallel.tp={self.parallel.tp}: this route needs unsharded projections',
                hint='set parallel.tp=1, or parallel.route="ulysses"',
            )
        if self.compile and (self.parallel.tp > 1 or self.parallel.pp > 1):
            raise SpecError(
                f"compile=true with parallel.tp={self.parallel.tp}, parallel.pp={self.parallel.pp} is not supported",
                hint="set compile=false, or parallel.tp=1 and parallel.pp=1",
            )
        if self.compile and isinstance(self.model, ModelConfig) and self.model.experts is not None:
            raise SpecError(
                "compile=true with experts is not supported: the number of rows of each expert is read on the host",
                hint="set compile=false",
            )
        if self.parallel.schedule == "zero-bubble" and self.recompute != "none":
            raise SpecError(
                f'recompute="{self.recompute}" with schedule "zero-bubble": backward has two parts, and each would recompute '
                "the block",
                hint='set recompute="none", or parallel.schedule to "1f1b" or "interleaved"',
            )
        if self.parallel.heads_per_stage is not None and not staged:
            raise SpecError(
                f"parallel.heads_per_stage={self.parallel.heads_per_stage} has no effect on route {self.parallel.route!r}",
                hint=f'remove it, or set parallel.route="{next(name for name, route in ROUTES.items() if route.staged)}"',
            )
        if self.parallel.costs is not None and self.parallel.route != AUTO and self.parallel.layout != BALANCED:
            raise SpecError(
                f"parallel.costs={self.parallel.costs} has no effect on route {self.parallel.route!r} and "
                f"layout {self.parallel.layout!r}",
                hint='remove it, or set parallel.route="auto" or parallel.layout="balanced"',
            )
        if staged and self.recompute != "none":
            raise SpecError(
                f'recompute="{self.recompute}" with route "{self.parallel.route}": this route already recomputes attention',
                hint='set recompute="none", or another route',
            )
        if staged and self.compile:
            raise SpecError(
                f'compile=true with route "{self.parallel.route}": this route is not a registered operator',
                hint="set compile=false, or another route",
            )
        if self.optim.warmup_steps > self.steps:
            raise SpecError(
                f"optim.warmup_steps {self.optim.warmup_steps} is more than steps {self.steps}",
                hint="lower optim.warmup_steps or raise steps",
            )
        return self


class PackConfig(TrainConfig):
    """`TrainConfig` for `longspan pack`, where both `model` and `init_from` may be missing."""

    _needs_model: ClassVar[bool] = False


def model_config(config: TrainConfig) -> ModelConfig | TransformersConfig:
    """Return the model of a run, from [model] or the folder `init_from`: of longspan's decoder, or of transformers."""
    if config.model is not None and not isinstance(config.model, FolderChanges):
        return config.model
    assert config.init_from is not None, "TrainConfig requires model or init_from"
    changes = config.model or FolderChanges()
    from longspan.model import is_served, read_config  # loads torch, which a configuration with [model] does not need

    if changes.implementation == "transformers" or (
        changes.implementation == "auto" and not is_served(config.init_from, changes)
    ):
        return read_transformers_config(config.init_from, changes)
    return read_config(config.init_from, changes)


def load_config(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Return the configuration in a TOML file with overrides applied: see `read_values`.

    Raises `SpecError` for the file or an override, `pydantic.ValidationError` for a value.
    """
    return TrainConfig.model_validate(read_values(path, overrides))


def read_values(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a TOML file and apply overrides such as `parallel.cp=2`. An override's value is TOML, or a bare string.

    Raises `SpecError` if the file or an override cannot be parsed, or a key has its old name.
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
        raise SpecError(f"{path}: {', '.join(f'{place} is now {new}' for place, new in old)}", hint="rename these keys")
    return values


def _old_keys(values: dict[str, Any], section: str = "") -> Iterator[tuple[str, str]]:
    """Yield (old key, new key) of every renamed key in `values`, both with their section."""
    for key, value in values.items():
        if key in RENAMED:
            yield section + key, section + RENAMED[key]
        if isinstance(value, dict):
            yield from _old_keys(value, f"{section}{key}.")


def _apply(values: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    *sections, key = name.strip().split(".")
    if not equals or not key:
        raise SpecError(
            f"--set {override!r} is not of the form section.key=value", hint="write it as --set parallel.cp=2"
        )
    for section in sections:
        if values.get(section, {}) is None:  # set to none by an earlier override
            values[section] = {}
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise SpecError(
                f"--set {override!r}: {section} is a value, not a section",
                hint=f"set the value itself: --set {section}=value",
            )
    try:
        values[key] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        values[key] = None if text == "none" else text
