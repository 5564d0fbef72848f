"""One optimizer step under all parallel axes. `longspan verify` replays the same code.

    rows of this dp rank -> shard -> model (attention runs the plan) -> sum of token losses -> backward -> AdamW

Labels and positions are computed on the global row and sharded like the ids. The gradient is that of the mean loss over
all valid tokens of the global batch, whether the wrapper sums or averages gradients.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from longspan.comm.meshes import Meshes
from longspan.comm.transport import transport_of
from longspan.cp.context import ContextParallel
from longspan.data import Batch
from longspan.errors import SpecError
from longspan.model import Decoder, ModelConfig, TransformersConfig, mean_loss_scale
from longspan.plan import head_stages
from longspan.topology import check_model
from longspan.train.axes import nodes_of, pad_to_multiple_of, planner_of, shape_of, stages_per_rank, topology_of
from longspan.train.micro import Micro, make_micro, masks_of
from longspan.train.model import TORCH_DTYPES
from longspan.train.optim import LossScale, learning_rate, make_optimizer, update
from longspan.train.parallel import is_owner, model_of
from longspan.train.pipeline import Pipeline
from longspan.train.train_config import TrainConfig, model_config
from longspan.train.transformers_micro import check_transformers, run_transformers


@dataclass(frozen=True)
class StepResult:
    """Numbers of one optimizer step, equal on all ranks."""

    loss: float
    """Mean loss over the `targets` valid tokens of the global batch, in nats per token."""
    grad_norm: float
    """Global gradient norm before clipping."""
    learning_rate: float
    targets: int
    tokens: int
    skipped: bool
    """Whether the optimizer step was skipped because the gradient norm is not finite."""
    balance_loss: float | None = None
    """Balance loss of the experts, per token of the global batch. None for a model without a balance loss.
    For transformers: the router's load-balancing loss with its coefficient, averaged over micro-batches by tokens."""


