"""Time and trace a training step on one rank, against the same decoder with plain SDPA, without groups and FSDP.

A new process creates the world of one rank as `longspan train` does. Gradients of a row of `CHECKED` documents are compared
with those of the decoder in fp64. Timing uses the same code with a longer row.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from benchmarks.device.clock import peak_mib, settle, times
from benchmarks.device.errors import of_limit
from benchmarks.device.flops import speed
from benchmarks.device.rows import Check, Figures, Options
from longspan import Mask
from longspan.comm.launch import join_world, launch, leave_world
from longspan.comm.meshes import Meshes
from longspan.data import Batch
from longspan.model import Decoder
from longspan.topology import Topology
from longspan.train.flops import step_flops
from longspan.train.model import TORCH_DTYPES, make_model
from longspan.train.optim import LossScale, make_optimizer, update
from longspan.train.parallel import decoder_of, make_stages
from longspan.train.step import TrainStep
from longspan.train.train_config import TrainConfig, load_config
from longspan.verify.baseline import attend_documents

Tensor = torch.Tensor
DEMO = Path(__file__).parent.parent.parent / "examples" / "demo.toml"
CHECKED = (700, 1, 323)
"""Document lengths of the row whose gradients are compared; short enough for fp64 scores."""
_BIG = (
    "vocab_size=32000 hidden_size=1024 num_layers=8 num_heads=16 num_kv_heads=4 intermediate_size=2816 qk_norm=false "
    "init_std=0.02"
)
TRACE = "step-trace.json.gz"


def checks(options: Options) -> Iterator[Check]:
    """Yield the check of one step, compared and timed."""
    found = cache(partial(launch, in_a_world, (_compare, options), 1))
    yield Check(f"training step {_title(options)}", lambda: found()[0], lambda: found()[1])


def trace_checks(options: Options) -> Iterator[Check]:
    """Yield the check of one step under the profiler."""
    found = cache(partial(launch, in_a_world, (_trace, options), 1))
    yield Check(f"profiler trace of a step {_title(options)}", lambda: found()[0], lambda: found()[1])


def in_a_world(function: Callable[..., Any], options: Options) -> Any:
    """Call `function(options, meshes)` in a world of one rank, this one."""
    meshes = join_world(
        Topology(dp=1, cp=1), timedelta(minutes=2), threads=1 if options.quick else None, device=options.device
    )
    try:
        return function(options, meshes)
    finally:
        leave_world()


def step_config(options: Options) -> TrainConfig:
    """Return the configuration: 135 million parameters in bf16 on a GPU, else the demo's."""
    model = [] if options.quick or options.device == "cpu" else [f"model.{part}" for part in _BIG.split()]
    parallel = ["parallel.cp=1", f"parallel.device={options.device}"]
    return load_config(DEMO, [*model, *parallel, f"dtype={'bf16' if model else 'fp32'}"])


def make_batch(config: TrainConfig, lengths: Sequence[int]) -> Batch:
    """Return documents of random tokens."""
    assert config.model is not None, "the demo's configuration has a model"
    generator = torch.Generator().manual_seed(0)
    return Batch.from_documents(
        [torch.randint(1, config.model.vocab_size, (n,), generator=generator).numpy() for n in lengths]
    )


