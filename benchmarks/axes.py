"""Count the traffic of every axis in a step, next to its formula, and the activation memory of a decoder block.

    python -m benchmarks.axes [--tp 2] [--cp 2] [--dp 1] [--pp 1] [--ep 1] [--seq-len 1024]

Bytes are those of the rank that sends most over the axis. Attention, hidden states between pipeline stages and rows of experts
depend on a plan, a schedule and a router, and have no formula here. "keeps": activations that a decoder block saves for
backward, without weights. "peak": maximum memory of the block's forward and backward. Both are divided by the value on one
rank. For the formulas see docs/reference/traffic.md.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.census import Counts, census
from benchmarks.harness import freed_here, peak_bytes, save
from longspan.advise.volumes import Shape, StepShape, shard_elements, step_volumes
from longspan.comm.launch import join_world, launch, leave_world
from longspan.comm.meshes import Meshes
from longspan.data import Batch
from longspan.model import Decoder, ModelConfig, apply_tensor_parallel
from longspan.model.rope import rotary_tables
from longspan.train.axes import stages_of, topology_of
from longspan.train.micro import make_micro, masks_of
from longspan.train.model import TORCH_DTYPES, meta_model
from longspan.train.parallel import make_stages
from longspan.train.step import TrainStep, make_context
from longspan.train.train_config import TrainConfig, model_config

PROPORTIONS = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_layers": 4,
    "num_heads": 8,
    "num_kv_heads": 2,
    "intermediate_size": 448,
}
"""Ratios of hidden size, heads and intermediate size are those of Llama 3 8B."""
EXPERTS = {"num_experts": 4, "top_k": 2, "intermediate_size": 112}


@click.command(help=__doc__)
@click.option("--tp", default=2, show_default=True)
@click.option("--cp", default=2, show_default=True)
@click.option("--dp", default=1, show_default=True)
@click.option("--pp", default=1, show_default=True)
@click.option("--ep", default=1, show_default=True, help="Expert-parallel degree. If above 1, layers have experts.")
@click.option("--dp-replicate", default=1, show_default=True)
@click.option("--sp/--no-sp", default=True, show_default=True)
@click.option("--route", default="ring", show_default=True)
@click.option("--gradient-accumulation-steps", default=2, show_default=True)
@click.option("--seq-len", default=1024, show_default=True)
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(seq_len: int, gradient_accumulation_steps: int, output: Path | None, **parallel: Any) -> None:
    config = make_config(seq_len, gradient_accumulation_steps, parallel)
    rows = launch(traffic_of_step, (config, seq_len), topology_of(config).world)
    Console(width=120).print(_traffic_table(rows))
    record: dict[str, Any] = {
        "parallel": parallel,
        "seq_len": seq_len,
        "gradient_accumulation_steps": gradient_accumulation_steps,
        "traffic": rows,
    }
    if parallel["tp"] * parallel["cp"] > 1 and parallel["ep"] == 1:
        record["activations"] = ratios(config, seq_len)
        Console(width=120).print(_activations_table(record["activations"], config))
    save(output, record)


def make_config(seq_len: int, gradient_accumulation_steps: int, parallel: dict[str, Any]) -> TrainConfig:
    """Return the configuration of a small fp32 model of Llama 3's proportions on these axes."""
    model = PROPORTIONS | ({"intermediate_size": None, "experts": EXPERTS} if parallel["ep"] > 1 else {})
    return TrainConfig.model_validate(
        {
            "data": {"paths": ["/nowhere"], "seq_len": seq_len},
            "model": model,
            "parallel": parallel,
            "gradient_accumulation_steps": gradient_accumulation_steps,
        }
    )


def traffic_of_step(config: TrainConfig, seq_len: int) -> list[dict[str, Any]]:
    """Return, per axis and kind, one step's traffic of the rank that sends most, and the traffic by formula. Collective."""
    meshes = join_world(topology_of(config), timedelta(minutes=5), threads=1)
    try:
        step = TrainStep(make_stages(config, meshes), meshes, config)
        place = meshes.topology.coordinates(dist.get_rank())
        batches = [
            row_of(config, seq_len, 100 * place["dp"] + micro) for micro in range(config.gradient_accumulation_steps)
        ]
        with census(meshes) as traffic:
            step(batches, 0)
        slots = [step.micro(batch).input_ids.shape[1] for batch in batches]
        formulas = step_volumes(step_shape(config, place["pp"], slots))
        mine = {key: (counts, formulas.get(key)) for key, counts in traffic.by_kind.items()}
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        return [_most(key, everyone) for key in sorted({key for rank in everyone for key in rank})]
    finally:
        leave_world()


