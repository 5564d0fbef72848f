"""The groups of ranks of each parallel axis, and of products of axes. No process groups, no torch.

    tp2 cp2 dp2 pp2 in the order tp-cp-ep-dp-pp, fastest to slowest:

                    pp 0                      pp 1                 tp     [0,1] [2,3] ... [14,15]
              dp 0        dp 1          dp 0        dp 1           cp     [0,2] [1,3] [4,6] ... [13,15]
    cp 0      0  1        4  5          8  9       12 13           dp-cp  [0,2,4,6] [1,3,5,7] ... [9,11,13,15]
    cp 1      2  3        6  7         10 11       14 15           tp-pp  [0,1,8,9] [2,3,10,11] ...: a replica of the model

Experts have their own axes over the same ranks, as in Megatron-Core's parallel folding: ep x edp x pp in the same
order, with edp in the place of dp, and without tp and cp. With ep 4 in the example, ranks 0..3 share the experts of a
layer, and so do ranks 4..7.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from longspan.errors import SpecError
from longspan.plan.arguments import check_rank, whole

Array = np.ndarray
Groups = tuple[tuple[int, ...], ...]
ORDER = "tp-cp-ep-dp-pp"
"""Default order, fastest to slowest. Ranks that differ along axes with most traffic are neighbours."""

_DENSE = {"tp", "cp", "dp", "replica", "shard_dp", "shard"}
_EXPERT = {"ep", "edp"}
_PARTS = {"dp": ("replica", "shard_dp"), "shard": ("shard_dp", "cp")}
"""Axes that are products of parts, slowest part first. Every other axis has itself as its only part."""


@dataclass(frozen=True)
class Topology:
    """The degrees of a run's parallel axes, and the order in which ranks are numbered along them, fastest to slowest.

    `dp_replicate` splits dp for HSDP: dp index = replica * (dp / dp_replicate) + index among the dp ranks that shard
    parameters. `ep` is a degree over the ranks of one pipeline stage (tp x cp x dp); `edp` is the number of ranks of a
    stage that hold the same experts.

    Raises `SpecError` for a degree that is not an integer of at least 1, an order that does not name every axis once,
    `dp_replicate` that does not divide dp, `ep` that does not divide the ranks of a stage, and an order in which the
    pipeline groups of the experts would differ from those of the dense layers.
    """

    dp: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    dp_replicate: int = 1
    order: str = ORDER

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "cp", "ep", "dp_replicate"):
            _at_least_one(name, getattr(self, name))
        if not isinstance(self.order, str) or sorted(self.order.split("-")) != sorted(ORDER.split("-")):
            raise SpecError(
                f"order {self.order!r} does not name each of tp, cp, ep, dp, pp once",
                hint=f'write the axes from fastest to slowest, such as "{ORDER}"',
            )
        if self.dp % self.dp_replicate:
            raise SpecError(
                f"dp_replicate={self.dp_replicate} does not divide dp={self.dp}",
                hint=f"set dp_replicate to {any_of(divisors(self.dp))}",
            )
        stage = self.tp * self.cp * self.dp
        if stage % self.ep:
            raise SpecError(
                f"ep={self.ep} does not divide the {stage} ranks of a stage (tp {self.tp} x cp {self.cp} x dp {self.dp})",
                hint=f"set ep to {any_of(divisors(stage))}",
            )
        self._check_fold()

    @classmethod
    def of(
        cls,
        world: int,
        *,
        dp: int | None = None,
        tp: int = 1,
        pp: int = 1,
        cp: int = 1,
        ep: int = 1,
        dp_replicate: int = 1,
        order: str = ORDER,
    ) -> "Topology":
        """Make the topology of `world` ranks. Default `dp`: `world` divided by the other degrees.

        Raises `SpecError` if the product of the degrees is not `world`, and what `Topology` raises.
        """
        degrees = {"tp": tp, "pp": pp, "cp": cp}
        for name, degree in {"world": world, **degrees, **({} if dp is None else {"dp": dp})}.items():
            _at_least_one(name, degree)
        taken = prod(degrees.values())
        if world % taken or (dp is not None and dp * taken != world):
            raise _not_the_world(world, dp, degrees)
        return cls(world // taken, tp, pp, cp, ep, dp_replicate, order)

    @property
    def world(self) -> int:
        """World size: dp x tp x pp x cp."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def edp(self) -> int:
        """Number of ranks of a stage that hold the same experts."""
        return self.tp * self.cp * self.dp // self.ep

    def degree(self, axis: str) -> int:
        """Number of ranks in a group of an axis, or of a product such as "dp-cp"."""
        return prod(self._degrees[part] for part in _parts(axis.split("-")))

    def groups(self, axes: str) -> Groups:
        """List the groups of an axis or of a product of axes, such as "tp", "dp-cp", "ep-pp".

        A group is the ranks that differ along these axes alone. Ranks are ascending, groups sorted by first rank; the
        order of the names does not matter. Dense axes: tp, cp, dp, pp, "replica" (ranks with the same shard of
        parameters) and "shard" (ranks over which parameters are sharded: dp-cp within a replica). Expert axes: ep, edp,
        pp.

        Raises `SpecError` for an unknown name, a name given twice, and a product of dense and expert axes.
        """
        parts = _parts(axes.split("-"))
        names, ranks = self._numbered(parts)
        chosen = [n for n, name in enumerate(names) if name in parts]
        others = [n for n in range(len(names)) if n not in chosen]
        table = np.sort(ranks.transpose(others + chosen).reshape(-1, self.degree(axes)), axis=1)
        return tuple(map(tuple, table[np.argsort(table[:, 0])].tolist()))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the index of `rank` along tp, cp, dp, pp, ep, edp and replica."""
        check_rank(rank, self.world)
        index: dict[str, int] = {}
        for parts in ([], ["ep"]):
            names, ranks = self._numbered(parts)
            (place,) = np.argwhere(ranks == rank)
            index |= dict(zip(names, place.tolist(), strict=True))
        index["dp"] = index["replica"] * (self.dp // self.dp_replicate) + index["shard_dp"]
        return {name: index[name] for name in ("tp", "cp", "dp", "pp", "ep", "edp", "replica")}

    def grid(self, axes: Sequence[str]) -> Array:
        """Arrange all ranks in an int64 array with one dim per axis in the order named, as `DeviceMesh` takes them.

        The axes are dense (pp, dp, cp, tp; dp may be split into replica, shard_dp) or expert axes (pp, edp, ep).
        Raises `SpecError` if the axes leave ranks out, and what `groups` raises.
        """
        parts = _parts(axes)
        names, ranks = self._numbered(parts)
        if prod(self._degrees[part] for part in parts) != self.world:
            missing = [name for name in names if name not in parts and self._degrees[name] > 1]
            raise SpecError(
                f"axes {', '.join(axes)} make {prod(map(self.degree, axes))} of the {self.world} ranks",
                hint=f"also name {' and '.join(missing)}",
            )
        spread = [names.index(part) for part in parts]
        unnamed = [n for n in range(len(names)) if n not in spread]
        return np.array(ranks.transpose(spread + unnamed).reshape([self.degree(axis) for axis in axes]))

    def cp_levels(self, inner: int) -> tuple[Groups, Groups]:
        """Split every CP group into inner groups of `inner` neighbours, and outer groups of ranks at the same inner index.

        cp 4, inner 2 on ranks 0..3: inner [0,1] [2,3], outer [0,2] [1,3].
        """
        if _at_least_one("inner", inner) > self.cp or self.cp % inner:
            raise SpecError(f"inner={inner} does not divide cp={self.cp}", hint=f"use {any_of(divisors(self.cp))}")
        table = np.array(self.groups("cp")).reshape(-1, self.cp // inner, inner)
        inside, across = table.reshape(-1, inner), table.swapaxes(1, 2).reshape(-1, self.cp // inner)
        return _sorted(inside), _sorted(across)

    def global_batch(self, micro_batch_size: int, gradient_accumulation_steps: int = 1) -> int:
        """Training rows per optimizer step. CP, TP and PP ranks with the same dp index read the same rows."""
        return (
            _at_least_one("micro_batch_size", micro_batch_size)
            * self.dp
            * _at_least_one("gradient_accumulation_steps", gradient_accumulation_steps)
        )

    def steps_per_epoch(self, rows: int, micro_batch_size: int, gradient_accumulation_steps: int = 1) -> int:
        """Optimizer steps needed to read each of `rows` once. The last step may reach into the next epoch, as in the loader."""
        return -(-rows // self.global_batch(micro_batch_size, gradient_accumulation_steps))

    @cached_property
    def _degrees(self) -> dict[str, int]:
        shard_dp = self.dp // self.dp_replicate
        dense = {"tp": self.tp, "cp": self.cp, "replica": self.dp_replicate, "shard_dp": shard_dp, "pp": self.pp}
        return dense | {"ep": self.ep, "edp": self.edp}

    def _numbered(self, parts: Iterable[str]) -> tuple[list[str], Array]:
        """Return (names, ranks along these axes): the dense axes, or the expert axes if `parts` has one, slowest first."""
        return self._experts if _EXPERT & set(parts) else self._dense

    @cached_property
    def _dense(self) -> tuple[list[str], Array]:
        axes = [axis for axis in reversed(self.order.split("-")) if axis != "ep"]
        names = [part for axis in axes for part in _PARTS.get(axis, (axis,))]
        return names, np.arange(self.world).reshape([self._degrees[name] for name in names])

    @cached_property
    def _experts(self) -> tuple[list[str], Array]:
        """Return (names of the expert axes, ranks along these axes): the ascending ranks of every stage, reshaped.

        `_check_fold` has refused any order with another numbering.
        """
        names = ["pp", *_of_experts(list(reversed(self.order.split("-"))))]
        dense, ranks = self._dense
        stages = np.moveaxis(ranks, dense.index("pp"), 0)
        return names, stages.reshape([self._degrees[name] for name in names])

    def _check_fold(self) -> None:
        """Raise `SpecError` if dense and expert axes give different pipeline groups.

        The stride between ranks of a pipeline group is the product of the axes faster than pp. The stride must be equal
        for dense and expert axes.
        """
        faster = self.order.split("-")[: self.order.split("-").index("pp")]
        apart = prod(getattr(self, axis) for axis in faster if axis != "ep")
        apart_experts = prod(self._degrees[axis] for axis in _of_experts(faster))
        if self.pp > 1 and self.ep > 1 and apart != apart_experts:
            moved = "-".join([*(axis for axis in self.order.split("-") if axis != "pp"), "pp"])
            raise SpecError(
                f'order "{self.order}" with ep {self.ep} numbers the pipeline groups of attention '
                f"0, {apart}, ... and those of the experts 0, {apart_experts}, ...: a stage would have different "
                "ranks for the two",
                hint=f'put pp last: "{moved}"',
            )


def divisors(number: int) -> list[int]:
    """List the divisors of `number`, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def any_of(numbers: Iterable[int]) -> str:
    """Join numbers for a hint: `1, 2 or 4`."""
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last


