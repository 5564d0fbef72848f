"""One optimizer step under context and data parallelism: the part that `longspan verify` replays.

    rows of this dp rank -> shard -> model (attention runs the plan) -> sum of token losses -> backward -> AdamW

Labels and positions come from the global row and are sharded like the ids. The gradient is that of the mean over all valid
tokens of the global batch, whatever the wrapper averages by.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from longspan.attention.context import ContextParallel
from longspan.attention.context import Sequence as Sharded
from longspan.attention.staged import Projections, Transform
from longspan.data import Batch
from longspan.model import Attend, Decoder, ModelConfig, SelfAttention, WholeLayer, count_targets, mean_loss_scale
from longspan.model.config import window_of
from longspan.plan import BALANCED, STAGED, Costs, Layout, Mask, head_stages, plan_attention
from longspan.plan.choose import reckon
from longspan.plan.mask import Band
from longspan.plan.wire import ITEMSIZES
from longspan.train.config import TrainConfig
from longspan.train.model import DTYPES
from longspan.train.optim import LossScale, learning_rate, make_optimizer, update


@dataclass(frozen=True)
class StepResult:
    """What a step did. `loss` is the mean over the `targets` valid tokens of the global batch, the same on all ranks."""

    loss: float
    grad_norm: float
    learning_rate: float
    targets: int
    tokens: int
    skipped: bool


class TrainStep:
    """A model, its optimizer and the groups it trains over. Made from parts; does nothing until called."""

    def __init__(self, model: Decoder, mesh: DeviceMesh, config: TrainConfig) -> None:
        self.config = config
        self.model_config = model.config
        self.names = tuple(dict.fromkeys(model.config.mask_names))
        heads = (model.config.num_heads, model.config.num_kv_heads)
        parallel = config.parallel
        costs, whole_below = costs_of(config, model.config)
        self.cp = ContextParallel(
            mesh["cp"],
            layout=parallel.layout,
            route=parallel.route,
            heads=heads,
            inner=parallel.inner,
            kernel=parallel.kernel,
            wire_dtype=parallel.wire_dtype,
            slots_multiple_of=parallel.slots_multiple_of,
            costs=costs,
            layers=Counter(model.config.mask_names) if parallel.layout == BALANCED else None,
            whole_below=whole_below,
        )
        self.dp_group = mesh["dp"].get_group()
        world = dist.group.WORLD
        assert world is not None, "a mesh exists, so a world does"
        assert mesh.size() == dist.get_world_size(), "dp x cp is the world"
        self.everyone = DeviceMesh.from_group(world, mesh.device_type, mesh_dim_names=("dp_cp",))
        self.device = torch.device(mesh.device_type)
        self.module = wrap(model.to(self.device), self.everyone, config)
        self.optimizer = make_optimizer(self.module, config.optim)
        self.scale = LossScale.of_dtype(config.dtype, self.everyone.size())
        self.own_targets = 0
        """Of the targets of the latest step, those on this rank's shards."""

    def __call__(self, batches: Sequence[Batch], step: int) -> StepResult:
        """Accumulate over this dp rank's micro-batches and update the weights. Collective over all ranks."""
        self.own_targets = 0
        loss, targets, tokens = self.backward(batches)
        rate = learning_rate(self.config.optim, step, self.config.steps)
        norm = update(self.module, self.optimizer, self.scale, rate, self.config.optim.clip_norm)
        return StepResult(loss, norm, rate, targets, tokens, skipped=not math.isfinite(norm))

    def backward(self, batches: Sequence[Batch]) -> tuple[float, int, int]:
        """Fresh gradients of the global token mean (times the loss scale); that mean, its tokens, and all tokens read."""
        self.optimizer.zero_grad()
        targets, tokens = self._sum_over_dp(
            [sum(batch.num_targets for batch in batches), sum(batch.seq_len for batch in batches)]
        )
        factor = mean_loss_scale(targets, self.everyone.size())
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for index, batch in enumerate(batches):
            self._sync_gradients(index == len(batches) - 1)
            loss_sum = self.loss_sum(batch)
            (loss_sum * (factor * self.scale.value)).backward()
            total += loss_sum.detach().double()
        return self._mean(total, targets), targets, tokens

    def loss_sum(self, batch: Batch) -> torch.Tensor:
        """Sum of the losses of this rank's tokens of a global row; collective over the CP group."""
        with self.cp.sequence(masks_of(batch, self.names), ids=batch.digest()) as sequence:
            local = sequence.shard(batch.tensors(), dim=1)
            self.own_targets += count_targets(local["labels"])
            local = {name: tensor.to(self.device) for name, tensor in local.items()}
            loss: torch.Tensor = self.module(
                local["input_ids"],
                local["position_ids"],
                self._attend(sequence),
                labels=local["labels"],
            )
        return loss

    def _attend(self, sequence: Sharded) -> Attend:
        if self.cp.route != STAGED:
            return lambda q, k, v, mask: sequence.attention(q, k, v, mask=mask)
        heads_per_stage = self.config.parallel.heads_per_stage

        def run(x: torch.Tensor, layer: SelfAttention, rotate: Transform, mask: str) -> torch.Tensor:
            maps = projections_of(layer, rotate)
            return sequence.projected_attention(x, maps, mask=mask, heads_per_stage=heads_per_stage)

        return WholeLayer(run)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch | None]) -> float:
        """Token-weighted mean loss over the rows of all dp ranks; ranks without a row (None) take part with nothing."""
        # A rank without a row of its own still gathers weights with the others: it runs one token, which has no target.
        rows = [batch or Batch.from_documents([[0]]) for batch in batches]
        (targets,) = self._sum_over_dp([sum(batch.num_targets for batch in rows)])
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for batch in rows:
            total += self.loss_sum(batch).double()
        return self._mean(total, targets)

    def _mean(self, total: torch.Tensor, targets: int) -> float:
        """The loss sums of all ranks over the global number of targets; 0 without any. Collective."""
        dist.all_reduce(total, group=self.everyone.get_group())
        return float(total) / targets if targets else 0.0

    def _sum_over_dp(self, counts: Sequence[int]) -> list[int]:
        """Every CP rank knows the whole row, so only the dp ranks add up."""
        total = torch.tensor(counts, dtype=torch.int64, device=self.device)
        dist.all_reduce(total, group=self.dp_group)
        return [int(count) for count in total.tolist()]

    def _sync_gradients(self, last: bool) -> None:
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(last)
        elif isinstance(self.module, DistributedDataParallel):
            self.module.require_backward_grad_sync = last


