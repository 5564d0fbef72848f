"""An estimate of the memory of each rank before the run starts: parameters, gradients, moments, activations. No torch.

docs/reference/memory.md explains the formulas.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from longspan.advise.activations import Activations, activations_of, in_flight, peak_in_flight
from longspan.advise.run_shape import RunShape
from longspan.plan import PHASES, Layout, Plan
from longspan.topology import ModelShape, Topology

Shape = tuple[int, ...]


@dataclass(frozen=True)
class StageBudget:
    """Memory of one pipeline rank, in bytes unless stated otherwise.

    The estimate is for the first rank with this `pp_rank`, whose shards are largest. The actual
    peak is below `total`: `head` is freed before blocks are recomputed, and most gradients are allocated after most
    activations are freed.
    """

    pp_rank: int
    first_rank: int
    """The global rank that the estimate is for."""
    layers: tuple[int, ...]
    num_parameters: int
    """Elements of the rank's parameters after tp, ep and FSDP."""
    parameters: int
    gradients: int
    moments: int
    gathered: int
    """Weights that FSDP2 has gathered: embedding, head, the current block and the next block. In a pipeline, the weights
    of all stages of the rank. 0 for DDP."""
    unreduced: int
    """Unsharded gradients before their reduction: embedding, head and one block. With `defer_reduction` and gradient
    accumulation, all stages of the rank. For DDP, the buckets."""
    in_flight: int
    """Largest number of (micro-batch, stage) pairs whose activations are kept at once."""
    activations: int | None
    """Activations kept between forward and backward at the longest row, including everything of one recomputed block. In a
    pipeline, also the hidden states sent and received between stages. None: unknown, which a model of transformers may be."""
    head: int
    """A chunk of logits and the wide gradient of the head's weight, on the last stage."""

    @property
    def total(self) -> int:
        """Sum of all parts that are known."""
        held = (
            self.parameters,
            self.gradients,
            self.moments,
            self.gathered,
            self.unreduced,
            self.activations or 0,
            self.head,
        )
        return sum(held)


@dataclass(frozen=True)
class AttentionBudget:
    """Attention with one mask of the model, on the longest micro-batch."""

    mask: str
    layers: int
    """Number of layers that use the mask."""
    layout: str
    route: str
    ulysses_degree: int
    """Ranks that exchange heads."""
    ring_degree: int
    """Ranks among which rows travel."""
    bytes_sent: int
    """Bytes that the busiest rank sends in forward and backward of one layer."""


@dataclass(frozen=True)
class Budget:
    """The result of `budget_of`, at the longest row of the run."""

    topology: Topology
    global_batch: int
    """Rows per optimizer step."""
    seq_len: int
    num_parameters: int
    """Elements of the complete model, before sharding."""
    micro_batches: int
    """Micro-batches per optimizer step on each rank."""
    slots: int
    """T: slots of a rank in a micro-batch."""
    tokens: int
    """Largest number of a rank's slots that hold a token."""
    block: int
    """Bytes of activations kept per block and micro-batch."""
    attention: tuple[AttentionBudget, ...]
    """One entry per mask of the model."""
    stages: tuple[StageBudget, ...]
    """One entry per pipeline rank."""

    def record(self) -> dict[str, Any]:
        """Convert to plain values, for JSON."""
        stages = [asdict(stage) | {"total": stage.total} for stage in self.stages]
        return asdict(self) | {"stages": stages}


def budget_of(run: RunShape) -> Budget:
    """Estimate the memory of each pipeline rank when every row has the longest length in the data.

    Parameters, gradients and moments are exact in elements, without AdamW's step counters. Activations are the tensors
    that autograd keeps in eager code with evenly loaded experts. Not included: temporaries of operators and the
    optimizer, KV rows in flight, ids and labels of waiting micro-batches, and the overhead of the allocator, libraries
    and Python.

    Raises `SpecError` for a run that cannot be planned.
    """
    kept, topology = activations_of(run), run.topology
    layout, plans = run.longest_plans
    return Budget(
        topology=topology,
        global_batch=topology.global_batch(run.micro_batch_size, run.gradient_accumulation_steps),
        seq_len=run.seq_len,
        num_parameters=num_parameters(run.model),
        micro_batches=run.gradient_accumulation_steps,
        slots=kept.slots,
        tokens=kept.tokens,
        block=kept.block,
        attention=tuple(attention_budget(run, layout, name, plan) for name, plan in plans.items()),
        stages=tuple(_stage(run, kept, pp_rank) for pp_rank in range(topology.pp)),
    )


