"""Compiled code over many batches: as eager, in one graph, compiled once for all documents and lengths with equal slots."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from longspan import ContextParallel, Mask
from longspan.data import positions
from longspan.model import Decoder, ModelConfig
from tests.ranks import COLD_COMPILE, run_ranks

CONFIG = ModelConfig(vocab_size=64, hidden_size=32, num_layers=1, num_heads=4, num_kv_heads=2, intermediate_size=64)
BATCHES = [
    lengths
    for S in (16, 17, 20)
    for lengths in (
        [S],
        [1, S - 1],
        [5, 7, S - 12],
        [S // 2, S - S // 2],
        [2] * (S // 2) + [S % 2],
        [S - 3, 3],
        [4, S - 4],
    )
][:20]


def _compiled(group, rank, layout, route, backend, recompute):
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Decoder(CONFIG, recompute=recompute).double()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=False)
    cp = ContextParallel(group, layout=layout, route=route, heads=(4, 2), pad_to_multiple_of=12)
    worst = 0.0
    for lengths in BATCHES:
        ids = torch.arange(sum(lengths))[None] * 7 % 64
        whole = {"input_ids": ids, "labels": ids.roll(-1), "position_ids": torch.from_numpy(positions(lengths))[None]}
        with cp.sequence(Mask.documents(lengths)) as sequence:
            local = sequence.shard(whole, dim=1)
            results = []
            for module in (model, compiled):
                model.zero_grad()
                attend = lambda q, k, v, mask: sequence.attention(q, k, v, mask=mask)  # noqa: E731
                loss = module(local["input_ids"], local["position_ids"], attend, local["labels"])
                loss.backward()
                results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
        worst = max(worst, *((a - b).abs().max().item() for a, b in zip(*results, strict=True)))
    return worst, counter.frame_count


@pytest.mark.parametrize(
    ("layout", "route", "backend", "recompute"),
    [
        ("zigzag", "ring", "aot_eager", "none"),
        ("balanced", "exchange", "aot_eager", "block"),
        ("zigzag", "ulysses", "aot_eager", "none"),
        pytest.param("balanced", "exchange", "inductor", "none", marks=pytest.mark.slow),
    ],
)
def test_one_compilation_serves_all_batches(layout, route, backend, recompute):
    """Where a batch needs no exchange of heads, it is another graph: then there are two."""
    for worst, compilations in run_ranks(2, _compiled, layout, route, backend, recompute, timeout=COLD_COMPILE):
        assert worst < 1e-10
        assert compilations <= (2 if route == "ulysses" else 1)
