"""Traffic of an optimizer step over each axis by formula, in elements per rank, as `benchmarks.census` counts. No torch.

docs/reference/traffic.md explains the formulas.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod

from longspan.topology import Topology

Shape = tuple[int, ...]
Volumes = dict[tuple[str, str], Fraction]
"""(axis, collective) -> elements that a rank sends."""

AGREEMENT_BYTES = 546
"""Bytes that a rank contributes when ranks compare their inputs: two digests, and space for an error message."""


@dataclass(frozen=True)
class StepShape:
    """The sizes of an optimizer step on one rank.

    slots: T of each micro-batch, the slots of the CP shard.
    layers: number of layers on this rank. Layers are dense, or have `num_experts` experts and no shared expert.
    balance: whether there is a load-balancing loss over the batch.
    first, last: whether this rank has the embedding and the head.
    units: shapes after tp of the parameters of each FSDP2 unit over `shard`, blocks first, the root last.
    expert_units: shapes after ep of the parameters of each FSDP2 unit over `edp`.
    parts: elements of weights whose gradient is partial on a TP rank: QK-norms, and under SP also norms and router.
    tied: elements of a tied embedding on this rank.
    deferred: whether gradients are reduced once per step, not after each micro-batch. Always so in a pipeline.
    """

    topology: Topology
    sp: bool
    hidden_size: int
    layers: int
    slots: tuple[int, ...]
    units: tuple[tuple[Shape, ...], ...]
    expert_units: tuple[tuple[Shape, ...], ...] = ()
    parts: int = 0
    first: bool = True
    last: bool = True
    num_experts: int = 0
    balance: bool = False
    tied: int = 0
    deferred: bool = True


def step_volumes(step: StepShape) -> Volumes:
    """Compute all traffic that does not depend on a plan, a router or a schedule.

    Not included: attention (`Plan.bytes`), routed rows (`expert_rows`) and hidden states between stages
    (`hidden_elements`). Assumes no recomputation, and the 1F1B schedule in a pipeline.
    """
    total: Volumes = {}
    for part in (_tensor, _shards, _experts, _scalars):
        for axis, kind, elements in part(step):
            if elements and ranks_of(step.topology, axis) > 1:
                total[axis, kind] = total.get((axis, kind), Fraction(0)) + elements
    return total


def layer_pass(slots: int, hidden_size: int, tp: int) -> Fraction:
    """TP elements of a dense layer in forward: `4 T E (tp - 1) / tp`. Backward sends as many.

    With SP: two all-gathers and two reduce-scatters of sequence shards. Without SP: two all-reduces.
    """
    return Fraction(4 * slots * hidden_size * (tp - 1), tp)


def ulysses(seq_len: int, hidden_size: int, kv_width: int, degree: int) -> Fraction:
    """Ulysses elements of one forward: `2 S (d + d_kv) (P - 1) / P^2` per rank.

    S is `seq_len`, d `hidden_size`, d_kv `kv_width` and P `degree`, which must divide the KV heads and the sequence.
    """
    return Fraction(2 * seq_len * (hidden_size + kv_width) * (degree - 1), degree**2)


def shard_elements(shapes: Iterable[Shape], ranks: int) -> int:
    """Elements of a rank's shard of an FSDP2 unit: each parameter is cut along dim 0 and padded to the longest shard."""
    return sum(-(-shape[0] // ranks) * prod(shape[1:]) for shape in shapes)


def expert_rows(counts: Sequence[Sequence[int]], rank: int) -> int:
    """Rows that `rank` of ep sends in one forward of a layer, to the experts and back.

    Rank r has `counts[r][x]` rows for expert x.
    """
    ranks, each = len(counts), len(counts[0]) // len(counts)
    own = range(rank * each, (rank + 1) * each)
    away = sum(count for expert, count in enumerate(counts[rank]) if expert not in own)
    home = sum(counts[other][expert] for other in range(ranks) if other != rank for expert in own)
    return away + home


def hidden_elements(step: StepShape, slots: int) -> int:
    """Elements per micro-batch that a stage sends to the next in forward, and to the previous in backward.

    `T E`, or `T E / tp` with SP.
    """
    return slots * step.hidden_size // (step.topology.tp if step.sp else 1)


Part = Iterator[tuple[str, str, Fraction]]


def _tensor(step: StepShape) -> Part:
    tp, tokens = step.topology.tp, sum(step.slots)
    # Attention and a dense MLP have two passes each, forward and backward; the embedding and the head have one each.
    passes = 2 * step.layers * (1 if step.num_experts else 2) + step.first + step.last
    hidden = Fraction(tokens * step.hidden_size * (tp - 1), tp)
    yield "tp", "all-gather", Fraction(2 * tokens * (tp - 1) * step.last)
    yield "tp", "all-reduce", Fraction(_sums(step) * 2 * step.parts * (tp - 1), tp)
    if step.sp:
        yield "tp", "all-gather", passes * hidden
        yield "tp", "reduce-scatter", passes * hidden
    else:
        yield "tp", "all-reduce", passes * 2 * hidden


def _shards(step: StepShape) -> Part:
    t, micros = step.topology, len(step.slots)
    shards = t.degree("shard")
    *blocks, root = (shard_elements(unit, shards) for unit in step.units)
    experts = sum(shard_elements(unit, t.edp) for unit in step.expert_units)
    # A block frees its gathered weights after forward and after backward, the root after backward. In a pipeline, units
    # free their weights after forward and after the last backward only. With 1F1B, all micro-batches but one then gather
    # the weights once.
    times, of_root = (2 * micros, micros) if t.pp == 1 else (micros + 1, 1)
    yield "shard", "all-gather", Fraction((shards - 1) * (times * sum(blocks) + of_root * root))
    owned = _sums(step) * (sum(blocks) + root)
    yield "shard", "reduce-scatter", Fraction((shards - 1) * owned)
    yield "replica", "all-reduce", Fraction(2 * owned * (t.dp_replicate - 1), t.dp_replicate)
    edp = "shard" if t.groups("edp") == t.groups("shard") else "edp"
    yield edp, "all-gather", Fraction((t.edp - 1) * times * experts)
    yield edp, "reduce-scatter", Fraction((t.edp - 1) * _sums(step) * experts)


def _sums(step: StepShape) -> int:
    """Number of gradient reductions per step."""
    return 1 if step.deferred or step.topology.pp > 1 else len(step.slots)


def _experts(step: StepShape) -> Part:
    """Counts of routed rows per expert. With a load-balancing loss, also the sums of the counts over all ranks with tokens."""
    t, calls = step.topology, step.layers * len(step.slots)
    yield "ep", "all-to-all", Fraction(calls * step.num_experts * (t.ep - 1), t.ep)
    if step.balance:
        ranks, axis = t.tp * t.cp, product_axis(t, "tp", "cp")
        yield axis, "all-reduce", Fraction(calls * 2 * step.num_experts * (ranks - 1), ranks)


def _scalars(step: StepShape) -> Part:
    """Small messages: two counts over dp; loss, norm and load-balancing loss over the world; input checks over cp.

    CP ranks compare before each micro-batch and in each attention call (on CUDA, in the first call of a kind).
    """
    t = step.topology
    yield "dp", "all-reduce", Fraction(2 * 2 * (t.dp - 1), t.dp)
    everyone = product_axis(t, "tp", "dp", "cp", "pp")
    yield everyone, "all-reduce", Fraction(2 * (2 + step.balance) * (t.world - 1), t.world)
    yield "cp", "all-gather", Fraction((t.cp - 1) * AGREEMENT_BYTES * len(step.slots) * (1 + step.layers))
    if step.first != step.last:
        yield "pp", "all-reduce", Fraction(step.tied)  # between the first and the last stage


def product_axis(topology: Topology, *axes: str) -> str:
    """Name a product by those of its axes that have several ranks; "world" if several axes cover all ranks."""
    several = [axis for axis in axes if topology.degree(axis) > 1]
    name = "-".join(several)
    return "world" if len(several) > 1 and topology.degree(name) == topology.world else name


def ranks_of(topology: Topology, axis: str) -> int:
    """Number of ranks of an axis, a product or the world; 1 for an empty product."""
    return topology.world if axis == "world" else topology.degree(axis) if axis else 1
