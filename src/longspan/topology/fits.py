"""Checks of a model, a route and a pipeline schedule against a topology, before any process starts."""

from math import gcd

from longspan.errors import SpecError
from longspan.names import AUTO
from longspan.plan.plan import check_heads
from longspan.plan.routes import degrees_of
from longspan.topology.axes import Topology, any_of, divisors
from longspan.topology.model_shape import ModelShape
from longspan.topology.nodes import Nodes, short_ranks

SCHEDULES = ("1f1b", "interleaved", "zero-bubble")
"""Pipeline schedules. All except the first allow several stages per rank."""


def check_model(
    topology: Topology,
    shape: ModelShape,
    *,
    route: str = "ring",
    inner: int | None = None,
    sp: bool = True,
    gradient_accumulation_steps: int = 1,
    schedule: str = "1f1b",
    stages_per_rank: int = 1,
    ranks_per_node: int | None = None,
) -> None:
    """Raise `SpecError` unless every axis divides what it shards.

    route, inner: route and inner degree of attention over cp. sp: sequence parallelism on the TP ranks.
    gradient_accumulation_steps: micro-batches per optimizer step.
    schedule, stages_per_rank: the pipeline runs the micro-batches by `schedule` over pp x `stages_per_rank` stages.
    ranks_per_node: if given, TP groups that cross nodes are refused.
    """
    _check_tp(topology, shape, sp)
    _check_route(topology, shape, route, inner)
    _check_experts(topology, shape, sp)
    _check_pipeline(topology, shape, gradient_accumulation_steps, schedule, stages_per_rank)
    if ranks_per_node is not None:
        _check_nodes(topology, ranks_per_node)


def _check_tp(topology: Topology, shape: ModelShape, sp: bool) -> None:
    tp = topology.tp
    if tp == 1 and not sp:
        raise SpecError("sp=false does not apply to tp=1", hint="leave sp out, or set tp to 2 or more")
    check_heads(shape.num_heads, shape.num_kv_heads)
    cut = {
        "query heads": shape.num_heads,
        "KV heads": shape.num_kv_heads,
        "intermediate_size": shape.experts.shared_intermediate_size if shape.experts else shape.intermediate_size,
        "vocab_size": shape.vocab_size,
    }
    fits = any_of(divisors(gcd(*cut.values())))
    for name, number in cut.items():
        if number % tp:
            heads = name.endswith("heads")
            raise SpecError(
                f"tp={tp} does not divide {number} {name}" if heads else f"tp={tp} does not divide {name}={number}",
                hint=f"tp divides heads, intermediate_size and vocab_size: set it to {fits}"
                + ("" if heads else f"; or make {name} a multiple, such as {-(-number // tp) * tp}"),
            )