def attention_budget(run: RunShape, layout: Layout, name: str, plan: Plan) -> AttentionBudget:
    """Return the attention of one mask, on the longest micro-batch."""
    sent = [
        sum(plan.bytes(rank, phase, run.model.head_dim, run.itemsize) for phase in PHASES) for rank in range(plan.ranks)
    ]
    return AttentionBudget(
        name, run.planner.mask_layers[name], layout.name, plan.route, plan.degrees.heads, plan.degrees.rows, max(sent)
    )


def num_parameters(model: ModelShape) -> int:
    """Count the elements of all parameters; tied embeddings count once."""
    return sum(prod(weight.shape) for weight in _weights(model, range(model.num_layers), tp=1, ep=1))


def shard_sizes(run: RunShape, rank: int) -> dict[str, int]:
    """Count the elements of each parameter on `rank`, by name.

    TP and EP cut a dim into equal parts. FSDP2 then cuts dim 0 over n ranks like `torch.chunk`: the first ranks take
    ceil(rows / n) rows each, the last ranks fewer or none.
    """
    p = run.topology
    place = p.coordinates(rank)
    shard_dp = p.dp // p.dp_replicate
    dense = (shard_dp * p.cp, place["dp"] % shard_dp * p.cp + place["cp"])
    experts = (p.edp, place["edp"])
    sharded = run.wrapper == "fsdp"
    return {
        weight.name: shard_elements(weight.shape, *(experts if weight.is_experts else dense))
        if sharded
        else prod(weight.shape)
        for layers in run.stages_of(place["pp"])
        for weight in _weights(run.model, layers, p.tp, p.ep)
    }


@dataclass(frozen=True)
class _Weight:
    """A parameter with its shape after tp and ep."""

    name: str
    shape: Shape

    @property
    def is_experts(self) -> bool:
        return ".experts." in self.name

    @property
    def unit(self) -> str:
        """Name of the FSDP2 unit: the parameter's block, the block's experts, or "" for parameters outside blocks."""
        if not self.name.startswith("layers."):
            return ""
        return ".".join(self.name.split(".")[:2]) + (".experts" if self.is_experts else "")


def _stage(run: RunShape, kept: Activations, pp_rank: int) -> StageBudget:
    rank, wide = run.topology.groups("tp-dp-cp")[pp_rank][0], run.wide_itemsize
    elements, parts = sum(shard_sizes(run, rank).values()), run.stages_of(pp_rank)
    gathered, unreduced = _unsharded(run, parts, elements)
    activations, head, flying = _activations(run, kept, parts, pp_rank)
    return StageBudget(
        pp_rank=pp_rank,
        first_rank=rank,
        layers=tuple(layer for layers in parts for layer in layers),
        num_parameters=elements,
        parameters=elements * wide,
        gradients=elements * wide,
        moments=2 * elements * wide,
        gathered=gathered,
        unreduced=unreduced,
        in_flight=flying,
        activations=activations,
        head=head,
    )


def _unsharded(run: RunShape, parts: list[range], elements: int) -> tuple[int, int]:
    """Return (bytes of gathered weights, bytes of gradients that are not reduced yet)."""
    narrow, wide = run.itemsize, run.wide_itemsize
    if run.wrapper == "ddp":
        return 0, elements * wide
    units: dict[str, int] = {}
    for layers in parts:
        for weight in _weights(run.model, layers, run.topology.tp, run.topology.ep):
            units[weight.unit] = units.get(weight.unit, 0) + prod(weight.shape)
    ends, total = units.pop("", 0), sum(units.values())
    blocks = [
        units[f"layers.{layer}"] + units.get(f"layers.{layer}.experts", 0) for layers in parts for layer in layers
    ]
    everything = ends + total
    # Pipelines keep gathered weights between micro-batches.
    kept = run.topology.pp > 1 or run.schedule == "zero-bubble"
    gathered = everything if kept else ends + sum(sorted(blocks)[-2:])
    summed = run.gradient_accumulation_steps > 1 and run.defer_reduction
    unreduced = everything * wide if summed else (ends + max(blocks)) * narrow
    return gathered * narrow, unreduced


