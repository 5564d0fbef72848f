"""Counters of a step against the kernel calls and the transfers really made, what ranks add up to, and when uneven is told."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from longspan.comm.hops import Flight, Hop
from longspan.comm.traffic import record
from longspan.kernels import choice as kernels
from longspan.kernels.protocol import BackwardInputs
from longspan.kernels.reference import ReferenceKernel
from longspan.kernels.scores import ScoreChange
from longspan.plan import Shape
from longspan.train.train_config import TrainConfig
from longspan.train.usage import STAY, Balance, BalanceWatch, RankUsage
from tests.train.test_checkpoint import run_on_ranks, train
from tests.train.tiny import make_config, write_corpus

from ..ranks import run_ranks

Tensor = torch.Tensor
NUM_Q, NUM_KV, D = 4, 2, 4
ITEMSIZE = 4


class SpyingKernel(ReferenceKernel):
    """Counts the pairs and blocks of every tile it is given, one by one, on the query heads it is given."""

    def __init__(self) -> None:
        self.pairs = self.blocks = 0

    def _count(self, q: Tensor, k: Tensor, shape: Shape) -> None:
        assert (q.shape[2], k.shape[2]) == shape[:2]
        away = np.arange(shape.num_q)[:, None] - np.arange(shape.num_k)[None, :]
        seen = (shape.lo <= away) & (away <= shape.hi)
        corners = [(i, j) for i in range(0, shape.num_q, 128) for j in range(0, shape.num_k, 128)]
        self.pairs += int(seen.sum()) * q.shape[1]
        self.blocks += sum(bool(seen[i : i + 128, j : j + 128].any()) for i, j in corners) * q.shape[1]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, shapes: Sequence[Shape], scale: float, change: ScoreChange | None = None
    ) -> tuple[Tensor, Tensor]:
        self._count(q, k, *shapes)
        return super().forward(q, k, v, shapes, scale, change)

    def backward(
        self, saved: BackwardInputs, shapes: Sequence[Shape], scale: float, change: ScoreChange | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._count(saved.q, saved.k, *shapes)
        return super().backward(saved, shapes, scale, change)


def spying_post(seen: Counter[str]) -> Callable[..., Flight]:
    """`Hop.post` that counts what it hands over; of what arrives, keys and values apart from gradients by their shapes."""
    post = Hop.post

    def counted(hop: Hop, *arguments: Any, **keywords: Any) -> Flight:
        seen["bytes_sent"] += sum(x.nbytes for _, x in hop.sends)
        for _, x in hop.receives:
            seen["bytes_received"] += x.nbytes
            # (1, K, R, D), or (R, D) of one head; gradients are (R, 1, K, D).
            if x.ndim == 2 or x.shape[:2] == (1, NUM_KV):
                seen["kv_elements"] += x.numel()
        return post(hop, *arguments, **keywords)

    return counted


def spied(group: Any, rank: int, config: TrainConfig) -> dict[str, float]:
    """Run, and say what kernels and transfers of this rank came to."""
    kernel, seen = SpyingKernel(), Counter[str]()
    with patch.dict(kernels.KERNELS, reference=kernel), patch.object(Hop, "post", spying_post(seen)):
        run_on_ranks(group, rank, config)
    return {
        "pairs": kernel.pairs / NUM_Q,
        "blocks": kernel.blocks / NUM_Q,
        "rows_received": seen["kv_elements"] / (2 * NUM_KV * D),
        "bytes_sent": seen["bytes_sent"],
        "bytes_received": seen["bytes_received"],
    }


def lines_of(config: TrainConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("usage")
    write_corpus(folder)
    return folder


def spied_config(folder: Any, name: str, **changes: Any) -> TrainConfig:
    """Rows of some hundred tokens, so that tiles have several blocks."""
    return make_config(
        folder, run_dir=str(folder / name), steps=2, gradient_accumulation_steps=2, micro_batch_size=1, dtype="fp32",
        data__seq_len=600,
        model__num_heads=NUM_Q, model__num_kv_heads=NUM_KV, model__windows=[None, 200], parallel__kernel="reference", **changes,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("route", "layout", "cp"),
    [
        ("ring", "zigzag", 3), ("ring", "striped", 2), ("exchange", "contiguous", 3), ("rotate", "zigzag", 2),
        ("ulysses", "zigzag", 2), ("usp", "zigzag", 4), ("upipe", "zigzag", 2),
    ],
)  # fmt: skip
def test_counters_are_those_of_the_kernel_calls_and_the_transfers(
    folder: Any, route: str, layout: str, cp: int
) -> None:
    changes = {"parallel__inner": 2} if route == "usp" else {}
    config = spied_config(
        folder, f"{route}-{layout}", parallel__cp=cp, parallel__route=route, parallel__layout=layout, **changes
    )
    counted = run_ranks(cp, spied, config)
    lines = lines_of(config)
    assert len(lines) == 2
    for rank, right in enumerate(counted):
        told = {name: sum(line["ranks"][rank][name] for line in lines) for name in right}
        if route in (
            "ulysses",
            "usp",
            "upipe",
        ):  # keys and values look like queries there; `tests/attention` counts rows
            del told["rows_received"], right["rows_received"]
        assert told == right
        assert told["blocks"] > 4
        assert told["bytes_received"] > 0


def asked_for(group: Any, rank: int, config: TrainConfig) -> list[tuple[str, ...]]:
    with patch("longspan.train.run.record", wraps=record) as recorders:
        run_on_ranks(group, rank, config)
    return [call.args for call in recorders.call_args_list]


def test_a_run_asks_for_the_times_that_it_shows_alone(folder: Any) -> None:
    """On CUDA every other time would cost two events a launch (`tests/comm/test_traffic.py`)."""
    config = make_config(folder, run_dir=str(folder / "asked"), steps=2)
    assert run_ranks(1, asked_for, config) == [[("waiting",)] * 2]


def test_what_ranks_add_up_to_is_the_same_at_every_degree(folder: Any) -> None:
    """Tokens, targets and pairs are the run's, however many ranks share it."""
    totals = {}
    for cp, route, layout in (
        (1, "ring", "zigzag"),
        (2, "ring", "zigzag"),
        (4, "ring", "striped"),
        (4, "ulysses", "zigzag"),
    ):
        config = spied_config(
            folder, f"sum-{cp}-{route}", parallel__cp=cp, parallel__route=route, parallel__layout=layout
        )
        train(config)
        steps = lines_of(config)
        for line in steps:
            assert sum(usage["targets"] for usage in line["ranks"]) == line["targets"]
        totals[cp, route] = [
            (line["tokens"], line["tokens_seen"], line["targets"], sum(usage["pairs"] for usage in line["ranks"]))
            for line in steps
        ]
    assert len(totals) == 4
    assert list(totals.values()) == [totals[1, "ring"]] * 4
    assert all(targets < tokens < pairs for tokens, _, targets, pairs in totals[1, "ring"])