class TrainStep:
    """This rank's model stages, their optimizers and process groups. Call to run a step."""

    def __init__(self, stages: Sequence[nn.Module], meshes: Meshes, config: TrainConfig) -> None:
        self.stages, self.meshes, self.config = list(stages), meshes, config
        first = model_of(self.stages[0])
        self.model_config = first.config if isinstance(first, Decoder) else model_config(config)
        self.cp = make_context(config, self.model_config, meshes)
        self.device = torch.device(meshes.data.device_type)
        self.optimizers = [make_optimizer(stage, config.optim) for stage in self.stages]
        self.scale = LossScale.of_dtype(config.dtype)
        self.pipeline = make_pipeline(self, config) if meshes.topology.pp > 1 else None
        self.own_targets = 0
        """Number of targets on this rank's shards in the latest step."""
        self._balance_scale = torch.zeros((), dtype=torch.float64, device=self.device)
        self._averaged = meshes.weights["shard"].size() if config.parallel.wrapper == "ddp" else 1
        """Number of ranks over which the wrapper averages gradients: 1 if the wrapper sums them."""

    def __call__(self, batches: Sequence[Batch], step: int) -> StepResult:
        """Accumulate gradients over this dp rank's micro-batches and update the weights. Collective over the world.

        `step` counts from 0.
        """
        self.own_targets = 0
        loss, targets, tokens, balance_loss = self.backward(batches)
        rate = learning_rate(self.config.optim, step, self.config.steps)
        norm = self.update(rate)
        return StepResult(loss, norm, rate, targets, tokens, not math.isfinite(norm), balance_loss)

    def update(self, rate: float) -> float:
        """Clip the global gradient, step the optimizers, and return the norm before clipping. Collective."""
        named = [(stage, *pair) for stage in self.stages for pair in model_of(stage).named_parameters()]
        missed = [name for _, name, p in named if p.requires_grad and p.grad is None]
        # A model of transformers may have parameters that its loss does not depend on.
        assert not missed or isinstance(self.model_config, TransformersConfig), (
            f"parameters without a gradient: {missed}"
        )
        owned = [p for stage, name, p in named if is_owner(p, self.meshes) and not self._is_second(stage, name)]
        return update(self.optimizers, owned, self.scale, rate, self.config.optim.clip_norm, dist.group.WORLD)

    def backward(self, batches: Sequence[Batch]) -> tuple[float, int, int, float | None]:
        """Compute the gradients of the global mean loss x the loss scale, in place of earlier gradients.

        Returns (mean loss, targets, tokens, balance loss or None), all global. Raises `SpecError` if dropout is
        above 0 and a batch has no `numbers`. Collective over all ranks.
        """
        if self.config.dropout and any(batch.numbers is None for batch in batches):
            raise SpecError(
                f"dropout={self.config.dropout} needs Batch.numbers, but a batch has numbers=None",
                hint="take batches from a Loader, or set Batch.numbers to each token's number in the run",
            )
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        targets, tokens = self._sum_over_dp(
            [sum(batch.num_targets for batch in batches), sum(batch.seq_len for batch in batches)]
        )
        factor = mean_loss_scale(targets, self._averaged) * self.scale.value
        self._balance_scale.fill_(self._averaged * self.scale.value / tokens)
        micros, total, routed = [], *torch.zeros(2, dtype=torch.float64, device=self.device)
        for index, batch in enumerate(batches):
            if self.pipeline is not None:
                micros.append(self.micro(batch))
                continue
            self._sync_gradients(index == len(batches) - 1 or not self.config.parallel.defer_reduction)
            if isinstance(self.model_config, TransformersConfig):
                loss_sum, balance = self._run_transformers(batch)
                (loss_sum * factor + balance * self._balance_scale).backward()
                routed = routed + balance.detach()
            else:
                micros.append(self.micro(batch))
                loss_sum = self.stages[0](micros[-1].input_ids, **micros[-1].keywords)
                (loss_sum * factor).backward()
            total = total + loss_sum.detach().double()
        if self.pipeline is not None:
            total = self.pipeline.run(micros, factor)
        return self._mean(total, targets), targets, tokens, self._balance_loss(micros, routed, tokens)

    def _run_transformers(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (sum of this rank's token losses, its share of the router loss times coefficient and tokens)."""
        assert isinstance(self.model_config, TransformersConfig), "the model of the run is of transformers"
        passed = run_transformers(self.cp, self.stages[0], batch)
        self.own_targets += passed.num_targets
        if passed.router_loss is None or not self.model_config.router_loss:
            return passed.loss_sum, torch.zeros((), device=self.device)
        return passed.loss_sum, passed.router_loss * (self.model_config.router_loss * batch.seq_len)

    def micro(self, batch: Batch) -> Micro:
        """Return this rank's part of a micro-batch. Collective over the CP group."""
        assert isinstance(self.model_config, ModelConfig), "the model of the run is a decoder of longspan"
        names = tuple(dict.fromkeys(self.model_config.mask_names))
        with self.cp.sequence(masks_of(batch, names), ids=batch.digest()) as sequence:
            micro = make_micro(
                batch, sequence, self.meshes, self.config, self.model_config.experts, self._balance_scale
            )
        self.own_targets += micro.num_targets
        return micro

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch | None]) -> float:
        """Return the mean loss over the valid tokens of all dp ranks' rows. `batch` None: this rank has no row. Collective."""
        # FSDP's all-gathers need every rank, so a rank without a row runs one token that has no target.
        empty = Batch.from_documents([[0]])
        rows = [batch or empty for batch in batches]
        if self.pipeline is not None:
            rows += [empty] * (-len(rows) % self.pipeline.num_micros)
        (targets,) = self._sum_over_dp([sum(batch.num_targets for batch in rows)])
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        with self._evaluating():
            if isinstance(self.model_config, TransformersConfig):
                for row in rows:
                    total += self._run_transformers(row)[0].double()
            elif self.pipeline is None:
                for micro in map(self.micro, rows):
                    total += self.stages[0](micro.input_ids, **micro.keywords).double()
            else:
                for start in range(0, len(rows), self.pipeline.num_micros):
                    some = rows[start : start + self.pipeline.num_micros]
                    total += self.pipeline.evaluate([self.micro(row) for row in some])
        return self._mean(total, targets)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        for stage in self.stages:
            stage.eval()
        try:
            yield
        finally:
            for stage in self.stages:
                stage.train()

    def _mean(self, total: torch.Tensor, targets: int) -> float:
        """Return the sum of all ranks' losses / global number of targets, or 0 without targets. Collective."""
        if self.meshes.data["tp"].get_local_rank():
            total = torch.zeros_like(total)  # every rank of a TP group holds the same sum
        dist.all_reduce(total)
        return float(total) / targets if targets else 0.0

    def _balance_loss(self, micros: Sequence[Micro], routed: torch.Tensor, tokens: int) -> float | None:
        if isinstance(self.model_config, TransformersConfig):
            if not self.model_config.router_loss:
                return None
            dist.all_reduce(routed)
            return float(routed) / tokens
        experts = self.model_config.experts
        if experts is None or not experts.balance:
            return None
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for micro in micros:
            assert micro.routing is not None, "a model with experts has a routing"
            total += sum(part.double() for part in micro.routing.sums.values())
        dist.all_reduce(total)
        return experts.balance * float(total) / tokens

    def _sum_over_dp(self, counts: Sequence[int]) -> list[int]:
        """Sum counts over dp ranks. All ranks of a CP, TP or PP group hold the counts of the same global row."""
        group = self.meshes.data["dp"].get_group()
        # Prefer the group's CPU backend, so that the host does not wait for the device.
        total = torch.tensor(counts, dtype=torch.int64, device=transport_of(group).carries(torch.device("cpu")))
        dist.all_reduce(total, group=group)
        return [int(count) for count in total.tolist()]

    def _sync_gradients(self, last: bool) -> None:
        for stage in self.stages:
            if isinstance(stage, FSDPModule):
                stage.set_requires_gradient_sync(last)
            elif isinstance(stage, DistributedDataParallel):
                stage.require_backward_grad_sync = last

    def _is_second(self, stage: nn.Module, name: str) -> bool:
        """Whether this is the last stage's duplicate of a tied embedding."""
        decoder = model_of(stage)
        return isinstance(decoder, Decoder) and name == "embed_tokens.weight" and 0 not in decoder.part