def step_shape(config: TrainConfig, pp_rank: int, slots: list[int]) -> StepShape:
    """Return the inputs of the formulas, for a run with one stage per rank and micro-batches of `slots` slots per rank."""
    model, topology = model_config(config), topology_of(config)
    stages = stages_of(config, model)
    layers, first, last = stages[pp_rank], pp_rank == 0, pp_rank == len(stages) - 1
    sp, experts = config.parallel.sp and topology.tp > 1, model.experts
    table = (model.vocab_size // topology.tp, model.hidden_size)
    has_head = last and not (first and model.tie_embeddings)
    root = [table] * first + [(model.hidden_size,)] * last + [table] * has_head
    head_norms = 2 * model.head_dim * model.qk_norm
    gate = experts.num_experts * model.hidden_size if experts else 0
    return StepShape(
        topology,
        sp,
        model.hidden_size,
        len(layers),
        tuple(slots),
        units=(*[block_shapes(model, topology.tp)] * len(layers), tuple(root)),
        expert_units=(expert_shapes(model, topology.ep),) * (len(layers) if experts else 0),
        parts=len(layers) * (head_norms + sp * (2 * model.hidden_size + gate)) + model.hidden_size * last * sp,
        first=first,
        last=last,
        num_experts=experts.num_experts if experts else 0,
        balance=experts is not None and experts.balance > 0,
        tied=shard_elements([table], topology.degree("shard")) if model.tie_embeddings else 0,
        deferred=config.parallel.defer_reduction,
    )


def block_shapes(model: ModelConfig, tp: int) -> tuple[Shape, ...]:
    """Return the shapes of a block's weights on one rank of tp, without experts."""
    E, D = model.hidden_size, model.head_dim
    query, kv = model.num_heads * D // tp, model.num_kv_heads * D // tp
    attention: list[Shape] = [(query, E), (kv, E), (kv, E), (E, query), (E,), (E,), *[(D,)] * (2 * model.qk_norm)]
    if model.experts is not None:
        return (*attention, (model.experts.num_experts, E))
    assert model.intermediate_size is not None, "a model has one of the two"
    ffn = model.intermediate_size // tp
    return (*attention, (ffn, E), (ffn, E), (E, ffn))


def expert_shapes(model: ModelConfig, ep: int) -> tuple[Shape, ...]:
    """Return the shapes of a layer's experts on one rank of ep."""
    if model.experts is None:
        return ()
    number, ffn, E = model.experts.num_experts // ep, model.experts.intermediate_size, model.hidden_size
    return ((number, 2 * ffn, E), (number, E, ffn))


@dataclass(frozen=True)
class Activations:
    """Memory of a decoder block, in bytes. `saved`: storages saved for backward, without weights and rotary tables. `peak`:
    maximum in forward and backward, without weights, weight gradients and the input."""

    saved: int
    peak: int


def ratios(config: TrainConfig, seq_len: int) -> dict[str, dict[str, float]]:
    """Return saved and peak bytes of a decoder block, worst rank / one rank, with and without SP. Starts ranks."""
    parallel = config.parallel.model_copy(update={"dp": 1, "pp": 1, "dp_replicate": 1})
    config = config.model_copy(update={"parallel": parallel, "gradient_accumulation_steps": 1})
    one = parallel.model_copy(update={"tp": 1, "cp": 1})
    runs = {"one": one} | {
        "sp" if sp else "no sp": parallel.model_copy(update={"sp": sp})
        for sp in ([True, False] if parallel.tp > 1 else [True])
    }
    worst = {}
    for name, run in runs.items():
        changed = config.model_copy(update={"parallel": run})
        ranks = launch(_activations, (changed, seq_len), topology_of(changed).world)
        worst[name] = Activations(max(rank.saved for rank in ranks), max(rank.peak for rank in ranks))
    return {
        name: {"saved": of.saved / worst["one"].saved, "peak": of.peak / worst["one"].peak}
        for name, of in worst.items()
    }


def _activations(config: TrainConfig, seq_len: int) -> list[Activations]:
    meshes = join_world(topology_of(config), timedelta(minutes=5), threads=1)
    try:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, block_activations(config, meshes, seq_len))
        return everyone
    finally:
        leave_world()


