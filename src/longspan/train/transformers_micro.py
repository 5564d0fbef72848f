"""One rank's part of a micro-batch through a model of transformers, and what a run refuses for such a model."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from longspan.cp.context import ContextParallel
from longspan.data import Batch
from longspan.errors import SpecError
from longspan.model import ModelConfig, TransformersConfig, count_targets
from longspan.train.model import empty_transformers
from longspan.train.train_config import TrainConfig


@dataclass(frozen=True, eq=False)
class Passed:
    """The result of a forward on one rank. Sums over the ranks of the CP group are those of the micro-batch."""

    loss_sum: Tensor
    """Sum of this rank's token losses."""
    router_loss: Tensor | None
    """This rank's share of the router's load-balancing loss, without its coefficient. None if the model has none."""
    num_targets: int
    """Number of this rank's targets, counted on the host."""


def check_transformers(config: TrainConfig, model: TransformersConfig) -> None:
    """Raise `SpecError` for settings that a run of a model of transformers does not have."""
    parallel = config.parallel
    degrees = {name: getattr(parallel, name) for name in ("tp", "pp", "ep")}
    if above := {name: size for name, size in degrees.items() if size > 1}:
        given = ", ".join(f"parallel.{name}={size}" for name, size in above.items())
        raise SpecError(
            f"{given} for model_type {model.model_type!r}: a model of transformers is sharded over dp and cp only",
            hint="set these degrees to 1, and parallel.cp or parallel.dp higher",
        )
    if parallel.is_staged:
        raise SpecError(
            f"route {parallel.route!r} for model_type {model.model_type!r}: only longspan's decoder projects heads in stages",
            hint='set parallel.route="ulysses"',
        )
    if config.compile:
        raise SpecError(
            f"compile=true for model_type {model.model_type!r}: only blocks of longspan's decoder are compiled",
            hint="set compile=false; docs/guides/huggingface.md compiles a model in a loop of your own",
        )
    if config.dropout:
        raise SpecError(
            f"dropout={config.dropout} for model_type {model.model_type!r}: only longspan's decoder draws it by token",
            hint="set dropout=0",
        )


def probe_model(config: TrainConfig, model: ModelConfig | TransformersConfig) -> None:
    """Raise `SpecError` for a model of transformers that is not exact on a sharded sequence: see `longspan.hf.check`."""
    if isinstance(model, TransformersConfig):
        with_longspan(empty_transformers(config, model), config.data.seq_len)


def with_longspan(model: Any, seq_len: int) -> Any:
    """Set longspan's attention in a model of transformers, and return the model. Raises `SpecError`: see `longspan.hf.check`."""
    from longspan import hf  # loads transformers, which a decoder of longspan does not need

    hf.check(model, seq_len)
    model.set_attn_implementation(hf.NAME)
    return model


def run_transformers(cp: ContextParallel, stage: nn.Module, batch: Batch) -> Passed:
    """Run the model on this rank's tokens of a batch. Backward may follow. Collective over the CP group.

    The caller scales the loss by the targets of the global batch and by the wrapper's average, as for a decoder of longspan.
    """
    from longspan import hf  # loads transformers, which a decoder of longspan does not need

    if batch.parents:
        raise SpecError(
            "a batch of documents that continue others needs masks that only longspan's decoder has",
            hint="give documents without parents",
        )
    with hf.sequence(cp, stage, batch, num_targets=1) as sequence:
        out = stage(**sequence.inputs)
    labels = sequence.shards.shard(batch.tensors()["labels"], dim=1)
    return Passed(out.loss, getattr(out, "aux_loss", None), count_targets(labels))
