"""Rows of shared/CASES.md about labels, positions, losses and steps, with their right values worked out by hand."""

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from longspan import ContextParallel, Mask
from longspan.comm.meshes import Meshes
from longspan.data import Batch, Loader, open_store
from longspan.model import ModelConfig
from longspan.train.axes import topology_of
from longspan.train.parallel import shard_weights
from longspan.train.run_loader import make_loader
from longspan.train.step import TrainStep
from longspan.train.train_config import TrainConfig
from tests.oracle import raised
from tests.ranks import run_ranks
from tests.train import reference
from tests.train.tiny import make_batch, make_config, make_step, random_row

LAYOUTS = ("zigzag", "striped", "contiguous")


# Labels and positions: one mapping, of the global row.


def shard_on_ranks(group: Any, rank: int, batch: Batch, layout: str) -> dict[str, list[int]]:
    cp = ContextParallel(group, layout=layout)
    with cp.sequence(Mask.documents(batch.lengths), ids=batch.digest()) as sequence:
        return {name: tensor[0].tolist() for name, tensor in sequence.shard(batch.tensors(), dim=1).items()}


def test_labels_are_shifted_before_sharding() -> None:
    r0, r1 = run_ranks(2, shard_on_ranks, Batch.from_documents([range(8)]), "zigzag")
    assert (r0["labels"], r1["labels"]) == ([1, 2, 7, -100], [3, 4, 5, 6])
    assert (r0["input_ids"], r1["input_ids"]) == ([0, 1, 6, 7], [2, 3, 4, 5])
    assert (r0["position_ids"], r1["position_ids"]) == ([0, 1, 6, 7], [2, 3, 4, 5])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("ranks", "lengths", "targets"), [(4, (16,), 15), (2, (4, 4), 6), (4, (4, 4), 6), (4, (10,), 9), (4, (1,), 0)]
)
def test_targets_that_shards_hold_together(layout: str, ranks: int, lengths: tuple[int, ...], targets: int) -> None:
    batch = Batch.from_documents([range(length) for length in lengths])
    held = [sum(label != -100 for label in got["labels"]) for got in run_ranks(ranks, shard_on_ranks, batch, layout)]
    assert sum(held) == batch.num_targets == targets


def test_response_targets_after_an_ignored_prompt() -> None:
    batch = Batch.from_documents([range(16)], [[0] * 12 + [1] * 4])
    results = run_ranks(4, shard_on_ranks, batch, "zigzag")
    assert [sum(label != -100 for label in got["labels"]) for got in results] == [1, 2, 1, 0]


def test_positions_in_documents_under_zigzag() -> None:
    r0, r1 = run_ranks(2, shard_on_ranks, Batch.from_documents([range(10, 14), range(20, 24)]), "zigzag")
    assert (r0["position_ids"], r1["position_ids"]) == ([0, 1, 2, 3], [2, 3, 0, 1])
    assert (r0["input_ids"], r1["input_ids"]) == ([10, 11, 22, 23], [12, 13, 20, 21])
    assert (r0["labels"], r1["labels"]) == ([11, 12, 23, -100], [13, -100, 21, 22])


def test_labels_that_are_not_shifted_are_refused() -> None:
    ids = torch.arange(8).numpy()
    name, text = raised(Batch, ids, ids, ids, (8,))
    assert name == "DataError"
    assert "shift" in text


def shard_twice(group: Any, rank: int) -> tuple[str, str]:
    with ContextParallel(group).sequence(Mask.causal(8)) as sequence:
        local = sequence.shard(torch.arange(8)[None], dim=1)
        return raised(sequence.shard, local, 1)


def test_a_batch_already_sharded_is_refused() -> None:
    for name, text in run_ranks(2, shard_twice):
        assert name == "SpecError"
        assert "has 4 rows; the sequence has 8 tokens" in text
        assert "this tensor may be sharded already" in text


# Losses: a model whose loss at each token is given, in the place of a decoder.


class GivenLosses(nn.Module):
    """The loss of a token is the weight that its id names."""

    def __init__(self, losses: list[float]) -> None:
        super().__init__()
        self.config = ModelConfig(
            vocab_size=8, hidden_size=4, num_layers=1, num_heads=1, num_kv_heads=1, intermediate_size=4
        )
        self.part, self.blocks = range(1), []
        self.losses = nn.Parameter(torch.tensor(losses, dtype=torch.float64)[:, None])

    def forward(self, ids: torch.Tensor, *, labels: torch.Tensor, **others: Any) -> torch.Tensor:
        return (self.losses[ids, 0] * (labels != -100)).sum()


