"""A topology as text of at most 80 columns: axes, groups, and nodes with the index of each rank along every axis.

Each index is a number and a colour: index n of an axis of degree N has the colour of rank n of N.
"""

from collections.abc import Iterator, Sequence

from rich import box
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.style import Style
from rich.table import Table
from rich.text import Text

from longspan.report.palette import rank_colors
from longspan.report.topology_report import Reach, TopologyReport
from longspan.topology.axes import divisors
from longspan.topology.nodes import short_ranks

_WIDTH = 80
_LABEL = 5
_FRAME = 4
_DRAWN = 8
"""Maximum number of nodes to draw in full. Beyond it, only the first few nodes and the last are drawn."""
_FEW = 3


def topology_table(report: TopologyReport) -> Group:
    """Make a rich renderable: headline, table of axes, their groups, nodes, and warnings."""
    parts: list[RenderableType] = [Text(_headline(report), style="bold"), Text(_summary(report)), Text()]
    parts += [_axes(report), Text(), Text("groups", style="bold")]
    parts += [_groups_line(report, axes) for axes in report.axes]
    parts += [Text(), *_nodes(report)]
    if report.warnings:
        parts.append(Text())
    parts += [Text("warning: ", style="bold").append(warning, Style(bold=False)) for warning in report.warnings]
    return Group(*parts)


def _headline(report: TopologyReport) -> str:
    topology = report.topology
    degrees = " x ".join(f"{axis} {topology.degree(axis)}" for axis in ("dp", "tp", "pp", "cp"))
    folded = f", ep {topology.ep} x edp {topology.edp} a stage"
    return f"{_count(topology.world, 'rank')}: {degrees}{folded * (topology.ep > 1)}"


def _summary(report: TopologyReport) -> str:
    topology, nodes = report.topology, report.nodes
    size = min(nodes.ranks_per_node, topology.world)
    lines = [
        f"order {topology.order}, fastest to slowest",
        f"{_count(len(nodes.ranks), 'node')} of {_count(size, 'rank')}"
        + (f" in domains of {nodes.domain}" if nodes.domain else "")
        + (" (assumed: ranks_per_node is not given)" if report.assumed else ""),
    ]
    replicas = report.groups["tp-pp"]
    ranks = f"rank{'s' * (len(replicas[0]) > 1)} {short_ranks(replicas[0])}"
    lines.append(f"{_count(len(replicas), 'replica')} of the model (tp-pp), the first on {ranks}")
    lines.append(f"a global batch is micro_batch_size x dp {topology.dp} x gradient_accumulation_steps rows")
    return "\n".join(lines)


def _axes(report: TopologyReport) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))
    table.add_column("axis")
    domains = ["inside a domain"] if report.nodes.domain else []
    for name in ("degree", "groups", *domains, "inside a node", "nodes of a group"):
        table.add_column(name, justify="right", no_wrap=True)
    for axes in report.axes:
        reach = report.reach[axes]
        inside = [] if reach.inside_domain is None else [_share(reach.inside_domain, reach)]
        nodes = "1" if reach.nodes == 1 else f"up to {reach.nodes}" if reach.inside_node else str(reach.nodes)
        table.add_row(axes, str(reach.degree), str(reach.groups), *inside, _share(reach.inside_node, reach), nodes)
    return table


def _share(inside: int, reach: Reach) -> str:
    return "all" if inside == reach.groups else str(inside) if inside else "none"


def _groups_line(report: TopologyReport, axes: str) -> Text:
    """List as many groups as fit into a line, and the number of groups left out."""
    groups = [f"[{short_ranks(group)}]" for group in report.groups[axes]]
    label, room = f"{axes:<{_label_width(report)}}", _WIDTH - _label_width(report)
    shown = len(groups)
    while shown > 1 and len(_first(groups, shown)) > room:
        shown -= 1
    return Text(label + _first(groups, shown), no_wrap=True, overflow="ellipsis")


def _first(groups: list[str], shown: int) -> str:
    return " ".join(groups[:shown]) + (f" ... {len(groups) - shown} more" if shown < len(groups) else "")


def _label_width(report: TopologyReport) -> int:
    return 2 + max(map(len, report.axes))


def _nodes(report: TopologyReport) -> Iterator[RenderableType]:
    """Draw a frame for each node, or for the first few and the last if there are many."""
    nodes = report.nodes.ranks
    first = len(nodes) if len(nodes) <= _DRAWN else _FEW
    yield Columns([_node(report, number) for number in range(first)], padding=(0, 1))
    if first < len(nodes):
        left, last = nodes[first:-1], len(nodes) - 1
        yield Text(f"  nodes {first} to {last - 1}, ranks {left[0][0]} to {left[-1][-1]}, are alike")
        yield _node(report, last)


def _node(report: TopologyReport, number: int) -> Panel:
    """Draw a node: ranks across, axes down, fastest first. Ranks that do not fit into a line are folded.

    A bar, or a rule between folds, marks the edge of a domain.
    """
    ranks = report.nodes.ranks[number]
    domain = report.nodes.domain or len(ranks)
    body, per_line = Text(), _per_line(report, len(ranks), domain)
    for first in range(0, len(ranks), per_line):
        lines = Text("\n").join(_lines(report, ranks[first : first + per_line], domain))
        rule = "-" * max(map(len, lines.plain.split("\n"))) if ranks[first] % domain == 0 else ""
        body.append(f"\n{rule}\n" if first else "").append(lines)
    return Panel(body, title=f"node {number}", title_align="left", box=box.SQUARE, expand=False)


def _per_line(report: TopologyReport, ranks: int, domain: int) -> int:
    """Choose the ranks per line: as many as fit, or down to half as many if that divides the node or a domain evenly."""
    most = (_WIDTH - _FRAME - _LABEL) // (_cell_width(report) + (2 / domain if domain < ranks else 0))
    if ranks <= most:
        return ranks
    even = [n for n in divisors(domain if domain > most else ranks) if most / 2 <= n <= most]
    return max(even, default=int(most))


def _lines(report: TopologyReport, ranks: Sequence[int], domain: int) -> Iterator[Text]:
    topology = report.topology
    places = [topology.coordinates(rank) for rank in ranks]
    shown = [axis for axis in topology.order.split("-") if axis != "ep" and topology.degree(axis) > 1]
    if topology.ep > 1:
        shown += [axis for axis in ("ep", "edp") if topology.degree(axis) > 1]
    yield _line("rank", ranks, ranks, domain, report, None)
    for axis in shown:
        yield _line(axis, ranks, [place[axis] for place in places], domain, report, topology.degree(axis))


def _line(
    label: str, ranks: Sequence[int], numbers: Sequence[int], domain: int, report: TopologyReport, degree: int | None
) -> Text:
    line, width = Text(f"{label:<{_LABEL}}"), _cell_width(report)
    styles = [Style(bold=True)] if degree is None else [_style(color) for color in rank_colors(degree)]
    for rank, number in zip(ranks, numbers, strict=True):
        if rank != ranks[0] and rank % domain == 0:
            line.append(" |")
        line.append(f"{number:>{width}}", styles[0 if degree is None else number])
    return line


def _style(color: tuple[int, int, int]) -> Style:
    """Style of a number on `color`: black or white, whichever is readable."""
    red, green, blue = color
    ink = "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 128 else "white"
    return Style(color=ink, bgcolor=f"rgb({red},{green},{blue})")


def _cell_width(report: TopologyReport) -> int:
    return 1 + max(2, len(str(report.topology.world - 1)))


def _count(number: int, name: str) -> str:
    return f"{number:,} {name}{'s' * (number != 1)}"
