"""Derive the topology, planner and sizes of a run from its configuration. No torch."""

import math
from collections import Counter

from longspan.advise import Planner
from longspan.advise.run_shape import RunShape, stage_layers
from longspan.comm.torchrun import local_world_size, world_size
from longspan.model.chunks import loss_chunk
from longspan.model.model_config import ModelConfig
from longspan.model.transformers_config import TransformersConfig
from longspan.names import DTYPES
from longspan.plan.layout import slots_of
from longspan.topology import ExpertsShape, ModelShape, Nodes, Topology
from longspan.train.train_config import TrainConfig

_INTERLEAVED = 2
"""Default number of stages per rank under schedule "interleaved"."""
_HEAD_DIM = 128
"""Head dim without a model."""


def topology_of(config: TrainConfig) -> Topology:
    """Return the topology of a run. Default world size: WORLD_SIZE under torchrun, else tp x pp x cp x dp."""
    p = config.parallel
    world = world_size() or p.tp * p.pp * p.cp * (p.dp or 1)
    return Topology.of(world, dp=p.dp, tp=p.tp, pp=p.pp, cp=p.cp, ep=p.ep, dp_replicate=p.dp_replicate, order=p.order)


def nodes_of(config: TrainConfig, topology: Topology) -> Nodes:
    """Return the nodes of a run. Default ranks per node: LOCAL_WORLD_SIZE under torchrun, else the world size."""
    local = config.parallel.ranks_per_node or local_world_size() or topology.world
    whole = config.parallel.ranks_per_node is None and topology.world % local
    return Nodes(topology, topology.world if whole else local)


def planner_of(config: TrainConfig, model: ModelConfig | TransformersConfig | None, topology: Topology) -> Planner:
    """Make the planner of a run, for commands and ranks alike. Without a model: one layer with a full mask."""
    parallel = config.parallel
    heads = None if model is None else model.heads
    # Models of transformers reshape their tensors in ways that need a token on every rank.
    least = 1 if isinstance(model, TransformersConfig) else None
    return Planner.with_costs(
        parallel.costs,
        ranks=parallel.cp,
        layout=parallel.layout,
        route=parallel.route,
        heads=None if heads is None else (heads[0] // parallel.tp, heads[1] // parallel.tp),
        head_dim=(None if model is None else model.head_dim) or _HEAD_DIM,
        itemsize=DTYPES[config.dtype].itemsize,
        inner=parallel.inner,
        comm_dtype=parallel.comm_dtype,
        pad_to_multiple_of=pad_to_multiple_of(config) or least,
        tp=parallel.tp,
        ranks_per_node=nodes_of(config, topology).together("cp"),
        layers={"full": 1} if model is None else layers_by_mask(model),
    )


def layers_by_mask(model: ModelConfig | TransformersConfig) -> dict[str, int]:
    """Return name of a mask -> number of layers that use it."""
    if isinstance(model, ModelConfig):
        return dict(Counter(model.mask_names))
    from longspan.hf.mask_kinds import kinds_of_layers  # loads torch and transformers

    return kinds_of_layers(model.text)


def run_shape(config: TrainConfig, model: ModelConfig | TransformersConfig, device_type: str = "cpu") -> RunShape:
    """Return the sizes of a run on a device type ("cpu" or "cuda"), from which memory and traffic are computed."""
    topology, parallel = topology_of(config), config.parallel
    return RunShape(
        model=shape_of(model),
        topology=topology,
        planner=planner_of(config, model, topology),
        seq_len=config.data.seq_len,
        micro_batch_size=config.micro_batch_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        dtype=config.dtype,
        sp=parallel.sp,
        recompute=config.recompute,
        dropout=config.dropout > 0,
        wrapper=parallel.wrapper,
        schedule=parallel.schedule,
        stages_per_rank=stages_per_rank(config),
        defer_reduction=parallel.defer_reduction,
        device_type=device_type,
        loss_chunk=loss_chunk(device_type, model.vocab_size // parallel.tp),
    )


def stages_per_rank(config: TrainConfig) -> int:
    """Number of pipeline stages on each rank."""
    return config.parallel.stages_per_rank or (_INTERLEAVED if config.parallel.schedule == "interleaved" else 1)


def stages_of(config: TrainConfig, model: ModelConfig) -> list[range]:
    """Return the layer indices of every pipeline stage, in order."""
    return stage_layers(model.num_layers, config.parallel.pp * stages_per_rank(config))


def pad_to_multiple_of(config: TrainConfig) -> int | None:
    """Multiple to which each rank's local sequence length is padded, or None.

    SP needs a multiple of tp. A pipeline needs equal lengths in all micro-batches.
    """
    parallel = config.parallel
    multiple = math.lcm(parallel.pad_to_multiple_of or 1, parallel.tp if parallel.sp else 1)
    if parallel.pp > 1:
        # The multiple is the local length of the longest row, so every row is padded to that length.
        return slots_of(config.micro_batch_size * config.data.seq_len, parallel.cp, multiple)
    return multiple if multiple > 1 else parallel.pad_to_multiple_of


def shape_of(model: ModelConfig | TransformersConfig) -> ModelShape:
    """Convert a decoder's configuration to a `ModelShape`. For a model of transformers only heads, layers and vocabulary."""
    if isinstance(model, TransformersConfig):
        heads = model.heads or (1, 1)
        return ModelShape(
            model.num_layers,
            model.hidden_size,
            *heads,
            head_dim=model.head_dim or _HEAD_DIM,
            vocab_size=model.vocab_size,
        )
    experts = model.experts
    return ModelShape(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        vocab_size=model.vocab_size,
        intermediate_size=model.intermediate_size or 0,
        experts=None
        if experts is None
        else ExpertsShape(
            experts.num_experts,
            experts.top_k,
            experts.intermediate_size,
            experts.shared_intermediate_size,
            bool(experts.balance),
        ),
        qk_norm=model.qk_norm,
        tie_embeddings=model.tie_embeddings,
    )
