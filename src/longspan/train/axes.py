"""A run's configuration as the plain records that plan it: its topology, its planner, its sizes. No torch."""

import math
from collections import Counter

from longspan.advise import Planner
from longspan.advise.run_shape import RunShape, stage_layers
from longspan.comm.torchrun import local_world_size, world_size
from longspan.model.chunks import loss_chunk
from longspan.model.model_config import ModelConfig
from longspan.names import DTYPES
from longspan.plan.layout import slots_of
from longspan.topology import ExpertsShape, ModelShape, Nodes, Topology
from longspan.train.train_config import TrainConfig

_INTERLEAVED = 2
"""Stages of a rank under schedule "interleaved", if not given."""
_HEAD_DIM = 128
"""Head dim where no model says."""


def topology_of(config: TrainConfig) -> Topology:
    """The degrees of a run: in the world that torchrun made, or of as many ranks as they ask for."""
    p = config.parallel
    world = world_size() or p.tp * p.pp * p.cp * (p.dp or 1)
    return Topology.of(world, dp=p.dp, tp=p.tp, pp=p.pp, cp=p.cp, ep=p.ep, dp_replicate=p.dp_replicate, order=p.order)


def nodes_of(config: TrainConfig, topology: Topology) -> Nodes:
    """The nodes of a run, of `parallel.ranks_per_node` ranks. Default: LOCAL_WORLD_SIZE, or one node without a launcher."""
    local = config.parallel.ranks_per_node or local_world_size() or topology.world
    whole = config.parallel.ranks_per_node is None and topology.world % local
    return Nodes(topology, topology.world if whole else local)


def planner_of(config: TrainConfig, model: ModelConfig | None, topology: Topology) -> Planner:
    """The planner of a run, for `pack`, `--dry-run`, `longspan plan` and the ranks alike. `model` None: one layer."""
    parallel = config.parallel
    return Planner.with_costs(
        parallel.costs,
        ranks=parallel.cp,
        layout=parallel.layout,
        route=parallel.route,
        heads=None if model is None else (model.num_heads // parallel.tp, model.num_kv_heads // parallel.tp),
        head_dim=_HEAD_DIM if model is None else model.head_dim,
        itemsize=DTYPES[config.dtype].itemsize,
        inner=parallel.inner,
        comm_dtype=parallel.comm_dtype,
        pad_to_multiple_of=pad_to_multiple_of(config),
        tp=parallel.tp,
        ranks_per_node=nodes_of(config, topology).together("cp"),
        layers={"full": 1} if model is None else Counter(model.mask_names),
    )


def run_shape(config: TrainConfig, model: ModelConfig, device_type: str = "cpu") -> RunShape:
    """A run as its memory and traffic are worked out from, on a device of this type ("cpu" or "cuda")."""
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
    """Stages of a pipeline that each rank holds."""
    return config.parallel.stages_per_rank or (_INTERLEAVED if config.parallel.schedule == "interleaved" else 1)


def stages_of(config: TrainConfig, model: ModelConfig) -> list[range]:
    """The layers of every pipeline stage, in order."""
    return stage_layers(model.num_layers, config.parallel.pp * stages_per_rank(config))


def pad_to_multiple_of(config: TrainConfig) -> int | None:
    """A number that the slots of a rank are a multiple of: SP cuts them by tp, and a pipeline needs the same every time."""
    parallel = config.parallel
    multiple = math.lcm(parallel.pad_to_multiple_of or 1, parallel.tp if parallel.sp else 1)
    if parallel.pp > 1:
        # The slots of the longest row: no row has more, so this one multiple is what they all have.
        return slots_of(config.micro_batch_size * config.data.seq_len, parallel.cp, multiple)
    return multiple if multiple > 1 else parallel.pad_to_multiple_of


def shape_of(model: ModelConfig) -> ModelShape:
    """A decoder's configuration as plain numbers."""
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
        windows=model.windows,
        qk_norm=model.qk_norm,
        tie_embeddings=model.tie_embeddings,
    )
