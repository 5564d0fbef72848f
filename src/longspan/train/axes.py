"""What the axes of a run leave to each rank: its place, its layers, its heads, its slots. No torch."""

import math
from itertools import pairwise

from longspan.comm.torchrun import local_world_size, world_size
from longspan.model.model_config import ModelConfig
from longspan.plan.layout import slots_of
from longspan.topology import ModelShape, Topology
from longspan.train.train_config import TrainConfig

_INTERLEAVED = 2
"""Stages of a rank under the schedule of that name, if not told."""


def topology_of(config: TrainConfig) -> Topology:
    """The degrees of a run: in the world that torchrun made, or of as many ranks as they ask for."""
    p = config.parallel
    world = world_size() or p.tp * p.pp * p.cp * (p.dp or 1)
    return Topology.of(world, dp=p.dp, tp=p.tp, pp=p.pp, cp=p.cp, ep=p.ep, replicas=p.replicas, order=p.order)


def ranks_per_node(config: TrainConfig, topology: Topology) -> int:
    """Ranks that a fast link joins, as far as is told; without a launcher all are on this machine."""
    local = config.parallel.ranks_per_node or local_world_size() or topology.world
    return topology.world if config.parallel.ranks_per_node is None and topology.world % local else local


def stages_per_rank(config: TrainConfig) -> int:
    """Stages of a pipeline that each rank holds."""
    return config.parallel.stages_per_rank or (_INTERLEAVED if config.parallel.schedule == "interleaved" else 1)


def stage_layers(config: TrainConfig, model: ModelConfig) -> list[range]:
    """The layers of every stage, in order; where they do not divide, the first stages have one more."""
    stages = config.parallel.pp * stages_per_rank(config)
    each, more = divmod(model.num_layers, stages)
    starts = [stage * each + min(stage, more) for stage in range(stages + 1)]
    return [range(*edges) for edges in pairwise(starts)]


def heads_of(config: TrainConfig, model: ModelConfig) -> tuple[int, int]:
    """Query and KV heads of one rank, which is what routes may move."""
    return model.num_heads // config.parallel.tp, model.num_kv_heads // config.parallel.tp


def slots_multiple_of(config: TrainConfig) -> int | None:
    """What the slots of a rank are a multiple of: sequence parallelism cuts them by tp, a pipeline needs the same every time."""
    parallel = config.parallel
    multiple = math.lcm(parallel.slots_multiple_of or 1, parallel.tp if parallel.sp else 1)
    if parallel.pp > 1:
        # The slots of the longest row: no row has more, so this one multiple is what they all have.
        return slots_of(config.rows_per_batch * config.data.row_tokens, parallel.cp, multiple)
    return multiple if multiple > 1 else parallel.slots_multiple_of


def shape_of(model: ModelConfig) -> ModelShape:
    """What a topology has to divide."""
    experts = model.experts
    return ModelShape(
        model.num_layers, model.num_heads, model.num_kv_heads,
        (experts.shared_ffn_width if experts else model.ffn_width) or 0, model.vocab_size,
        experts.num_experts if experts else 0,
    )  # fmt: skip