def make_context(config: TrainConfig, model: ModelConfig | TransformersConfig, meshes: Meshes) -> ContextParallel:
    """Make the context parallelism of a run from its configuration, model and meshes."""
    planner = planner_of(config, model, meshes.topology)
    return ContextParallel.by(meshes.data["cp"], planner, config.parallel.kernel)


def make_pipeline(step: TrainStep, config: TrainConfig) -> Pipeline:
    """Make the pipeline of a step's stages, with the fixed number of slots of the longest row."""
    parallel = config.parallel
    slots = pad_to_multiple_of(config)
    assert slots is not None, "a pipeline has a fixed number of slots"
    ids = torch.empty(1, slots, dtype=torch.int64, device="meta")
    rows = slots // parallel.tp if parallel.sp else slots
    hidden_size, dtype = step.model_config.hidden_size, TORCH_DTYPES[config.dtype]
    hidden = torch.empty(1, rows, hidden_size, dtype=dtype, device="meta", requires_grad=True)
    return Pipeline(step.stages, step.meshes, parallel.schedule, config.gradient_accumulation_steps, ids, hidden)


def check_plan(config: TrainConfig, model: ModelConfig | TransformersConfig) -> None:
    """Raise `SpecError` if model, degrees, route and schedule do not fit together. Needs no process group."""
    parallel, topology = config.parallel, topology_of(config)
    if isinstance(model, TransformersConfig):
        check_transformers(config, model)
    check_model(
        topology, shape_of(model), route=parallel.route, inner=parallel.inner, sp=parallel.sp,
        gradient_accumulation_steps=config.gradient_accumulation_steps, schedule=parallel.schedule,
        stages_per_rank=stages_per_rank(config), ranks_per_node=nodes_of(config, topology).ranks_per_node,
    )  # fmt: skip
    plan = planner_of(config, model, topology).check()
    heads = plan.rank_plan(0).heads
    if plan.staged and heads is not None:
        head_stages(heads, parallel.heads_per_stage)