def masks_of(batch: Batch, names: Sequence[str]) -> dict[str, Mask]:
    """The masks of a packed row by the names that layers use: causal within documents, full or with a window."""
    return {name: mask_of(batch, window_of(name)) for name in names}


def mask_of(batch: Batch, window: int | None = None) -> Mask:
    """Causal within each document, and to all of its parent: what `Mask.shared_prefix` is for one prompt.

    A window counts positions. Between a document and its parent those are nearer than their places on the token axis, by
    the tokens that lie between the two, so the bound of `i - j` is farther by as much.
    """
    mask = Mask.documents(batch.lengths, window=window)
    if not batch.parents:
        return mask
    stops = np.cumsum(batch.lengths).tolist()
    bands: list[Band] = [tuple(band) for band in mask.array.tolist()]
    for stop, length, parent in zip(stops, batch.lengths, batch.parents, strict=True):
        if parent >= 0:
            start, seen = stop - length, stops[parent]
            hi = None if window is None else window - 1 + start - seen
            bands.append((start, stop, seen - batch.lengths[parent], seen, None, hi))
    return Mask.bands(batch.seq_len, bands)


def costs_of(config: TrainConfig, model: ModelConfig) -> tuple[Costs, int]:
    """What route "auto" and layout "balanced" reckon with, for this model's heads and type: see `reckon`."""
    parallel, heads = config.parallel, (model.num_heads, model.num_kv_heads)
    return reckon(parallel.costs, parallel.layout, heads, model.head_dim, ITEMSIZES[config.dtype])


def check_plan(config: TrainConfig, model: ModelConfig) -> None:
    """Refuse what no rank could carry out, before there is one: a plan of one token a rank is refused for the same."""
    parallel = config.parallel
    mask = Mask.causal(parallel.cp)
    layout = Layout.named(parallel.layout, parallel.cp, parallel.cp, masks=[mask])
    plan = plan_attention(
        layout, mask, parallel.route, (model.num_heads, model.num_kv_heads), parallel.inner,
        wire_dtype=parallel.wire_dtype, costs=costs_of(config, model)[0],
    )  # fmt: skip
    heads = plan.rank_plan(0).heads
    if parallel.route == STAGED and heads is not None:
        head_stages(heads, parallel.heads_per_stage)


def projections_of(layer: SelfAttention, rotate: Transform) -> Projections:
    """A layer's maps round attention, with QK-norm and rotary embedding, for the route that stages heads."""

    def on(norm: nn.Module | None) -> Transform:
        return rotate if norm is None else lambda heads: rotate(norm(heads))

    return Projections(
        layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight, layer.o_proj.weight, layer.head_dim,
        on_q=on(layer.q_norm), on_k=on(layer.k_norm),
        used=tuple(norm.weight for norm in (layer.q_norm, layer.k_norm) if norm is not None),
    )  # fmt: skip


def wrap(model: Decoder, everyone: DeviceMesh, config: TrainConfig) -> nn.Module:
    """FSDP2 over all ranks, one unit per block, or DDP. Both average gradients over the ranks of `everyone`.

    What is compiled is a block's own `forward`, inside the hooks by which a wrapper gathers its weights.
    """
    for block in model.layers if config.compile else ():
        block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False)
    if config.parallel.wrapper == "ddp":
        return DistributedDataParallel(model, process_group=everyone.get_group())
    low = DTYPES[config.dtype] if config.dtype in ("bf16", "fp16") else None
    policy = MixedPrecisionPolicy(
        param_dtype=low, reduce_dtype=torch.float32 if low else None, cast_forward_inputs=False
    )
    for unit in (*model.layers, model):
        fully_shard(unit, mesh=everyone, mp_policy=policy)
    return model
