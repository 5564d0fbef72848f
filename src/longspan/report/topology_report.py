"""A topology in numbers: one frozen record that the table, the drawing and the JSON read."""

import json
import re
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from longspan.topology.axes import Groups, Topology
from longspan.topology.nodes import Nodes

_DENSE = ("tp", "dp", "cp", "pp")
_EXPERT = ("ep", "edp", "pp")
_TOLD = ("dp-cp", "tp-cp", "tp-dp-cp", "tp-dp-pp", "tp-pp", "ep-pp")
"""Products that the table shows; the record has all."""
_NUMBERS = re.compile(r"\[\s+(\d[\d,\s]*?)\s+\]")


@dataclass(frozen=True)
class Reach:
    """How far the groups of an axis or a product reach: how many there are, and how many stay inside a node and a domain.

    `nodes` is the most nodes that one of them has ranks in. `inside_domain` is None where there are no domains.
    """

    degree: int
    groups: int
    inside_node: int
    inside_domain: int | None
    nodes: int


@dataclass(frozen=True)
class TopologyReport:
    """The groups of every axis and product, and where they lie. `assumed`: nobody said how many ranks a node has."""

    topology: Topology
    nodes: Nodes
    assumed: bool
    warnings: tuple[str, ...]
    groups: dict[str, Groups]
    reach: dict[str, Reach]

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes with more than one rank, then the products of such that the table shows."""
        single = [axes for axes in self.groups if "-" not in axes and self.topology.degree(axes) > 1]
        wide = [axes for axes in _TOLD if axes in self.groups and all(axis in single for axis in axes.split("-"))]
        return tuple(single + wide) or ("dp",)

    def record(self) -> dict[str, Any]:
        """What the JSON says."""
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
        """The record as JSON with `more` keys after its own, lists of numbers on a line each."""
        return _NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", json.dumps(self.record() | more, indent=2))


def describe_topology(
    topology: Topology, ranks_per_node: int | None = None, domain: int | None = None
) -> TopologyReport:
    """The groups of `topology` and where they lie. Without `ranks_per_node` nodes have 8 ranks, or 4, or are one.

    Raises `SpecError` for nodes and domains that do not fit, see `Nodes`.
    """
    assumed = ranks_per_node is None
    nodes = Nodes.usual(topology, domain) if ranks_per_node is None else Nodes(topology, ranks_per_node, domain)
    groups = {axes: topology.groups(axes) for axes in _names(topology)}
    reach = {axes: _reach(nodes, axes) for axes in groups}
    return TopologyReport(topology, nodes, assumed, nodes.warnings(), groups, reach)


def _names(topology: Topology) -> list[str]:
    """Every axis and product of axes; HSDP's two where there are replicas, those of experts where these are sharded."""
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