def used(rank: int, *, pairs: float = 10, worked: float = 1.0, waiting: float = 0.0) -> RankUsage:
    return RankUsage(rank, 1, pairs, 3, 4, 5, 6, worked + waiting, waiting, 7)


def test_balance_by_hand() -> None:
    ranks = [
        used(0, pairs=10, worked=1.0, waiting=9.0),
        used(1, pairs=30, worked=2.0),
        used(2, pairs=20, worked=6.0),
    ]
    assert Balance.of(ranks) == Balance(slowest_rank=2, pairs_imbalance=1.5, time_imbalance=2.0)
    assert Balance.of(ranks[:1]) == Balance(0, 1.0, 1.0)
    # Stages of a pipeline are not compared with each other: 1 1 | 3 5 is as uneven as 3 5.
    stages = [replace(used(r, pairs=p, worked=1.0), stage=r // 2) for r, p in enumerate((1, 1, 3, 5))]
    assert Balance.of(stages).pairs_imbalance == 1.25
    assert Balance.of([used(0, pairs=0, worked=0.0), used(1, pairs=0, worked=0.0)]) == Balance(0, 1.0, 1.0)


EVEN = [used(0), used(1)]
HEAVY = [used(0, pairs=10), used(1, pairs=20)]
SLOW = [used(0, worked=2.0), used(1, worked=1.0)]
SHORT = [used(0, pairs=10, worked=0.01), used(1, pairs=20, worked=0.04)]


def told(watch: BalanceWatch, steps: Sequence[list[RankUsage]]) -> list[tuple[int, str]]:
    return [(n, text) for n, step in enumerate(steps, 1) if (text := watch.step(step)) is not None]


@pytest.mark.parametrize(
    ("steps", "at"),
    [
        ([HEAVY] * (STAY - 1) + [EVEN] + [HEAVY] * (STAY - 1), []),
        ([HEAVY] * 5 * STAY, [STAY]),
        ([HEAVY] * STAY + [EVEN] + [HEAVY] * STAY, [STAY, 2 * STAY + 1]),
        ([SLOW] * 3 * STAY, [STAY]),
        # One kind after the other is two stays.
        ([HEAVY] * STAY + [SLOW] * STAY, [STAY, 2 * STAY]),
        ([SHORT] * 3 * STAY, []),
        ([EVEN] * 3 * STAY, []),
    ],
)
def test_a_stay_over_the_limit_is_told_once(steps: list[list[RankUsage]], at: list[int]) -> None:
    assert [step for step, _ in told(BalanceWatch(1.25), steps)] == at
    assert told(BalanceWatch(None), steps) == []
    assert told(BalanceWatch(2.5), steps) == []


def test_what_is_told_of_pairs_and_of_time() -> None:
    others = [used(0, pairs=40), used(1, pairs=10)]
    ((_, pairs),) = told(BalanceWatch(1.25, ("balanced", "zigzag")), [HEAVY] * (STAY - 2) + [others] * 2)
    assert pairs == (
        "for 10 consecutive steps a rank exceeded 1.25 x the mean pairs: 1.39 x on average, most often rank 1\n"
        'hint: set parallel.layout="balanced" or "zigzag", or pack rows with similar numbers of visible pairs; '
        "or raise imbalance_limit"
    )
    ((_, time),) = told(BalanceWatch(1.25, ("zigzag",)), [SLOW] * STAY)
    assert time == (
        "for 10 consecutive steps a rank exceeded 1.25 x the mean time in attention: 1.33 x on average, "
        "most often rank 0\nhint: pairs are balanced: check the device and load of that rank; or raise imbalance_limit"
    )


def test_layouts_that_would_help_are_those_there_are_and_not_in_use() -> None:
    assert "zigzag" in BalanceWatch.of(make_config(parallel__cp=2, parallel__layout="contiguous")).layouts
    assert "zigzag" not in BalanceWatch.of(make_config(parallel__cp=2, parallel__layout="zigzag")).layouts
    # Ranks that share no sequence share out no pairs.
    assert BalanceWatch.of(make_config(parallel__dp=2)) == BalanceWatch(1.25, ())
    assert BalanceWatch.of(make_config(imbalance_limit=None)).limit is None
