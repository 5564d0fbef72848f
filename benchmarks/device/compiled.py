"""Stage 4: attention inside compiled code, attention captured as a CUDA graph, and a step's trace for ui.perfetto.dev."""

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.device import step
from benchmarks.device.attention import one_rank
from benchmarks.device.case import Attend, Case, both
from benchmarks.device.clock import settle, times
from benchmarks.device.rows import Check, Figures, Options
from longspan import ContextParallel

Tensor = torch.Tensor


def checks(options: Options) -> Iterator[Check]:
    """Yield the checks of stage 4, on one rank."""
    case = _case(options)
    backend = "aot_eager" if options.quick else "inductor"
    block = _Compiled(case, backend)
    yield Check(f"compiled by {backend} {case}", block.error, partial(block.measure, options.quick))
    if case.device.type != "cuda":
        yield Check.absent(f"CUDA graph {case}", "CUDA graphs need a GPU")
    else:
        graph = _Graph(case)
        yield Check(f"CUDA graph {case}", graph.error, graph.measure)
    yield from step.trace_checks(options)


def _case(options: Options) -> Case:
    device = torch.device(options.device)
    if options.device == "cpu":
        return Case((200, 312) if options.quick else (2048, 2048), (8, 2), 64, "float32", device)
    return Case((2048, 6144), (32, 8), 128, "bfloat16", device)


class _Compiled:
    """Attention in one compiled graph with other operators: doubled queries at half the scale give the same result."""

    def __init__(self, case: Case, backend: str) -> None:
        self.case = case
        with ContextParallel(None).sequence(case.mask) as sequence:

            def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return sequence.attention(q * 2, k, v, scale=case.head_dim**-0.5 / 2)

            self.eager: Attend = block
            self.compiled: Attend = torch.compile(block, fullgraph=True, dynamic=False, backend=backend)
        self.seconds = 0.0

    def error(self) -> float:
        began = time.perf_counter()
        both(self.compiled, self.case.inputs)()
        settle(self.case.device)
        self.seconds = time.perf_counter() - began
        return self.case.error(self.compiled)

    def measure(self, quick: bool) -> Figures:
        runs = {"eager": both(self.eager, self.case.inputs), "compiled": both(self.compiled, self.case.inputs)}
        found = times(runs, self.case.device, quick)
        return {"first_call_s": self.seconds, "eager_ms": found["eager"], "compiled_ms": found["compiled"]}


class _Graph:
    """Forward and backward, captured once as a CUDA graph and replayed with other inputs."""

    def __init__(self, case: Case) -> None:
        self.case, self.attend = case, one_rank(case)
        self.inputs: list[Tensor] = []
        self.replay: Callable[[], object] = lambda: None

    def error(self) -> float:
        self.inputs = [torch.zeros_like(x) for x in self.case.inputs]
        run, graph, side = both(self.attend, self.inputs), torch.cuda.CUDAGraph(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # warm up caches: capture allows no copy from the host
                run()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            results = run()
        for place, x in zip(self.inputs, (*self.case.inputs[:3], self.case.dout), strict=True):
            place.copy_(x)
        graph.replay()
        self.replay = graph.replay
        return self.case.error_of(results)

    def measure(self) -> Figures:
        runs = {"eager": both(self.attend, self.case.inputs), "graph": self.replay}
        found = times(runs, self.case.device)
        return {"eager_ms": found["eager"], "graph_ms": found["graph"]}
