"""Start table of a run: axes and their groups, work per step, and expected memory per rank, in 80 columns.

`Start.record` has the same numbers for programs.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from longspan.advise.memory import Budget, StageBudget
from longspan.comm.torchrun import under_torchrun
from longspan.report.words import byte_unit, short_count
from longspan.topology import Nodes, Topology
from longspan.topology.nodes import short_ranks

_WIDTH = 80


@dataclass(frozen=True)
class Start:
    """Numbers of a run before its start."""

    budget: Budget
    nodes: Nodes
    steps_per_epoch: int

    def record(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        topology = self.budget.topology
        groups = {axis: topology.groups(axis) for axis in axes_of(topology)}
        return self.budget.record() | {
            "groups": groups, "nodes": self.nodes.ranks, "warnings": self.nodes.warnings(),
            "steps_per_epoch": self.steps_per_epoch,
        }  # fmt: skip


def is_first() -> bool:
    """Whether this process prints: rank 0 under torchrun, else the process that starts the ranks."""
    return not under_torchrun() or os.environ["RANK"] == "0"


def axes_of(topology: Topology) -> list[str]:
    """Return the axes of degree above 1, fastest-varying first, then "ep" and "edp" under expert parallelism."""
    axes = [axis for axis in topology.order.split("-") if axis != "ep" and topology.degree(axis) > 1]
    return axes + ([axis for axis in ("ep", "edp") if topology.degree(axis) > 1] if topology.ep > 1 else [])


def degrees(topology: Topology) -> str:
    """Format the degrees above 1, such as `tp 2, cp 2, dp 2, pp 2`. Empty for one rank."""
    words = [f"{axis} {topology.degree(axis)}" for axis in axes_of(topology) if axis != "edp"]
    return ", ".join([*words, f"{topology.dp_replicate} replicas"] if topology.dp_replicate > 1 else words)


def start_table(start: Start) -> Group:
    """Return three lines for one rank, else also the groups of each axis and a row per pipeline rank."""
    budget, topology = start.budget, start.budget.topology
    if topology.world == 1:
        return Group(*map(Text, (f"1 rank; {_step(start)}", _rank(budget), _memory(budget))))
    parts: list[RenderableType] = [Text(_headline(start), style="bold"), *_axes(start)]
    parts += [Text("warning: ", style="bold").append(text, style="not bold") for text in start.nodes.warnings()]
    unit = byte_unit(max(stage.total for stage in budget.stages))[1]
    return Group(*parts, Text(_step(start)), Text(_rank(budget)), Text(f"{unit} expected on a rank:"), _stages(budget))


def _headline(start: Start) -> str:
    topology, count = start.budget.topology, len(start.nodes.ranks)
    return f"{topology.world} ranks: {degrees(topology)}; {count} node{'s' * (count > 1)}; order {topology.order}"


def _axes(start: Start) -> Iterator[Text]:
    topology, axes = start.budget.topology, axes_of(start.budget.topology)
    for axis in axes:
        spread = start.nodes.spread(axis)
        inside = "inside a node" if max(spread) == 1 else f"over up to {max(spread)} nodes"
        groups = [f"[{short_ranks(group)}]" for group in topology.groups(axis)]
        label = f"  {axis:<3} {topology.degree(axis):>3}  {inside}: "
        yield Text(label + _fitted(groups, _WIDTH - len(label)), no_wrap=True, overflow="ellipsis")


def _fitted(groups: list[str], room: int) -> str:
    """Format as many groups as fit `room` columns, and the number of the others."""
    for shown in range(len(groups), 0, -1):
        left = len(groups) - shown
        line = " ".join(groups[:shown]) + (f" ... {left} more" if left else "")
        if len(line) <= room:
            return line
    return groups[0]


def _step(start: Start) -> str:
    budget = start.budget
    tokens = budget.global_batch * budget.seq_len
    return (
        f"a step: {_count(budget.global_batch, 'row')}, up to {tokens:,} tokens; "
        f"an epoch: {_count(start.steps_per_epoch, 'step')}"
    )


def _rank(budget: Budget) -> str:
    padded = f" in {budget.slots:,} slots" if budget.slots != budget.tokens else ""
    here, whole = max(stage.num_parameters for stage in budget.stages), budget.num_parameters
    share = f"{short_count(here)} of {short_count(whole)}" if here < whole else short_count(whole)
    micros = _count(budget.micro_batches, "micro-batch", "es")
    return f"a rank: {micros} of up to {budget.tokens:,} tokens{padded}; {share} parameters"


def _memory(budget: Budget) -> str:
    """Format the expected memory of a single rank as one line."""
    (stage,) = budget.stages
    size, unit = byte_unit(stage.total)
    state = stage.parameters + stage.gradients + stage.moments
    amounts = {"weights, gradients, moments": state, "activations": stage.activations, "total": stage.total}
    return (
        f"expected, {unit}: {'; '.join(f'{name} {_amount(_over(amount, size))}' for name, amount in amounts.items())}"
    )


def _stages(budget: Budget) -> Table:
    """Return the table of expected memory, one row per pipeline rank."""
    size, _ = byte_unit(max(stage.total for stage in budget.stages))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=0, collapse_padding=True)
    piped = budget.topology.pp > 1
    for name in [*(("pp", "layers") if piped else ()), *_sizes(budget.stages[0])]:
        table.add_column(name, justify="right", no_wrap=True)
    for stage in budget.stages:
        place = [str(stage.pp_rank), short_ranks(stage.layers)] if piped else []
        table.add_row(*place, *(_amount(_over(amount, size)) for amount in _sizes(stage).values()))
    return table


def _over(amount: int | None, size: int) -> float | None:
    return None if amount is None else amount / size


def _sizes(stage: StageBudget) -> dict[str, int | None]:
    """Return the bytes of a rank by column of the table."""
    return {
        "weights": stage.parameters, "gradients": stage.gradients, "moments": stage.moments,
        "gathered": stage.gathered + stage.unreduced, "activations": stage.activations, "loss": stage.head,
        "total": stage.total,
    }  # fmt: skip


def _amount(number: float | None) -> str:
    """Format with three significant digits. None is unknown."""
    if number is None:
        return "unknown"
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def _count(number: int, name: str, plural: str = "s") -> str:
    return f"{number:,} {name}{plural * (number != 1)}"