@dataclass(frozen=True)
class Row:
    """A batch with valid labels at any token."""

    valid: tuple[int, ...]
    first: int

    @property
    def seq_len(self) -> int:
        return len(self.valid)

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self.seq_len,)

    @property
    def parents(self) -> tuple[int, ...]:
        return ()

    @property
    def numbers(self) -> None:
        return None

    @property
    def num_targets(self) -> int:
        return sum(self.valid)

    def digest(self) -> bytes:
        return repr(self).encode()

    def tensors(self) -> dict[str, torch.Tensor]:
        ids = torch.arange(self.first, self.first + self.seq_len)[None]
        labels = torch.where(torch.tensor(self.valid)[None] == 1, 1, -100)
        return {"input_ids": ids, "labels": labels, "position_ids": ids - self.first}


def losses_on_ranks(
    group: Any, rank: int, config: TrainConfig, losses: list[float], rows: list[Row]
) -> tuple[float, float, list[float], float]:
    """The loss to optimise, the evaluation, the gradient of each token's loss, the loss that a step reports."""
    dp, cp = config.parallel.dp or 1, config.parallel.cp
    meshes, model = Meshes.of(topology_of(config), "cpu"), GivenLosses(losses)
    if config.parallel.wrapper == "ddp":
        model = DistributedDataParallel(model, process_group=meshes.weights["shard"].get_group())
    else:
        shard_weights(model, model.blocks, meshes, config)
    step = TrainStep([model], meshes, config)
    mine = rows[rank // cp :: dp]
    loss, *_ = step.backward(mine)
    gradient = next(iter(step.stages[0].parameters())).grad
    gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    gradient = gradient[:, 0].tolist()
    return loss, step.evaluate(mine), gradient, step(mine, 0).loss


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("wrapper", ["fsdp", "ddp"])
def test_mean_over_valid_tokens_in_every_layout(layout: str, wrapper: str) -> None:
    """S=8, per-token loss [9,9,9,2,4,6,8,10], the first three ignored: (2+4+6+8+10) / 5 = 6."""
    config = make_config(parallel__cp=2, parallel__layout=layout, parallel__wrapper=wrapper)
    losses, rows = [9.0, 9, 9, 2, 4, 6, 8, 10], [Row((0, 0, 0, 1, 1, 1, 1, 1), first=0)]
    for loss, evaluated, gradient, reported in run_ranks(2, losses_on_ranks, config, losses, rows):
        assert loss == evaluated == reported == pytest.approx(6.0, rel=1e-15)
        assert gradient == pytest.approx([0, 0, 0, 0.2, 0.2, 0.2, 0.2, 0.2], rel=1e-15)


@pytest.mark.parametrize(("dp", "cp"), [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4)])
@pytest.mark.parametrize("wrapper", ["fsdp", "ddp"])
def test_mean_over_micro_batches_is_weighted_by_tokens(dp: int, cp: int, wrapper: str) -> None:
    """One token of loss 5 and seven of loss 1: 12 / 8 = 1.5, accumulated or on two dp ranks."""
    config = make_config(
        parallel__dp=dp, parallel__cp=cp, parallel__wrapper=wrapper, gradient_accumulation_steps=2 // dp
    )
    rows = [Row((1, 0, 0, 0), first=0), Row((1,) * 7, first=4)]
    losses = [5.0, 9, 9, 9] + [1.0] * 7
    for loss, evaluated, gradient, reported in run_ranks(dp * cp, losses_on_ranks, config, losses, rows):
        assert loss == evaluated == reported == pytest.approx(1.5, rel=1e-15)
        assert gradient == pytest.approx([1 / 8, 0, 0, 0] + [1 / 8] * 7, rel=1e-15)


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_evaluation_of_rows_with_few_labels(cp: int) -> None:
    """Three labels of loss 2 beside five of loss 10: 56 / 8 = 7, where a mean of rows would be 6."""
    rows = [Row((0, 0, 0, 0, 0, 1, 1, 1), first=0), Row((1, 1, 1, 1, 1), first=8)]
    losses = [99.0] * 5 + [2.0] * 3 + [10.0] * 5
    for loss, evaluated, _, _ in run_ranks(
        cp, losses_on_ranks, make_config(parallel__cp=cp, gradient_accumulation_steps=2), losses, rows
    ):
        assert loss == evaluated == pytest.approx(7.0, rel=1e-15)


