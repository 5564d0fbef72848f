"""Which ranks of a run form the groups of each axis, and of products of axes. No process group, no torch.

    tp2 cp2 dp2 pp2 in the order tp-cp-ep-dp-pp, fastest to slowest:

                    pp 0                      pp 1                 tp     [0,1] [2,3] ... [14,15]
              dp 0        dp 1          dp 0        dp 1           cp     [0,2] [1,3] [4,6] ... [13,15]
    cp 0      0  1        4  5          8  9       12 13           dp-cp  [0,2,4,6] [1,3,5,7] ... [9,11,13,15]
    cp 1      2  3        6  7         10 11       14 15           tp-pp  [0,1,8,9] [2,3,10,11] ...: a replica of the model

Experts have axes of their own over the same ranks ("folding", Megatron-Core's expert ranks): ep x edp x pp in the same
order, edp in the place of dp, and no tp or cp. Above with ep 4 the ranks 0..3 share the experts, and so do 4..7.
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
"""Fastest to slowest: ranks that talk most are neighbours."""

_DENSE = {"tp", "cp", "dp", "replica", "shard_dp", "shard"}
_EXPERT = {"ep", "edp"}
_PARTS = {"dp": ("replica", "shard_dp"), "shard": ("shard_dp", "cp")}
"""Axes made of others, slowest first; the rest are their own part."""


@dataclass(frozen=True)
class Topology:
    """The degrees of a run's axes, and the order in which ranks are numbered along them, fastest to slowest.

    `dp_replicate` splits dp for HSDP: dp index = replica * (dp / dp_replicate) + index among the dp ranks that shard
    parameters. `ep`
    takes ranks of one pipeline stage (tp x cp x dp) and leaves `edp`, the ranks with the same experts.

    Raises `SpecError`: a degree that is not an integer of at least 1, an order that does not name every axis once,
    `dp_replicate` that do not divide dp, `ep` that does not divide the ranks of a stage, an order in which the stages of
    the experts would not be those of the rest.
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
        """The topology of `world` ranks; `dp` None takes what the other degrees leave.

        Raises `SpecError` if the degrees do not multiply to the world, and what `Topology` raises.
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
        """All ranks."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def edp(self) -> int:
        """Ranks of a stage that hold the same experts."""
        return self.tp * self.cp * self.dp // self.ep

    def degree(self, axis: str) -> int:
        """Ranks in a group of an axis, or of a product such as "dp-cp"."""
        return prod(self._degrees[part] for part in _parts(axis.split("-")))

    def groups(self, axes: str) -> Groups:
        """The groups of an axis or of a product of axes, such as "tp", "dp-cp", "ep-pp": ranks ascending, then by first rank.

        A group is the ranks that differ along these axes alone; the order of the names does not matter. Axes: tp, cp, dp, pp;
        "replica" (ranks with copies of the same shard) and "shard" (ranks over which parameters are sharded: dp-cp within a
        replica); and those of the experts, ep, edp. Raises `SpecError` for other names, for one named twice, and for a
        product of axes of both kinds, of which only pp is both.
        """
        parts = _parts(axes.split("-"))
        names, ranks = self._numbered(parts)
        chosen = [n for n, name in enumerate(names) if name in parts]
        others = [n for n in range(len(names)) if n not in chosen]
        table = np.sort(ranks.transpose(others + chosen).reshape(-1, self.degree(axes)), axis=1)
        return tuple(map(tuple, table[np.argsort(table[:, 0])].tolist()))

    def coordinates(self, rank: int) -> dict[str, int]:
        """The index of `rank` along tp, cp, dp, pp, ep, edp and replica."""
        check_rank(rank, self.world)
        index: dict[str, int] = {}
        for parts in ([], ["ep"]):
            names, ranks = self._numbered(parts)
            (place,) = np.argwhere(ranks == rank)
            index |= dict(zip(names, place.tolist(), strict=True))
        index["dp"] = index["replica"] * (self.dp // self.dp_replicate) + index["shard_dp"]
        return {name: index[name] for name in ("tp", "cp", "dp", "pp", "ep", "edp", "replica")}

    def grid(self, axes: Sequence[str]) -> Array:
        """All ranks, one dim per axis in the order named, as a mesh takes them: int64.

        The axes are dense (pp, dp, cp, tp, with dp as a whole or as replica, shard_dp) or those of experts (pp, edp, ep).
        Raises `SpecError` if they leave ranks out, and what `groups` raises.
        """
        parts = _parts(axes)
        names, ranks = self._numbered(parts)
        if prod(self._degrees[part] for part in parts) != self.world:
            missing = [name for name in names if name not in parts and self._degrees[name] > 1]
            raise SpecError(
                f"axes {', '.join(axes)} make {prod(map(self.degree, axes))} of the {self.world} ranks",
                hint=f"name {' and '.join(missing)} too",
            )
        spread = [names.index(part) for part in parts]
        unnamed = [n for n in range(len(names)) if n not in spread]
        return np.array(ranks.transpose(spread + unnamed).reshape([self.degree(axis) for axis in axes]))

    def cp_levels(self, inner: int) -> tuple[Groups, Groups]:
        """Two levels of CP, inner and outer groups: `inner` neighbours of a CP group, and the ranks in the same place of these.

        cp 4, inner 2 on ranks 0..3: inner [0,1] [2,3], outer [0,2] [1,3].
        """
        if _at_least_one("inner", inner) > self.cp or self.cp % inner:
            raise SpecError(f"inner={inner} does not divide cp={self.cp}", hint=f"use {any_of(divisors(self.cp))}")
        table = np.array(self.groups("cp")).reshape(-1, self.cp // inner, inner)
        inside, across = table.reshape(-1, inner), table.swapaxes(1, 2).reshape(-1, self.cp // inner)
        return _sorted(inside), _sorted(across)

    def global_batch(self, micro_batch_size: int, gradient_accumulation_steps: int = 1) -> int:
        """Rows of an optimizer step: CP, TP and PP ranks read the rows of their dp rank."""
        return (
            _at_least_one("micro_batch_size", micro_batch_size)
            * self.dp
            * _at_least_one("gradient_accumulation_steps", gradient_accumulation_steps)
        )

    def steps_per_epoch(self, rows: int, micro_batch_size: int, gradient_accumulation_steps: int = 1) -> int:
        """Optimizer steps that read each of `rows` once; the last may reach into the next epoch, as the loader does."""
        return -(-rows // self.global_batch(micro_batch_size, gradient_accumulation_steps))

    @cached_property
    def _degrees(self) -> dict[str, int]:
        shard_dp = self.dp // self.dp_replicate
        dense = {"tp": self.tp, "cp": self.cp, "replica": self.dp_replicate, "shard_dp": shard_dp, "pp": self.pp}
        return dense | {"ep": self.ep, "edp": self.edp}

    def _numbered(self, parts: Iterable[str]) -> tuple[list[str], Array]:
        """Names of the dense axes, or of the experts' if `parts` has one, slowest first, and the ranks along them."""
        return self._experts if _EXPERT & set(parts) else self._dense

    @cached_property
    def _dense(self) -> tuple[list[str], Array]:
        axes = [axis for axis in reversed(self.order.split("-")) if axis != "ep"]
        names = [part for axis in axes for part in _PARTS.get(axis, (axis,))]
        return names, np.arange(self.world).reshape([self._degrees[name] for name in names])

    @cached_property
    def _experts(self) -> tuple[list[str], Array]:
        """The ranks of every stage, ascending, cut anew: which is the order's own numbering, or else was refused."""
        names = ["pp", *_of_experts(list(reversed(self.order.split("-"))))]
        dense, ranks = self._dense
        stages = np.moveaxis(ranks, dense.index("pp"), 0)
        return names, stages.reshape([self._degrees[name] for name in names])

    def _check_fold(self) -> None:
        """Ranks of a pipeline group are as far apart as the axes faster than pp are large, here and for the experts.

        Without expert axes nothing is folded: all of a stage hold the same.
        """
        faster = self.order.split("-")[: self.order.split("-").index("pp")]
        apart = prod(getattr(self, axis) for axis in faster if axis != "ep")
        apart_experts = prod(self._degrees[axis] for axis in _of_experts(faster))
        if self.pp > 1 and self.ep > 1 and apart != apart_experts:
            moved = "-".join([*(axis for axis in self.order.split("-") if axis != "pp"), "pp"])
            raise SpecError(
                f'order "{self.order}" with ep {self.ep} numbers the pipeline groups of attention '
                f"0, {apart}, ... and those of the experts 0, {apart_experts}, ...: a stage would have other ranks for each",
                hint=f'put pp last: "{moved}"',
            )


def divisors(number: int) -> list[int]:
    """Ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def any_of(numbers: Iterable[int]) -> str:
    """`1, 2 or 4`."""
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last


def _at_least_one(name: str, value: int) -> int:
    if whole(name, value) < 1:
        raise SpecError(f"{name}={value} is below 1", hint="every degree and every count is at least 1")
    return value


def _of_experts(axes: Sequence[str]) -> list[str]:
    """The axes of the experts in the places of these."""
    return [{"ep": "ep", "dp": "edp"}[axis] for axis in axes if axis in ("ep", "dp")]


def _sorted(table: Array) -> Groups:
    return tuple(sorted(map(tuple, table.tolist())))


def _parts(axes: Sequence[str]) -> list[str]:
    """The parts of these axes in turn; an error for axes that no group can be of."""
    named = "-".join(axes)
    if unknown := [axis for axis in axes if axis not in _DENSE | _EXPERT | {"pp"}]:
        raise SpecError(
            f"axis {unknown[0]!r} of {named!r} is not known",
            hint="axes are tp, cp, dp, pp; replica and shard, for HSDP; ep, edp, of experts; joined as in dp-cp",
        )
    parts = [part for axis in axes for part in _PARTS.get(axis, (axis,))]
    if twice := [part for part in parts if parts.count(part) > 1]:
        raise SpecError(f"{named!r} names {twice[0]} twice", hint="name every axis once")
    if (dense := _DENSE & set(axes)) and (experts := _EXPERT & set(axes)):
        raise SpecError(
            f"{named!r} mixes {', '.join(sorted(dense))} with {', '.join(sorted(experts))}: the axes of attention "
            "(tp, cp, dp) and of experts (ep, edp) number the same ranks in two ways",
            hint="take axes of one kind; pp goes with either",
        )
    return parts


def _not_the_world(world: int, dp: int | None, degrees: dict[str, int]) -> SpecError:
    """What each degree may be while the others stay, and how many ranks these take."""
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