class PlainStep:
    """The step in plain PyTorch: fp32 weights, a copy in the compute dtype, SDPA per document, AdamW."""

    def __init__(self, config: TrainConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.config, self.device = config, device
        self.wide = make_model(config).to(device)
        round_weights(self.wide)
        self.optimizer, self.scale = make_optimizer(self.wide, config.optim), LossScale.of_dtype(config.dtype)
        self.model = Decoder(self.wide.config).to(device, dtype)
        self.model.load_state_dict(self.wide.state_dict())

    def __call__(self, batch: Batch) -> None:
        self.model.zero_grad()
        gradients = self.backward(batch)
        for p, grad in zip(self.wide.parameters(), gradients, strict=True):
            p.grad = grad.float()
        update([self.optimizer], self.wide.parameters(), self.scale, self.config.optim.lr, self.config.optim.clip_norm)
        self.model.load_state_dict(self.wide.state_dict())

    def backward(self, batch: Batch) -> list[Tensor]:
        """Return the gradients of the mean loss."""
        x = {name: tensor.to(self.device) for name, tensor in batch.tensors().items()}

        def attend(q: Tensor, k: Tensor, v: Tensor, mask: str) -> Tensor:
            return attend_documents(q, k, v, batch.lengths, mask)

        loss = self.model(x["input_ids"], x["position_ids"], attend, labels=x["labels"]) / batch.num_targets
        return list(torch.autograd.grad(loss, list(self.model.parameters())))


@torch.no_grad()
def round_weights(model: torch.nn.Module) -> None:
    """Round weights to bf16, in place, so that copies in any dtype are equal."""
    for p in model.parameters():
        p.copy_(p.bfloat16())


def _lengths(options: Options) -> tuple[int, ...]:
    return (512,) if options.quick else (8192,) if options.device == "cpu" else (16384,)


def _title(options: Options) -> str:
    config, tokens = step_config(options), sum(_lengths(options))
    assert config.model is not None, "the demo's configuration has a model"
    return f"{config.dtype} {config.model.num_parameters / 1e6:.3g}M parameters, {tokens:,} tokens"


def _compare(options: Options, meshes: Meshes) -> tuple[float, Figures]:
    """Return (error / limit, figures); no figures if error / limit is above 1."""
    config = step_config(options)
    ours, device = _train_step(config, meshes)
    plain = PlainStep(config, device, TORCH_DTYPES[config.dtype])
    batch = make_batch(config, CHECKED)
    right = PlainStep(config, device, torch.float64).backward(batch)
    ours.backward([batch])
    grads = [p.grad for p in decoder_of(ours.stages[0]).parameters()]
    got = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]
    error = of_limit([g.reshape(r.shape) for g, r in zip(got, right, strict=True)], plain.backward(batch), right, 1e-12)
    del right, got
    if not error <= 1:
        return error, {}
    row = make_batch(config, _lengths(options))
    runs = {"ours": lambda: ours([row], 0), "sdpa": lambda: plain(row)}
    found = times(runs, device, options.quick)
    model, dtype = ours.model_config, TORCH_DTYPES[config.dtype]
    flops = step_flops(model, row.seq_len, model.num_layers * Mask.documents(row.lengths).area)
    return error, {
        "step_ms": found["ours"],
        "over_sdpa": found["ours"] / found["sdpa"],
        "tokens_per_second": 1e3 * row.seq_len / found["ours"],
        **speed(flops, found["ours"], device, dtype),
        "peak_mib": peak_mib(runs["ours"], device),
        "sdpa_step_ms": found["sdpa"],
        **{f"sdpa_{key}": value for key, value in speed(flops, found["sdpa"], device, dtype).items()},
        "sdpa_peak_mib": peak_mib(runs["sdpa"], device),
    }


def _train_step(config: TrainConfig, meshes: Meshes) -> tuple[TrainStep, torch.device]:
    ours = TrainStep(make_stages(config, meshes), meshes, config)
    round_weights(ours.stages[0])
    return ours, ours.device


def _trace(options: Options, meshes: Meshes) -> tuple[float, Figures]:
    """Trace a step. The check holds if attention ran once per layer in the trace."""
    config = step_config(options)
    ours, device = _train_step(config, meshes)
    row = make_batch(config, _lengths(options))
    for step in range(2):
        ours([row], step)
    with _profiled(device) as profiler:
        ours([row], 2)
    profiler.export_chrome_trace(str(options.path / TRACE))
    events = list(profiler.events())
    calls = sum(event.name == "longspan::attention_forward" for event in events)
    layers = ours.model_config.num_layers
    return abs(calls - layers) / layers * 2, {"file": TRACE, **work_of(events)}


@contextmanager
def _profiled(device: torch.device) -> Iterator[torch.profiler.profile]:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    settle(device)
    with torch.profiler.profile(activities=activities) as profiler:
        yield profiler
        settle(device)


def work_of(events: Iterable[Any]) -> Figures:
    """Summarise profiler events: the longest by name; on a GPU also launches, host syncs, and copies to and from the host."""
    events = list(events)
    on_device = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    spent: dict[str, list[float]] = defaultdict(list)
    for event in on_device or events:
        spent[event.name].append((event.device_time_total if on_device else event.self_cpu_time_total) / 1e3)
    longest = sorted(spent.items(), key=lambda item: -sum(item[1]))[:8]
    busiest = [{"name": name, "calls": len(ms), "ms": sum(ms)} for name, ms in longest]
    if not on_device:
        return {"busiest": busiest}
    names = [event.name for event in events]
    return {
        "launches": sum(name.startswith(("cudaLaunchKernel", "cuLaunchKernel")) for name in names),
        "host_waits": sum(name.startswith("cuda") and name.endswith("Synchronize") for name in names),
        "copies_to_host": sum(name.startswith("Memcpy DtoH") for name in names),
        "copies_to_device": sum(name.startswith("Memcpy HtoD") for name in names),
        "device_ms": sum(sum(ms) for ms in spent.values()),
        "busiest": busiest,
    }