def block_activations(config: TrainConfig, meshes: Meshes, seq_len: int) -> Activations:
    """Measure only the first decoder block of a run, on this rank's part of a row. Collective over tp x cp."""
    model = meta_model(config)
    if meshes.topology.tp > 1:
        apply_tensor_parallel(model, meshes.data["tp"], sequence=config.parallel.sp)
    model.to_empty(device=meshes.data.device_type)
    model.init_weights()
    run, tables = _block_of(model, config, meshes, row_of(config, seq_len, 0))
    ours = {_storage(tensor).data_ptr() for tensor in (*model.parameters(), *tables)}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = _storage(tensor)
        if storage.data_ptr() not in ours:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    # Saved tensors stay alive until backward, so an address identifies a storage.
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run()
    out.backward(torch.ones_like(out))  # allocates the gradients of weights
    del out

    def both() -> None:
        out = run()
        out.backward(torch.ones_like(out))

    # Take the minimum: gloo's own thread may free a buffer late.
    return Activations(sum(kept.values()), min(peak_of(both) for _ in range(3)))


def peak_of(function: Callable[[], Any]) -> int:
    """Return the peak bytes of `function` minus the bytes allocated before."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    gc.collect()  # garbage freed during the call would lower the peak
    with freed_here(), torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        function()
    return peak_bytes(profiler)


def _block_of(
    model: Decoder, config: TrainConfig, meshes: Meshes, batch: Batch
) -> tuple[Callable[[], Tensor], tuple[Tensor, Tensor]]:
    """Return the first block's forward on this rank's slots, and its rotary tables."""
    cp = make_context(config, model.config, meshes)
    mask = model.config.mask_names[0]
    with cp.sequence(masks_of(batch, (mask,))) as sequence:
        micro = make_micro(batch, sequence, meshes, config, None, torch.zeros(()))
    dtype = TORCH_DTYPES[config.dtype]
    rows = micro.input_ids.shape[1] // (meshes.topology.tp if config.parallel.sp else 1)
    x = torch.randn(1, rows, model.config.hidden_size, dtype=dtype, device=micro.input_ids.device, requires_grad=True)
    cos, sin = rotary_tables(micro.position_ids, model.config, dtype)
    block = model.blocks[0]
    return (lambda: block(x, cos, sin, micro.attend, mask, micro.tokens, None)), (cos, sin)


def row_of(config: TrainConfig, seq_len: int, seed: int) -> Batch:
    """Return one document of random tokens, numbered as by the loader."""
    ids = np.random.default_rng(seed).integers(1, model_config(config).vocab_size, seq_len)
    return replace(Batch.from_documents([ids]), numbers=np.arange(seq_len))


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()


def _most(key: tuple[str, str], everyone: list[dict[tuple[str, str], Any]]) -> dict[str, Any]:
    counts, formula = max((rank[key] for rank in everyone if key in rank), key=lambda pair: pair[0].bytes_sent)
    assert isinstance(counts, Counts)
    return {
        "axis": key[0], "kind": key[1], "calls": counts.calls, "elements": float(counts.elements_sent),
        "bytes": float(counts.bytes_sent), "formula": None if formula is None else float(formula),
    }  # fmt: skip


def _traffic_table(rows: list[dict[str, Any]]) -> Table:
    table = Table("axis", "kind", "calls", "elements sent", "formula", "bytes sent", box=None)
    for row in rows:
        formula = "" if row["formula"] is None else f"{row['formula']:,.1f}"
        numbers = (f"{row['elements']:,.1f}", formula, f"{row['bytes']:,.0f}")
        table.add_row(row["axis"], row["kind"], str(row["calls"]), *numbers)
    return table


def _activations_table(found: dict[str, dict[str, float]], config: TrainConfig) -> Table:
    table = Table("a block over one rank's", "keeps", "peak", box=None)
    for name, of in found.items():
        if name != "one":
            label = (
                f"tp{config.parallel.tp} cp{config.parallel.cp}, {name}"
                if config.parallel.tp > 1
                else f"cp{config.parallel.cp}"
            )
            table.add_row(label, f"{of['saved']:.3f}", f"{of['peak']:.3f}")
    return table


if __name__ == "__main__":
    main()