def _at_least_one(name: str, value: int) -> int:
    if whole(name, value) < 1:
        raise SpecError(f"{name}={value} is below 1", hint="every degree and every count is at least 1")
    return value


def _of_experts(axes: Sequence[str]) -> list[str]:
    """Replace dense axes by the expert axes in the same places of the order."""
    return [{"ep": "ep", "dp": "edp"}[axis] for axis in axes if axis in ("ep", "dp")]


def _sorted(table: Array) -> Groups:
    return tuple(sorted(map(tuple, table.tolist())))


def _parts(axes: Sequence[str]) -> list[str]:
    """List the parts of `axes` in turn. Raises `SpecError` as `Topology.groups`."""
    named = "-".join(axes)
    if unknown := [axis for axis in axes if axis not in _DENSE | _EXPERT | {"pp"}]:
        raise SpecError(
            f"axis {unknown[0]!r} of {named!r} is not known",
            hint="axes are tp, cp, dp, pp; replica and shard for HSDP; ep and edp for experts; joined as in dp-cp",
        )
    parts = [part for axis in axes for part in _PARTS.get(axis, (axis,))]
    if twice := [part for part in parts if parts.count(part) > 1]:
        raise SpecError(f"{named!r} names {twice[0]} twice", hint="name every axis once")
    if (dense := _DENSE & set(axes)) and (experts := _EXPERT & set(axes)):
        raise SpecError(
            f"{named!r} mixes {', '.join(sorted(dense))} with {', '.join(sorted(experts))}: the axes of attention "
            "(tp, cp, dp) and of experts (ep, edp) number the same ranks in two ways",
            hint="use axes of one kind; pp goes with either",
        )
    return parts


def _not_the_world(world: int, dp: int | None, degrees: dict[str, int]) -> SpecError:
    """Make the error for degrees that do not multiply to `world`. The hint lists valid values of each degree."""
    given = degrees if dp is None else {"dp": dp} | degrees
    product = prod(given.values())
    named = [f"{name} {degree}" for name, degree in given.items() if degree > 1 or name == "dp"]
    words = " x ".join(named) + (f" = {product}" if len(named) > 1 else "")
    left = {name: world * degree // product for name, degree in given.items() if world * degree % product == 0}
    if dp is None:
        message = f"{words} does not divide a world of {world} ranks"
        ways = [f"{name} to {any_of(divisors(most))}" for name, most in left.items() if degrees[name] > 1]
        start = f"start a multiple of {product} ranks"
    else:
        message = f"{words} does not make a world of {world} ranks"
        ways = [f"{name} to {degree}" for name, degree in left.items()]
        start = f"start {product} ranks"
    return SpecError(message, hint=f"set {'; '.join(ways)}; or {start}" if ways else start)
