"""A topology in numbers: one frozen record for the table, the drawing and the JSON."""

import json
import re
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from longspan.topology.axes import Groups, Topology
from longspan.topology.nodes import Nodes

_DENSE = ("tp", "dp", "cp", "pp")
_EXPERT = ("ep", "edp", "pp")
_SHOWN = ("dp-cp", "tp-cp", "tp-dp-cp", "tp-dp-pp", "tp-pp", "ep-pp")
"""Products of axes that the table shows. The record has all products."""
_NUMBERS = re.compile(r"\[\s+(\d[\d,\s]*?)\s+\]")


@dataclass(frozen=True)
class Reach:
    """Placement of the groups of an axis or a product: how many groups, and how many lie within one node or one domain.

    `nodes` is the largest number of nodes that a group spans. `inside_domain` is None without domains.
    """

    degree: int
    groups: int
    inside_node: int
    inside_domain: int | None
    nodes: int


@dataclass(frozen=True)
class TopologyReport:
    """The groups of every axis and product, and their placement. `assumed`: `ranks_per_node` was not given."""

    topology: Topology
    nodes: Nodes
    assumed: bool
    warnings: tuple[str, ...]
    groups: dict[str, Groups]
    reach: dict[str, Reach]

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes with more than one rank, followed by the products of such axes that the table shows."""
        single = [axes for axes in self.groups if "-" not in axes and self.topology.degree(axes) > 1]
        wide = [axes for axes in _SHOWN if axes in self.groups and all(axis in single for axis in axes.split("-"))]
        return tuple(single + wide) or ("dp",)

    def record(self) -> dict[str, Any]:
        """Convert to plain values, for JSON."""
        topology, nodes = self.topology, self.nodes
        names = ("dp", "tp", "pp", "cp", "ep", "edp")
        return {
            "world": topology.world,
            "degrees": {name: topology.degree(name) for name in names} | {"dp_replicate": topology.dp_replicate},
            "order": topology.order,
            "nodes": nodes.ranks,
            "ranks_per_node": nodes.ranks_per_node,
            "assumed": self.assumed,
            "domain": nodes.domain,
            "warnings": self.warnings,
            "groups": self.groups,
            "reach": {axes: vars(reach) for axes, reach in self.reach.items()},
        }

    def to_json(self, **more: Any) -> str:
        """Serialise the record as JSON, with the keys `more` at the end, and each list of numbers on one line."""
        return _NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", json.dumps(self.record() | more, indent=2))


def describe_topology(
    topology: Topology, ranks_per_node: int | None = None, domain: int | None = None
) -> TopologyReport:
    """List the groups of `topology` and their placement. Default `ranks_per_node`: `Nodes.usual`.

    Raises `SpecError` for nodes and domains that do not fit, like `Nodes`.
    """
    assumed = ranks_per_node is None
    nodes = Nodes.usual(topology, domain) if ranks_per_node is None else Nodes(topology, ranks_per_node, domain)
    groups = {axes: topology.groups(axes) for axes in _names(topology)}
    reach = {axes: _reach(nodes, axes) for axes in groups}
    return TopologyReport(topology, nodes, assumed, nodes.warnings(), groups, reach)


def _names(topology: Topology) -> list[str]:
    """Name all axes and products: dense axes, replica and shard with HSDP, expert axes with ep above 1."""
    names = _products(_DENSE)
    if topology.dp_replicate > 1:
        names += ["replica", "shard"]
    if topology.ep > 1:
        names += [name for name in _products(_EXPERT) if name != "pp"]
    return names


def _products(axes: tuple[str, ...]) -> list[str]:
    return ["-".join(some) for count in range(1, len(axes) + 1) for some in combinations(axes, count)]


def _reach(nodes: Nodes, axes: str) -> Reach:
    spread = nodes.spread(axes)
    inside = None if nodes.domain is None else nodes.spread(axes, nodes.domain).count(1)
    return Reach(nodes.topology.degree(axes), len(spread), spread.count(1), inside, max(spread))
