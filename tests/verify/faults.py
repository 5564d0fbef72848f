"""Ways to break the rules of DESIGN.md section 2, each as a patch to apply in a rank's process while it trains."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from longspan import Mask
from longspan.cp.context import Sequence as Sharded
from longspan.cp.engine import operators, sums
from longspan.cp.engine import row_transport as rows
from longspan.cp.engine.merge import merge_
from longspan.data import Batch
from longspan.train import step as training
from longspan.train.step import TrainStep

Tensors = dict[str, torch.Tensor]


def _sharding(before: Callable[[Tensors], Tensors], after: Callable[[Tensors], Tensors]) -> AbstractContextManager[Any]:
    """Change the global tensors before, or this rank's after they are sharded."""
    shard = Sharded.shard

    def broken(self: Sharded, x: Mapping[str, torch.Tensor], dim: int) -> Tensors:
        return after(dict(shard(self, before(dict(x)), dim)))

    return patch.object(Sharded, "shard", broken)


def _same(tensors: Tensors) -> Tensors:
    return tensors


def shift_after_sharding() -> AbstractContextManager[Any]:
    def shift(local: Tensors) -> Tensors:
        ids = local["input_ids"]
        return local | {"labels": torch.cat((ids[:, 1:], torch.full_like(ids[:, :1], -100)), 1)}

    return _sharding(_same, shift)


def shift_twice() -> AbstractContextManager[Any]:
    def shift(whole: Tensors) -> Tensors:
        labels = whole["labels"]
        return whole | {"labels": torch.cat((labels[:, 1:], torch.full_like(labels[:, :1], -100)), 1)}

    return _sharding(shift, _same)


def a_target_across_documents() -> AbstractContextManager[Any]:
    def shift(whole: Tensors) -> Tensors:
        ids = whole["input_ids"]
        return whole | {"labels": torch.cat((ids[:, 1:], torch.full_like(ids[:, :1], -100)), 1)}

    return _sharding(shift, _same)


def local_positions() -> AbstractContextManager[Any]:
    return _sharding(_same, lambda local: local | {"position_ids": torch.arange(local["input_ids"].shape[1])[None]})


def positions_of_the_row() -> AbstractContextManager[Any]:
    """They do not restart in every document."""
    return _sharding(lambda whole: whole | {"position_ids": torch.arange(whole["input_ids"].shape[1])[None]}, _same)


def _backward(denominator: Callable[[TrainStep, Sequence[Batch], Batch], float]) -> AbstractContextManager[Any]:
    """A step whose losses are each divided by what `denominator` says, then averaged over ranks."""

    def backward(self: TrainStep, batches: Sequence[Batch]) -> tuple[float, int, int, None]:
        self.optimizers[0].zero_grad()
        targets, tokens = self._sum_over_dp([sum(b.num_targets for b in batches), sum(b.seq_len for b in batches)])
        total = torch.zeros((), dtype=torch.float64)
        for index, batch in enumerate(batches):
            self._sync_gradients(index == len(batches) - 1)
            micro = self.micro(batch)
            loss = self.stages[0](micro.input_ids, **micro.keywords) / denominator(self, batches, batch)
            loss = loss / dist.get_world_size()
            (loss * self.scale.value).backward()
            total += loss.detach().double()
        dist.all_reduce(total)
        return float(total), targets, tokens, None

    return patch.object(TrainStep, "backward", backward)


def _local_targets(step: TrainStep, batch: Batch) -> int:
    with step.cp.sequence(Mask.causal(batch.seq_len)) as sequence:
        return int((sequence.shard(batch.tensors(), dim=1)["labels"] != -100).sum())


def mean_of_the_means_of_ranks() -> AbstractContextManager[Any]:
    return _backward(lambda step, batches, _: sum(_local_targets(step, batch) for batch in batches))


def mean_of_the_means_of_micro_batches() -> AbstractContextManager[Any]:
    return _backward(
        lambda step, batches, batch: step._sum_over_dp([batch.num_targets])[0] * len(batches) / dist.get_world_size()
    )


def mean_of_the_means_of_both() -> AbstractContextManager[Any]:
    return _backward(lambda step, batches, batch: max(1, _local_targets(step, batch)) * len(batches))


