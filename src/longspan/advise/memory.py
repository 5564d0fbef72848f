"""What a rank of a run holds, reckoned before there is one: its weights, their gradients and moments, its activations.
No torch. The formulas are in docs/reference/memory.md.
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
    """What a rank of one place in the pipeline holds: bytes where nothing else is said.

    Of ranks alike but for their shards this is the first, which has most. All at once is more than is ever held, since
    `head` is gone when blocks are computed again and most gradients come when most activations have left.
    """

    pp_rank: int
    first_rank: int
    """Of those in this place, the rank this is reckoned for."""
    layers: tuple[int, ...]
    num_parameters: int
    """Elements here: of the layers and ends of its stages, after tp, ep and FSDP."""
    parameters: int
    gradients: int
    moments: int
    gathered: int
    """Weights in use that FSDP2 has gathered: ends, the block at work and the next; in a pipeline all of the rank's stages.
    0 for DDP."""
    unreduced: int
    """Gradients of whole weights on their way to their shards: of the ends and a block, or of all stages where several
    micro-batches are summed first (`defer_reduction`). For DDP its buckets."""
    in_flight: int
    """Micro-batches (times stages) whose activations are kept at once."""
    activations: int
    """Kept between forward and backward, at the longest row; of a block that is computed again, all; in a pipeline also
    what stages hand each other."""
    head: int
    """Of the last stage: a chunk of logits and the wide gradient of the head's weight."""

    @property
    def total(self) -> int:
        """All at once."""
        held = (
            self.parameters,
            self.gradients,
            self.moments,
            self.gathered,
            self.unreduced,
            self.activations,
            self.head,
        )
        return sum(held)


@dataclass(frozen=True)
class AttentionBudget:
    """Attention by one mask of the model, over the longest micro-batch."""

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
    """By the rank that sends most, in forward and backward of one layer."""