def _activations(run: RunShape, kept: Activations, parts: list[range], pp_rank: int) -> tuple[int, int, int]:
    """Return (bytes kept at once, bytes held during the loss, micro-batches in flight)."""
    ends = [(0 in layers, run.model.num_layers - 1 in layers) for layers in parts]
    sizes = [kept.stage(len(layers), first=first, last=last) for layers, (first, last) in zip(parts, ends, strict=True)]
    history = in_flight(run, pp_rank)
    most, flying = peak_in_flight(history, sizes)
    handed = 0
    if run.topology.pp > 1:
        # A stage has receive buffers for hidden states and gradients of every micro-batch, and keeps what it sent.
        buffers = sum((not first) + (not last) for first, last in ends) * run.gradient_accumulation_steps
        sent, _ = peak_in_flight(history, [int(not last) for _, last in ends])
        handed = (buffers + sent) * kept.hidden
    return most + kept.recomputed + handed, kept.head if any(last for _, last in ends) else 0, flying


def shard_elements(shape: Shape, ranks: int, index: int) -> int:
    """Count the elements of a shape on shard `index` of `ranks` along dim 0."""
    each = -(-shape[0] // ranks)
    return min(each, max(0, shape[0] - index * each)) * prod(shape[1:])


def _weights(model: ModelShape, layers: range, tp: int, ep: int) -> Iterator[_Weight]:
    """Yield the parameters of a stage, after tp and ep, in no particular order."""
    hidden_size = model.hidden_size
    first, last = 0 in layers, model.num_layers - 1 in layers
    if first or (last and model.tie_embeddings):
        yield _Weight("embed_tokens.weight", (model.vocab_size // tp, hidden_size))
    if last:
        yield _Weight("norm.weight", (hidden_size,))
    if last and not model.tie_embeddings:
        yield _Weight("lm_head.weight", (model.vocab_size // tp, hidden_size))
    for layer in layers:
        for name, shape in _block(model, tp, ep):
            yield _Weight(f"layers.{layer}.{name}", shape)


def _block(model: ModelShape, tp: int, ep: int) -> Iterator[tuple[str, Shape]]:
    hidden_size, dim, experts = model.hidden_size, model.head_dim, model.experts
    query, kv = (heads // tp * dim for heads in (model.num_heads, model.num_kv_heads))
    yield "input_layernorm.weight", (hidden_size,)
    yield "post_attention_layernorm.weight", (hidden_size,)
    yield "self_attn.q_proj.weight", (query, hidden_size)
    yield "self_attn.k_proj.weight", (kv, hidden_size)
    yield "self_attn.v_proj.weight", (kv, hidden_size)
    yield "self_attn.o_proj.weight", (hidden_size, query)
    if model.qk_norm:
        yield "self_attn.q_norm.weight", (dim,)
        yield "self_attn.k_norm.weight", (dim,)
    if experts is None:
        yield from _feed_forward("mlp", hidden_size, model.intermediate_size // tp)
        return
    yield "mlp.gate.weight", (experts.num_experts, hidden_size)
    yield "mlp.experts.gate_up_proj", (experts.num_experts // ep, 2 * experts.intermediate_size, hidden_size)
    yield "mlp.experts.down_proj", (experts.num_experts // ep, hidden_size, experts.intermediate_size)
    if experts.shared_intermediate_size:
        yield from _feed_forward("mlp.shared_expert", hidden_size, experts.shared_intermediate_size // tp)


def _feed_forward(name: str, hidden_size: int, intermediate_size: int) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.gate_proj.weight", (intermediate_size, hidden_size)
    yield f"{name}.up_proj.weight", (intermediate_size, hidden_size)
    yield f"{name}.down_proj.weight", (hidden_size, intermediate_size)