# Losses and gradients of a decoder.


def gradients_on_ranks(group: Any, rank: int, config: TrainConfig, rows: list[Any]) -> dict[str, Any]:
    dp, cp = config.parallel.dp or 1, config.parallel.cp
    step = make_step(config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss, targets, *_ = step.backward([make_batch(row) for row in rows[rank // cp :: dp]])
    gradients = {name: p.grad for name, p in step.stages[0].named_parameters()}
    shards = [g.to_local() if isinstance(g, DTensor) else g for g in gradients.values()]
    whole = {name: g.full_tensor().double().numpy() for name, g in gradients.items()}
    result = step([make_batch(row) for row in rows[rank // cp :: dp]], 0)
    return {
        "loss": loss,
        "targets": targets,
        "norm": result.grad_norm,
        "finite": all(bool(g.isfinite().all()) for g in shards),
        "gradients": whole,
    }


def worst(got: dict[str, Any], want: dict[str, Any]) -> float:
    return max(float(np.abs(got[name] - want[name].numpy()).max() / want[name].abs().max()) for name in want)


def test_a_rank_without_any_label() -> None:
    """8 real tokens padded to 16, cp2 contiguous: rank 1 holds only padding, which is a document without targets."""
    real = (list(range(1, 9)), [1] * 8)
    config = make_config(parallel__cp=2, parallel__layout="contiguous", dtype="fp32")
    results = run_ranks(2, gradients_on_ranks, config, [[real, ([0] * 8, [0] * 8)]])
    want = reference.train(make_config(), [[[real]]])
    for got in results:
        assert got["targets"] == 7
        assert got["finite"]
        assert got["loss"] == pytest.approx(want.losses[0], rel=1e-5)
        assert worst(got["gradients"], want.gradients) < 1e-5


def test_gradients_do_not_depend_on_how_the_world_is_divided() -> None:
    """The same global batch of four rows on (dp2, cp2), (dp4, cp1) and (dp1, cp1): gradients and their norm, in fp32."""
    rows = [random_row(seed, tokens) for seed, tokens in ((1, 48), (2, 9), (3, 31), (4, 48))]
    want = reference.train(make_config(), [rows])
    for dp, cp in ((2, 2), (4, 1), (1, 1), (1, 4)):
        config = make_config(dtype="fp32", parallel__dp=dp, parallel__cp=cp, gradient_accumulation_steps=4 // dp)
        for got in run_ranks(dp * cp, gradients_on_ranks, config, rows):
            assert got["loss"] == pytest.approx(want.losses[0], rel=1e-5), (dp, cp)
            assert got["norm"] == pytest.approx(want.norms[0], rel=1e-5), (dp, cp)
            assert worst(got["gradients"], want.gradients) < 1e-5, (dp, cp)


# Steps of an epoch.


def read_on_ranks(group: Any, rank: int, config: TrainConfig) -> tuple[int, int, list[bytes], list[int]]:
    dp = config.parallel.dp or 1
    loader: Loader = make_loader(config, open_store(config.data), rank // config.parallel.cp, dp)
    steps = loader.steps_per_epoch(dp, config.gradient_accumulation_steps)
    epochs, rows = [], []
    for _ in range(steps):
        epochs.append(loader.epoch)
        rows += [next(loader).digest() for _ in range(config.gradient_accumulation_steps)]
    return steps, loader.epoch, rows, epochs


def test_steps_of_an_epoch(tmp_path: Any) -> None:
    """64 rows, world 4, cp2, micro-batch 1, accumulation 2: 64 / (dp2 x 2) = 16 steps, every row read once."""
    (tmp_path / "corpus").mkdir()
    for number in range(64):
        (tmp_path / "corpus" / f"{number}.txt").write_text(f"{number:031}")
    config = make_config(
        tmp_path,
        parallel__dp=2,
        parallel__cp=2,
        gradient_accumulation_steps=2,
        data__seq_len=32,
        data__heldout_fraction=0.0,
    )
    results = run_ranks(4, read_on_ranks, config)
    assert [(steps, epoch) for steps, epoch, _, _ in results] == [(16, 1)] * 4
    assert all(epochs == [0] * 16 for _, _, _, epochs in results)
    read = [rows for _, _, rows, _ in results]
    assert read[0] == read[1]
    assert read[2] == read[3]
    assert len({*read[0], *read[2]}) == len(read[0]) + len(read[2]) == 64