@contextmanager
def average_of_the_wrapper_not_undone() -> Iterator[None]:
    """FSDP2 is left to average gradients, and DDP's average is not made up for."""
    averaged = patch.object(FSDPModule, "set_gradient_divide_factor", lambda self, factor: None)
    with averaged, patch.object(training, "mean_loss_scale", lambda targets, _: 1 / targets):
        yield


def dropped_document_boundaries() -> AbstractContextManager[Any]:
    return patch.object(training, "masks_of", lambda batch, names: {name: Mask.causal(batch.seq_len) for name in names})


def one_dropped_document_boundary() -> AbstractContextManager[Any]:
    def masks_of(batch: Batch, names: Sequence[str]) -> dict[str, Mask]:
        first, second, *others = (*batch.lengths, 0)
        return {name: Mask.documents([first + second, *others]) for name in names}

    return patch.object(training, "masks_of", masks_of)


def _sent_home(spoil: Callable[[Any], None]) -> AbstractContextManager[Any]:
    """Spoil the partial gradients of another rank's keys and values before they leave this rank."""
    hand_over = rows.ReturningGradients.hand_over

    def broken(self: Any, *arguments: Any) -> None:
        self.arrive()
        spoil(self)
        hand_over(self, *arguments)

    return patch.object(rows.ReturningGradients, "hand_over", broken)


def _travelling(returning: Any) -> list[Any]:
    """All gradients of other ranks' rows."""
    return [gradient for gradients in returning.here for gradient in gradients]


def gradient_of_keys_dropped() -> AbstractContextManager[Any]:
    return _sent_home(lambda travelling: [gradients[0].rows().zero_() for gradients in travelling.here])


def gradient_of_values_dropped() -> AbstractContextManager[Any]:
    return _sent_home(lambda travelling: [gradients[1].rows().zero_() for gradients in travelling.here])


def gradients_in_wrong_rows() -> AbstractContextManager[Any]:
    def flip(travelling: Any) -> None:
        for gradient in _travelling(travelling):
            gradient.rows().copy_(gradient.rows().flip(0))

    return _sent_home(flip)


def gradients_left_on_the_wrong_rank() -> AbstractContextManager[Any]:
    """The rank that computed them adds them to its own rows, and sends nothing home but zeros."""
    left: list[list[torch.Tensor]] = []

    def keep(travelling: Any) -> None:
        left.extend([gradient.rows().clone() for gradient in gradients] for gradients in travelling.here)
        for gradient in _travelling(travelling):
            gradient.rows().zero_()

    run_backward = operators.run_backward

    def run_and_add(*arguments: Any) -> tuple[torch.Tensor, ...]:
        left.clear()
        dq, *own, dsink = run_backward(*arguments)
        for parts in left:
            for mine, part in zip(own, parts, strict=True):  # (B, K, T, D) and rows first
                rows = min(mine.shape[2], part.shape[0])
                mine[:, :, :rows] += part[:rows].permute(1, 2, 0, 3).to(mine.dtype)
        return dq, *own, dsink

    @contextmanager
    def both() -> Iterator[None]:
        with _sent_home(keep), patch.object(operators, "run_backward", run_and_add):
            yield

    return both()


def partial_results_added_without_their_weights() -> AbstractContextManager[Any]:
    def average(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
        merge_(out, lse, part, part_lse.clone().fill_(0.0))

    return patch.object(sums, "merge_", average)


FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    fault.__name__: fault
    for fault in (
        shift_after_sharding,
        shift_twice,
        a_target_across_documents,
        local_positions,
        positions_of_the_row,
        mean_of_the_means_of_ranks,
        mean_of_the_means_of_micro_batches,
        mean_of_the_means_of_both,
        average_of_the_wrapper_not_undone,
        dropped_document_boundaries,
        one_dropped_document_boundary,
        gradient_of_keys_dropped,
        gradient_of_values_dropped,
        gradients_in_wrong_rows,
        gradients_left_on_the_wrong_rank,
        partial_results_added_without_their_weights,
    )
}


def breaking(fault: str) -> AbstractContextManager[Any]:
    """The patch of that name; "nothing" breaks nothing."""
    return nullcontext() if fault == "nothing" else FAULTS[fault]()