@dataclass(frozen=True)
class Budget:
    """The numbers of a run at its longest row: see `budget_of`."""

    topology: Topology
    global_batch: int
    """Rows of a step."""
    seq_len: int
    num_parameters: int
    """Of the whole model."""
    micro_batches: int
    """Of a step, on each rank."""
    slots: int
    """Of a rank in a micro-batch: T."""
    tokens: int
    """Of the slots, those that hold a token, on the rank with most."""
    block: int
    """Bytes of activations kept of one block and micro-batch."""
    attention: tuple[AttentionBudget, ...]
    """One for each mask of the model."""
    stages: tuple[StageBudget, ...]
    """One for each place in the pipeline."""

    def record(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        stages = [asdict(stage) | {"total": stage.total} for stage in self.stages]
        return asdict(self) | {"stages": stages}


def budget_of(run: RunShape) -> Budget:
    """What each rank of a run holds when its rows are the longest that the data can give.

    Parameters, gradients and moments are exact in elements (AdamW's counters of steps apart). Activations are those that
    autograd keeps, in eager code, experts evenly loaded. Left out: temporaries of the operator at work and of the optimizer,
    a route's rows in flight, ids and labels of micro-batches that wait, what the allocator, the libraries and Python take.

    Raises `SpecError` for what no rank could carry out.
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
        attention=tuple(_attention(run, layout, name, plan) for name, plan in plans.items()),
        stages=tuple(_stage(run, kept, pp_rank) for pp_rank in range(topology.pp)),
    )


def _attention(run: RunShape, layout: Layout, name: str, plan: Plan) -> AttentionBudget:
    sent = [
        sum(plan.bytes(rank, phase, run.model.head_dim, run.itemsize) for phase in PHASES) for rank in range(plan.ranks)
    ]
    return AttentionBudget(
        name, run.planner.layers.get(name, 1), layout.name, plan.route, plan.degrees.heads, plan.degrees.rows, max(sent)
    )


def num_parameters(model: ModelShape) -> int:
    """Elements of all parameters; tied embeddings count once."""
    return sum(prod(weight.shape) for weight in _weights(model, range(model.num_layers), tp=1, ep=1))


def shard_sizes(run: RunShape, rank: int) -> dict[str, int]:
    """Elements of each parameter that are on `rank`, by name: 0 where there are fewer rows than ranks to share them.

    TP and EP cut a dim into equal parts. FSDP2 cuts dim 0 of what is left over n ranks: the first ones take ceil(rows / n)
    rows each, as `torch.chunk`, and the last ones fewer or none.
    """
    p = run.topology
    place = p.coordinates(rank)
    shard_dp = p.dp // p.dp_replicate
    dense = (shard_dp * p.cp, place["dp"] % shard_dp * p.cp + place["cp"])
    experts = (p.edp, place["edp"])
    sharded = run.wrapper == "fsdp"
    return {
        weight.name: _rows(weight.shape, *(experts if weight.is_experts else dense)) if sharded else prod(weight.shape)
        for layers in run.stages_of(place["pp"])
        for weight in _weights(run.model, layers, p.tp, p.ep)
    }


@dataclass(frozen=True)
class _Weight:
    """A parameter as tp and ep leave it."""

    name: str
    shape: Shape

    @property
    def is_experts(self) -> bool:
        return ".experts." in self.name

    @property
    def unit(self) -> str:
        """What FSDP2 gathers it with: its block, its block's experts, or all that is in no block."""
        if not self.name.startswith("layers."):
            return ""
        return ".".join(self.name.split(".")[:2]) + (".experts" if self.is_experts else "")


def _stage(run: RunShape, kept: Activations, pp_rank: int) -> StageBudget:
    rank, wide = run.topology.groups("tp-dp-cp")[pp_rank][0], run.wide_itemsize
    elements, parts = sum(shard_sizes(run, rank).values()), run.stages_of(pp_rank)
    gathered, unreduced = _whole(run, parts, elements)
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


def _whole(run: RunShape, parts: list[range], elements: int) -> tuple[int, int]:
    """Bytes of weights gathered, and of gradients not reduced yet."""
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
    # Pipelines gather no weights anew between micro-batches.
    kept = run.topology.pp > 1 or run.schedule == "zero-bubble"
    gathered = everything if kept else ends + sum(sorted(blocks)[-2:])
    summed = run.gradient_accumulation_steps > 1 and run.defer_reduction
    unreduced = everything * wide if summed else (ends + max(blocks)) * narrow
    return gathered * narrow, unreduced


def _activations(run: RunShape, kept: Activations, parts: list[range], pp_rank: int) -> tuple[int, int, int]:
    """Bytes kept at once, bytes at work in the loss, and micro-batches in flight."""
    ends = [(0 in layers, run.model.num_layers - 1 in layers) for layers in parts]
    sizes = [kept.stage(len(layers), first=first, last=last) for layers, (first, last) in zip(parts, ends, strict=True)]
    history = in_flight(run, pp_rank)
    most, flying = peak_in_flight(history, sizes)
    handed = 0
    if run.topology.pp > 1:
        # Each stage receives hidden states and gradients into buffers of its own for every micro-batch, and keeps what it sent.
        buffers = sum((not first) + (not last) for first, last in ends) * run.gradient_accumulation_steps
        sent, _ = peak_in_flight(history, [int(not last) for _, last in ends])
        handed = (buffers + sent) * kept.hidden
    return most + kept.recomputed + handed, kept.head if any(last for _, last in ends) else 0, flying


def _rows(shape: Shape, ranks: int, index: int) -> int:
    """Elements of a shape that rank `index` of `ranks` gets of its dim 0."""
    each = -(-shape[0] // ranks)
    return min(each, max(0, shape[0] - index * each)) * prod(shape[1:])


def _weights(model: ModelShape, layers: range, tp: int, ep: int) -> Iterator[_Weight]:
    """The parameters of a stage, in no order, as tp and ep leave them."""
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
