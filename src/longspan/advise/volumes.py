"""What a step sends over each axis by formula, in elements per rank: what `benchmarks.census` counts. No torch.

docs/reference/traffic.md states and explains the same formulas.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod

from longspan.topology import Topology

Shape = tuple[int, ...]
Volumes = dict[tuple[str, str], Fraction]
"""(axis, kind of call) -> elements that a rank sends."""

AGREEMENT_BYTES = 546
"""That a rank gives when ranks compare what they were given: two digests and room for the text of an error."""


@dataclass(frozen=True)
class StepShape:
    """A step as one rank sees it.

    slots: T of each micro-batch, the slots of its CP shard. layers: those on this rank, dense, or with `num_experts` experts,
    none of them shared; balance: with a balance loss over the batch. first, last: whether embedding and head are here.

    units: for each FSDP2 unit over `shard` the shapes of its parameters as tp leaves them, blocks first, the root last;
    expert_units the same over `edp`, as ep leaves them. parts: elements of the weights whose gradient on a rank of tp is a part:
    norms and router under SP, QK-norms always. tied: elements of a tied embedding on this rank.
    deferred: gradients are summed once a step, not after each micro-batch; in a pipeline they always are.
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
    """Everything but what depends on a plan, a router or a schedule: attention (`Plan.bytes`), rows of experts (`expert_rows`)
    and hidden states between stages (`hidden_elements`). Of a run without recomputation, and of a pipeline in the order 1F1B."""
    total: Volumes = {}
    for part in (_tensor, _shards, _experts, _scalars):
        for axis, kind, elements in part(step):
            if elements and ranks_of(step.topology, axis) > 1:
                total[axis, kind] = total.get((axis, kind), Fraction(0)) + elements
    return total


def layer_pass(slots: int, hidden_size: int, tp: int) -> Fraction:
    """`4 T E (tp - 1) / tp`: a dense layer over tp, forward; backward the same. Two all-gathers and two reduce-scatters of
    shards of the sequence, or two all-reduces."""
    return Fraction(4 * slots * hidden_size * (tp - 1), tp)


def ulysses(seq_len: int, hidden_size: int, kv_width: int, degree: int) -> Fraction:
    """`2 S (d + d_kv) (P - 1) / P^2` of one forward, where P divides the KV heads and the sequence."""
    return Fraction(2 * seq_len * (hidden_size + kv_width) * (degree - 1), degree**2)


def shard_elements(shapes: Iterable[Shape], ranks: int) -> int:
    """A rank's part of an FSDP2 unit: each parameter is cut along its first dim, in parts as long as the longest."""
    return sum(-(-shape[0] // ranks) * prod(shape[1:]) for shape in shapes)


def expert_rows(counts: Sequence[Sequence[int]], rank: int) -> int:
    """Rows that `rank` of ep sends in one forward of a layer, there and back; `counts[r][x]` are those of rank r for expert x."""
    ranks, each = len(counts), len(counts[0]) // len(counts)
    own = range(rank * each, (rank + 1) * each)
    away = sum(count for expert, count in enumerate(counts[rank]) if expert not in own)
    home = sum(counts[other][expert] for other in range(ranks) if other != rank for expert in own)
    return away + home


def hidden_elements(step: StepShape, slots: int) -> int:
    """`T E`, or under SP `T E / tp`: what a stage sends to the next in forward, and back in backward, of a micro-batch."""
    return slots * step.hidden_size // (step.topology.tp if step.sp else 1)


Part = Iterator[tuple[str, str, Fraction]]


def _tensor(step: StepShape) -> Part:
    tp, tokens = step.topology.tp, sum(step.slots)
    # Of attention and of a dense MLP, forward and backward; of the embedding and the head, one each.
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
    # A block gives its weights back after forward and after backward, the root after backward; in a pipeline no unit does after
    # backward but the last: of 1F1B a micro-batch then finds them either in forward or in backward, but for one.
    times, of_root = (2 * micros, micros) if t.pp == 1 else (micros + 1, 1)
    yield "shard", "all-gather", Fraction((shards - 1) * (times * sum(blocks) + of_root * root))
    owned = _sums(step) * (sum(blocks) + root)
    yield "shard", "reduce-scatter", Fraction((shards - 1) * owned)
    yield "replica", "all-reduce", Fraction(2 * owned * (t.dp_replicate - 1), t.dp_replicate)
    edp = "shard" if t.groups("edp") == t.groups("shard") else "edp"
    yield edp, "all-gather", Fraction((t.edp - 1) * times * experts)
    yield edp, "reduce-scatter", Fraction((t.edp - 1) * _sums(step) * experts)


def _sums(step: StepShape) -> int:
    """How often a step sums gradients over ranks."""
    return 1 if step.deferred or step.topology.pp > 1 else len(step.slots)


def _experts(step: StepShape) -> Part:
    """How many rows come, to each rank; with a balance loss, how many rows each expert got from all ranks with tokens."""
    t, calls = step.topology, step.layers * len(step.slots)
    yield "ep", "all-to-all", Fraction(calls * step.num_experts * (t.ep - 1), t.ep)
    if step.balance:
        ranks, axis = t.tp * t.cp, product_axis(t, "tp", "cp")
        yield axis, "all-reduce", Fraction(calls * 2 * step.num_experts * (ranks - 1), ranks)


def _scalars(step: StepShape) -> Part:
    """Two counts over dp; loss, norm and balance loss over the world; over cp what ranks compare, before a micro-batch and in
    each attention call (on CUDA: in the first of a kind)."""
    t = step.topology
    yield "dp", "all-reduce", Fraction(2 * 2 * (t.dp - 1), t.dp)
    everyone = product_axis(t, "tp", "dp", "cp", "pp")
    yield everyone, "all-reduce", Fraction(2 * (2 + step.balance) * (t.world - 1), t.world)
    yield "cp", "all-gather", Fraction((t.cp - 1) * AGREEMENT_BYTES * len(step.slots) * (1 + step.layers))
    if step.first != step.last:
        yield "pp", "all-reduce", Fraction(step.tied)  # of two ranks: the first and the last stage's


def product_axis(topology: Topology, *axes: str) -> str:
    """What a product is called: by the axes of it that have several ranks; "world" for several that make all ranks."""
    several = [axis for axis in axes if topology.degree(axis) > 1]
    name = "-".join(several)
    return "world" if len(several) > 1 and topology.degree(name) == topology.world else name


def ranks_of(topology: Topology, axis: str) -> int:
    """Ranks of an axis, of a product or of the world; 1 for a product of nothing."""
    return topology.world if axis == "world" else topology.degree(axis) if axis else 1