def _check_route(topology: Topology, shape: ModelShape, route: str, inner: int | None) -> None:
    """Check the route with the heads that TP leaves on a rank."""
    if route != AUTO:
        heads = (shape.num_heads // topology.tp, shape.num_kv_heads // topology.tp)
        degrees_of(route, topology.cp, heads, inner, topology.tp)


def _check_experts(topology: Topology, shape: ModelShape, sp: bool) -> None:
    ep, num = topology.ep, shape.experts.num_experts if shape.experts else 0
    if ep > 1 and not num:
        raise SpecError(f"ep={ep} for a model without experts", hint="set ep to 1, or give the model num_experts")
    if num and num % ep:
        ranks = topology.tp * topology.cp * topology.dp
        raise SpecError(
            f"ep={ep} does not divide {num} experts",
            hint=f"ep divides the experts and the {ranks} ranks of a stage: set it to {any_of(divisors(gcd(num, ranks)))}",
        )
    if num and topology.tp > 1 and not sp:
        raise SpecError(
            f"tp={topology.tp} with experts and sp=false: all TP ranks would route the same tokens",
            hint="set sp to true, or tp to 1",
        )


def _check_pipeline(
    topology: Topology, shape: ModelShape, gradient_accumulation_steps: int, schedule: str, stages_per_rank: int
) -> None:
    pp, stages = topology.pp, topology.pp * stages_per_rank
    _check_schedule(pp, schedule, gradient_accumulation_steps, stages_per_rank)
    if pp > 1 and stages > shape.num_layers:
        each = f" x stages_per_rank={stages_per_rank}" if stages_per_rank > 1 else ""
        raise SpecError(
            f"pp={pp}{each} makes {stages} stages, and the model has {shape.num_layers} layers",
            hint=f"a stage has at least one layer: set pp to at most {max(1, shape.num_layers // stages_per_rank)}"
            + ("; or lower stages_per_rank" if each else ""),
        )
    if gradient_accumulation_steps < pp:
        raise SpecError(
            f"gradient_accumulation_steps={gradient_accumulation_steps} is less than pp={pp}: with fewer micro-batches "
            "than stages, some stages would always be idle",
            hint=f"set gradient_accumulation_steps to {pp} or more; or lower pp",
        )
    if pp > 1 and schedule != "1f1b" and gradient_accumulation_steps % pp:
        below = gradient_accumulation_steps // pp * pp
        raise SpecError(
            f"gradient_accumulation_steps={gradient_accumulation_steps} is not a multiple of pp={pp}, "
            f"which schedule {schedule!r} needs",
            hint=f"set gradient_accumulation_steps to {below} or {below + pp}; or schedule to '1f1b'",
        )


def _check_schedule(pp: int, schedule: str, gradient_accumulation_steps: int, stages_per_rank: int) -> None:
    if schedule not in SCHEDULES:
        raise SpecError(f"schedule {schedule!r} is not known", hint=f"choose one of {', '.join(SCHEDULES)}")
    if gradient_accumulation_steps < 1 or stages_per_rank < 1:
        raise SpecError(
            f"gradient_accumulation_steps={gradient_accumulation_steps}, stages_per_rank={stages_per_rank}: "
            "both must be at least 1",
            hint="set both to 1 or more",
        )
    if schedule != SCHEDULES[0] and pp == 1:
        raise SpecError(
            f"schedule {schedule!r} does not apply to pp=1, which has one stage",
            hint=f"leave schedule at {SCHEDULES[0]!r}, or set pp to 2 or more",
        )
    if stages_per_rank > 1 and pp == 1:
        raise SpecError(
            f"stages_per_rank={stages_per_rank} does not apply to pp=1, which has one stage",
            hint="set stages_per_rank to 1; or pp to 2 or more",
        )
    if stages_per_rank > 1 and schedule == "1f1b":
        raise SpecError(
            f"stages_per_rank={stages_per_rank} does not apply to schedule '1f1b', which has one stage per rank",
            hint=f"set stages_per_rank to 1; or schedule to {' or '.join(map(repr, SCHEDULES[1:]))}",
        )
    if pp > 1 and schedule == "interleaved" and stages_per_rank < 2:
        raise SpecError(
            f"schedule 'interleaved' with stages_per_rank={stages_per_rank}: there is nothing to interleave",
            hint="set stages_per_rank to 2 or more; or schedule to '1f1b'",
        )


def _check_nodes(topology: Topology, ranks_per_node: int) -> None:
    """Raise `SpecError` if a TP group crosses nodes, even if larger than a node: every layer would wait for the slow link."""
    nodes, tp = Nodes(topology, ranks_per_node), topology.tp
    across = [group for group, count in zip(topology.groups("tp"), nodes.spread("tp"), strict=True) if count > 1]
    if not across:
        return
    where = f"a TP group crosses nodes of {ranks_per_node} ranks: ranks {short_ranks(across[0])}"
    fits = any_of(divisors(ranks_per_node))
    if ranks_per_node % tp == 0:
        raise SpecError(
            f'{where}, by order "{topology.order}"', hint="put tp first in the order: tp has the most traffic"
        )
    raise SpecError(
        f"{where}, since tp={tp} {'is more than' if tp > ranks_per_node else 'does not divide'} {ranks_per_node}",
        hint=f"set tp to {fits}; or, if a fast link joins several nodes, set ranks_per_node to the number of ranks joined",
    )
