"""The placement of a topology on nodes: which groups cross nodes or domains, with warnings for those that should not.

16 ranks, tp2 cp2 dp2 pp2, nodes of 8      node 0: ranks 0..7, node 1: ranks 8..15
each tp, cp and dp group lies within one node; each pp group has a rank on both nodes
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd

import numpy as np

from longspan.errors import SpecError
from longspan.plan.arguments import whole
from longspan.topology.axes import ORDER, Topology, any_of, divisors

BUSIEST_FIRST = ("tp", "ep", "cp", "dp", "pp")
"""Axes in descending order of traffic per rank, and of the part of the traffic that does not overlap with compute.

Elements per layer in forward, for T tokens on a TP group and hidden size E:

tp  4 T E: all-gather and reduce-scatter around attention and MLP; no overlap
ep  2 T E / tp x experts per token, to the experts and back; the MLP waits
cp  2 T E / tp x KV heads / query heads to every other rank; overlaps with attention
dp  FSDP: parameters and gradients, independent of T; overlaps with the neighbouring layers
pp  T E / tp once per stage, not per layer
"""

_USUAL = (8, 4)
"""Node sizes to assume, in order of preference."""


@dataclass(frozen=True)
class Nodes:
    """A topology on nodes of `ranks_per_node` consecutive ranks. `domain` is the number of ranks per NUMA domain or switch.

    A world smaller than `ranks_per_node` is one node. Raises `SpecError` if `ranks_per_node` does not divide a larger
    world, or `domain` does not divide `ranks_per_node`.
    """

    topology: Topology
    ranks_per_node: int
    domain: int | None = None

    def __post_init__(self) -> None:
        world, size = self.topology.world, whole("ranks_per_node", self.ranks_per_node)
        if size < 1 or (size < world and world % size):
            raise SpecError(
                f"nodes of {size} ranks do not make a world of {world}",
                hint=f"set ranks_per_node to {any_of(divisors(world))}"
                + (f", or start a multiple of {size} ranks" if size > 1 else ""),
            )
        if self.domain is not None and (whole("domain", self.domain) < 1 or size % self.domain):
            raise SpecError(
                f"domains of {self.domain} ranks do not make a node of {size}",
                hint=f"set domain to {any_of(divisors(size))}",
            )

    @classmethod
    def usual(cls, topology: Topology, domain: int | None = None) -> "Nodes":
        """Assume nodes of 8 ranks, else of 4, if the world is a multiple; else one node."""
        world = topology.world
        sizes = (size for size in _USUAL if world % size == 0)
        return cls(topology, world if world <= _USUAL[0] else next(sizes, world), domain)

    @property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node."""
        world, size = self.topology.world, self.ranks_per_node
        return tuple(tuple(range(first, min(first + size, world))) for first in range(0, world, size))

    def spread(self, axes: str, size: int | None = None) -> tuple[int, ...]:
        """Count the nodes (or blocks of `size` ranks, such as domains) in which each group of `axes` has ranks."""
        table = np.sort(np.array(self.topology.groups(axes)) // (size or self.ranks_per_node), axis=1)
        return tuple((1 + (np.diff(table, axis=1) > 0).sum(axis=1)).tolist())

    def together(self, axes: str) -> int:
        """Greatest common divisor of the numbers of ranks per (group of `axes`, node)."""
        table = np.array(self.topology.groups(axes)) // self.ranks_per_node
        return gcd(*(count for row in table for count in np.unique(row, return_counts=True)[1].tolist()))

    def warnings(self) -> tuple[str, ...]:
        """Warnings of axes that cross nodes or domains while an axis with less traffic does not, and of TP across nodes."""
        return tuple(self._warning(*conflict) for conflict in self._conflicts)

    @cached_property
    def _conflicts(self) -> tuple[tuple[str, str | None, bool], ...]:
        """Conflicts `(busy, quiet, node)`: `busy` crosses nodes (if not `node`, domains), `quiet` sends less and does not."""
        return tuple(self._at_level(self.ranks_per_node, True)) + (
            () if self.domain is None else tuple(self._at_level(self.domain, False))
        )

    def _at_level(self, size: int, node: bool) -> Iterator[tuple[str, str | None, bool]]:
        axes = [axis for axis in BUSIEST_FIRST if self.topology.degree(axis) > 1]
        leaves = [axis for axis in axes if max(self.spread(axis, size)) > 1]
        for place, axis in enumerate(axes):
            # An axis that crosses nodes already has a conflict at that level.
            if axis not in leaves or (not node and max(self.spread(axis)) > 1):
                continue
            inside = [other for other in axes[place + 1 :] if other not in leaves]
            if inside or (node and axis == "tp"):
                yield axis, inside[-1] if inside else None, node

    def _warning(self, busy: str, quiet: str | None, node: bool) -> str:
        size = self.ranks_per_node if node or self.domain is None else self.domain
        group = next(
            group
            for group, blocks in zip(self.topology.groups(busy), self.spread(busy, size), strict=True)
            if blocks > 1
        )
        what = "nodes" if node else "domains"
        beside = "every layer waits for TP" if quiet is None else f"{quiet}, which sends less, does not"
        return f"{busy} crosses {what} of {size} ranks, as ranks {short_ranks(group)} do; {beside}: {self._fix(busy, size)}"

    def _fix(self, busy: str, size: int) -> str:
        """Suggest the default order if that avoids the crossing or other conflicts, else degrees that avoid the crossing."""
        usual = replace(self, topology=replace(self.topology, order=ORDER))
        better = len(usual._conflicts) < len(self._conflicts)
        degrees = ((degree, self._changed(**{busy: degree})) for degree in divisors(size))
        fits = [degree for degree, other in degrees if other and max(other.spread(busy, size)) == 1]
        if better and (len(fits) < 2 or max(usual.spread(busy, size)) == 1):
            return f'set order to "{ORDER}"'
        return f"set {busy} to {any_of(fits)}" if fits else "set other degrees, or use larger nodes"

    def _changed(self, **degrees: int) -> "Nodes | None":
        """Return the same world and nodes with other degrees and the resulting dp; None if there is no such topology."""
        old = self.topology
        kept = {name: getattr(old, name) for name in ("tp", "pp", "cp", "ep", "dp_replicate", "order")}
        try:
            return replace(self, topology=Topology.of(old.world, **{**kept, **degrees}))
        except SpecError:
            return None


def short_ranks(ranks: Sequence[int]) -> str:
    """Abbreviate ascending ranks: `0,1,4,5`; `0-7` for three or more neighbours; `0,8,..,56` for more than four ranges."""
    runs = np.split(np.asarray(ranks), np.flatnonzero(np.diff(ranks) > 1) + 1)
    words = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs]
    return ",".join(words if len(words) <= 4 else [*words[:2], "..", words[-1]])
