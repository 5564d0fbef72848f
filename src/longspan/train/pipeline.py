"""Run micro-batches through a pipeline with the schedules of torch.distributed.pipelining.

Stages send only hidden states. Every rank has the positions, plans and labels of all micro-batches, and looks these up
by the micro-batch's index. All micro-batches have the same number of slots, because the receive buffers are allocated once.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import DTensor

from longspan.comm.meshes import Meshes
from longspan.train.micro import Micro
from longspan.train.parallel import decoder_of

Tensor = torch.Tensor


class Pipeline:
    """This rank's stages of a pipeline, for steps of `num_micros` micro-batches."""

    def __init__(
        self, modules: Sequence[nn.Module], meshes: Meshes, schedule: str, num_micros: int, ids: Tensor, hidden: Tensor
    ) -> None:
        """Prepare the stages. `ids` (1, T) and `hidden` (1, T, E), on the meta device, give the shapes and dtypes that stages
        exchange."""
        mesh = meshes.data["pp"]
        self.num_micros = num_micros
        self.device = torch.device(mesh.device_type)
        total = len(modules) * mesh.size()
        self.stages = [
            _Stage(
                module, mesh.get_local_rank() + index * mesh.size(), total, self.device, mesh.get_group(), ids, hidden
            )
            for index, module in enumerate(modules)
        ]
        options: dict[str, Any] = {"loss_fn": self._scaled, "scale_grads": False}
        if schedule == "1f1b":
            self.schedule: Any = Schedule1F1B(self.stages[0], num_micros, **options)
        else:
            kind = ScheduleInterleaved1F1B if schedule == "interleaved" else ScheduleInterleavedZeroBubble
            self.schedule = kind(self.stages, num_micros, **options)  # type: ignore[arg-type]
        self._ends = meshes.ends if decoder_of(modules[0]).config.tie_embeddings else None
        self._factor, self._total = 1.0, torch.zeros(())

    def run(self, micros: Sequence[Micro], factor: float) -> Tensor:
        """Compute the gradients of `factor` x loss sum. Returns the loss sum on the last stage's ranks, else 0."""
        total = self._through(micros, factor, self.schedule.step)
        if self._ends is not None:
            self._sum_embedding_gradients(self._ends)
        return total

    def evaluate(self, micros: Sequence[Micro]) -> Tensor:
        """Return the loss sum on the last stage's ranks, else 0. Computes no gradients."""
        return self._through(micros, 1.0, self.schedule.eval)

    def _through(self, micros: Sequence[Micro], factor: float, run: Any) -> Tensor:
        assert len(micros) == self.num_micros, "a schedule has a fixed number of micro-batches"
        self._factor, self._total = factor, torch.zeros((), dtype=torch.float64, device=self.device)
        for stage in self.stages:
            stage.micros = micros
        # The target is the micro-batch's index: the last stage has the labels.
        run(target=torch.arange(self.num_micros), return_outputs=False)
        return self._total

    def _scaled(self, loss_sum: Tensor, micro: Tensor) -> Tensor:
        self._total += loss_sum.detach().double()
        return loss_sum * self._factor

    def _sum_embedding_gradients(self, ends: dist.ProcessGroup) -> None:
        """Sum the gradients of the two copies of a tied embedding, on the first and the last stage."""
        for stage in self.stages:
            if stage.is_first or stage.is_last:
                embedding = decoder_of(stage.submod).embed_tokens
                assert embedding is not None, "first and last stage hold the tied embedding"
                gradient = embedding.weight.grad
                assert gradient is not None, "backward has run"
                dist.all_reduce(gradient.to_local() if isinstance(gradient, DTensor) else gradient, group=ends)


class _Stage(PipelineStage):
    """A stage that passes the micro-batch's own inputs to its module."""

    micros: Sequence[Micro]

    def __init__(
        self,
        module: nn.Module,
        index: int,
        total: int,
        device: torch.device,
        group: dist.ProcessGroup,
        ids: Tensor,
        hidden: Tensor,
    ) -> None:
        first, last = index == 0, index == total - 1
        loss = torch.empty(
            (), dtype=torch.promote_types(hidden.dtype, torch.float32), device="meta", requires_grad=True
        )
        super().__init__(
            module, index, total, device, group=group,
            input_args=(ids if first else hidden,), output_args=(loss if last else hidden,),
        )  # fmt: skip

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        micro = self.micros[fwd_chunk_id]
        return super().forward_one_chunk(fwd_chunk_id, (micro.input_ids,), micro.keywords, save_forward_output)
