"""The groups of a run's axes: worked examples, and every group against an enumeration of coordinates rank by rank."""

from collections import defaultdict
from itertools import combinations, permutations
from math import prod

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from longspan.errors import SpecError
from longspan.topology import ORDER, Topology
from tests.examples import examples

thorough = examples(300)

ORDERS = ["-".join(axes) for axes in permutations(("tp", "cp", "ep", "dp", "pp"))]


def lists(groups):
    return [list(group) for group in groups]


def test_the_16_rank_example():
    topology = Topology.of(16, tp=2, cp=2, pp=2)
    assert (topology.dp, topology.world, topology.order) == (2, 16, "tp-cp-ep-dp-pp")
    assert lists(topology.groups("tp")) == [[r, r + 1] for r in range(0, 16, 2)]
    assert lists(topology.groups("cp")) == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
    assert lists(topology.groups("dp")) == [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]]
    assert lists(topology.groups("pp")) == [[r, r + 8] for r in range(8)]
    assert lists(topology.groups("tp-dp-pp")) == [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]]
    assert lists(topology.groups("tp-pp")) == [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]
    assert lists(topology.groups("dp-cp")) == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]
    assert lists(topology.groups("tp-cp")) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert lists(topology.groups("tp-dp-cp")) == [list(range(8)), list(range(8, 16))]


def test_experts_fold_over_a_stage():
    # A stage is 8 ranks. Two experts' ranks lie side by side, whatever tp and cp make of these ranks.
    topology = Topology.of(16, tp=2, cp=2, pp=2, ep=4)
    assert topology.edp == 2
    assert lists(topology.groups("ep")) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert lists(topology.groups("edp")) == [[r, r + 4] for r in (0, 1, 2, 3, 8, 9, 10, 11)]
    assert lists(topology.groups("ep-pp"))[0] == [0, 1, 2, 3, 8, 9, 10, 11]
    assert topology.coordinates(14) == {"tp": 0, "cp": 1, "dp": 1, "pp": 1, "ep": 2, "edp": 1, "replica": 0}


def test_another_order():
    topology = Topology.of(8, tp=2, pp=2, order="dp-pp-ep-cp-tp")
    assert lists(topology.groups("dp")) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert lists(topology.groups("pp")) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert lists(topology.groups("tp")) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    # Without experts all of a stage hold the same, however far apart they are.
    assert lists(topology.groups("edp")) == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_replicas_are_the_outer_part_of_dp():
    topology = Topology.of(16, cp=2, tp=2, dp_replicate=2)
    assert lists(topology.groups("dp")) == [[r, r + 4, r + 8, r + 12] for r in range(4)]
    assert lists(topology.groups("replica")) == [[r, r + 8] for r in range(8)]
    assert lists(topology.groups("shard")) == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]
    assert [topology.coordinates(rank)["replica"] for rank in (0, 7, 8, 15)] == [0, 0, 1, 1]
    assert [topology.degree(axis) for axis in ("dp", "replica", "shard", "dp-cp", "edp")] == [4, 2, 4, 8, 16]
    assert topology.grid(["replica", "shard_dp", "cp", "tp"]).shape == (2, 2, 2, 2)
    assert Topology.of(16, cp=2).groups("shard") == Topology.of(16, cp=2).groups("dp-cp")


def test_two_levels_of_cp():
    """8 ranks, ulysses 2, ring 2, dp 2: ranks 4..7 have the ulysses ranks 0,1,0,1 and the ring ranks 0,0,1,1."""
    inner, outer = Topology.of(8, cp=4).cp_levels(2)
    assert lists(inner) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert lists(outer) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    place = {rank: group.index(rank) for groups in (inner,) for group in groups for rank in group}
    assert [place[rank] for rank in range(4, 8)] == [0, 1, 0, 1]
    place = {rank: group.index(rank) for group in outer for rank in group}
    assert [place[rank] for rank in range(4, 8)] == [0, 0, 1, 1]
    # With tp 2 neighbours of a CP group are two ranks apart.
    inner, outer = Topology.of(8, cp=4, tp=2).cp_levels(2)
    assert lists(inner) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert lists(outer) == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_cp_ranks_are_not_data_ranks():
    assert Topology.of(8, tp=2, cp=2).dp == 2
    topology = Topology.of(4, cp=2)
    assert topology.global_batch(1, gradient_accumulation_steps=2) == 4
    assert topology.steps_per_epoch(64, micro_batch_size=1, gradient_accumulation_steps=2) == 16
    assert topology.steps_per_epoch(65, micro_batch_size=1, gradient_accumulation_steps=2) == 17
    assert Topology(dp=3, tp=2, pp=2).global_batch(5) == 15


def enumerated(sizes, order):
    """`{axis: index}` of every rank, counting up along `order`, fastest first."""
    world, places = prod(sizes.values()), []
    for rank in range(world):
        place, left = {}, rank
        for axis in order:
            left, place[axis] = divmod(left, sizes[axis])
        places.append(place)
    return places


def together(places, axes):
    """Ranks that differ along `axes` alone."""
    groups = defaultdict(list)
    for rank, place in enumerate(places):
        groups[tuple(sorted((axis, index) for axis, index in place.items() if axis not in axes))].append(rank)
    return sorted(groups.values())


small = st.integers(1, 3)


@st.composite
def specs(draw):
    """Degrees and an order; ep divides a stage, dp_replicate divides dp."""
    spec = {name: draw(small) for name in ("tp", "pp", "cp")} | {"dp": draw(st.sampled_from([1, 2, 3, 4, 6]))}
    stage = spec["tp"] * spec["cp"] * spec["dp"]
    ep = draw(st.sampled_from([n for n in range(1, stage + 1) if stage % n == 0]))
    dp_replicate = draw(st.sampled_from([n for n in range(1, spec["dp"] + 1) if spec["dp"] % n == 0]))
    return spec | {"ep": ep, "dp_replicate": dp_replicate, "order": draw(st.sampled_from(ORDERS))}


def expert_places(spec, dense):
    """Coordinates on the experts' axes, or None where the order gives them other pipeline groups than attention."""
    sizes = {"ep": spec["ep"], "pp": spec["pp"]}
    sizes["edp"] = spec["tp"] * spec["cp"] * spec["dp"] // spec["ep"]
    if spec["ep"] == 1:
        seen = defaultdict(int)
        places = []
        for place in dense:
            places.append({"pp": place["pp"], "edp": seen[place["pp"]], "ep": 0})
            seen[place["pp"]] += 1
        return places
    names = {"dp": "edp", "ep": "ep", "pp": "pp"}
    places = enumerated(sizes, [names[axis] for axis in spec["order"].split("-") if axis in names])
    return places if together(places, {"pp"}) == together(dense, {"pp"}) else None


@thorough
@given(specs())
def test_every_group_is_that_of_an_enumeration(spec):
    order = [axis for axis in spec["order"].split("-") if axis != "ep"]
    dense = enumerated({axis: spec[axis] for axis in order}, order)
    experts = expert_places(spec, dense)
    if experts is None:
        with pytest.raises(SpecError, match="a stage would have different ranks for the two"):
            Topology(**spec)
        return
    topology = Topology(**spec)
    assert topology.world == len(dense)
    for places, axes in ((dense, ("tp", "cp", "dp", "pp")), (experts, ("ep", "edp", "pp"))):
        for count in range(1, len(axes) + 1):
            for some in combinations(axes, count):
                groups = lists(topology.groups("-".join(some)))
                assert groups == together(places, set(some))
                assert groups == lists(topology.groups("-".join(reversed(some))))
                assert {len(group) for group in groups} == {topology.degree("-".join(some))}
                assert sorted(rank for group in groups for rank in group) == list(range(len(dense)))
    inner_dp = spec["dp"] // spec["dp_replicate"]
    for rank, (place, expert) in enumerate(zip(dense, experts, strict=True)):
        expected = place | expert | {"replica": place["dp"] // inner_dp}
        assert topology.coordinates(rank) == expected
        place["replica"], place["shard_dp"] = divmod(place.pop("dp"), inner_dp)
    assert lists(topology.groups("replica")) == together(dense, {"replica"})
    assert lists(topology.groups("shard")) == together(dense, {"shard_dp", "cp"})
    assert lists(topology.groups("tp-replica")) == together(dense, {"tp", "replica"})


@thorough
@given(specs(), st.permutations(["pp", "dp", "cp", "tp"]), st.permutations(["pp", "edp", "ep"]))
def test_a_grid_has_every_rank_at_its_coordinates(spec, dense, experts):
    try:
        topology = Topology(**spec)
    except SpecError:
        assume(False)
    split = [part for axis in dense for part in (("replica", "shard_dp") if axis == "dp" else (axis,))]
    for axes in (dense, experts):
        grid = topology.grid(axes)
        assert (grid.dtype, grid.shape) == (np.int64, tuple(topology.degree(axis) for axis in axes))
        for place, rank in np.ndenumerate(grid):
            coordinates = topology.coordinates(int(rank))
            assert place == tuple(coordinates[axis] for axis in axes)
    assert np.array_equal(topology.grid(split).reshape(-1), topology.grid(dense).reshape(-1))


@thorough
@given(specs(), st.data())
def test_two_levels_divide_every_cp_group(spec, data):
    try:
        topology = Topology(**spec)
    except SpecError:
        assume(False)
    cp = spec["cp"]
    size = data.draw(st.sampled_from([n for n in range(1, cp + 1) if cp % n == 0]))
    inner, outer = topology.cp_levels(size)
    expected_inner, expected_outer = [], []
    for group in lists(topology.groups("cp")):
        expected_inner += [group[first : first + size] for first in range(0, cp, size)]
        expected_outer += [group[first::size] for first in range(size)]
    assert lists(inner) == sorted(expected_inner)
    assert lists(outer) == sorted(expected_outer)


def test_a_grid_may_leave_out_axes_of_one_rank():
    assert Topology.of(4, cp=2).grid(["dp", "cp"]).tolist() == [[0, 1], [2, 3]]
    assert Topology.of(4, cp=2).grid(["cp", "dp"]).tolist() == [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: Topology.of(16, tp=2, cp=3, pp=2),
            "tp 2 x pp 2 x cp 3 = 12 does not divide a world of 16 ranks\n\n"
            "hint: set cp to 1, 2 or 4; or start a multiple of 12 ranks",
        ),
        (
            lambda: Topology.of(7, tp=2, cp=2),
            "tp 2 x cp 2 = 4 does not divide a world of 7 ranks\n\nhint: start a multiple of 4 ranks",
        ),
        (
            lambda: Topology.of(16, dp=2, tp=2, cp=2),
            "dp 2 x tp 2 x cp 2 = 8 does not make a world of 16 ranks\n\n"
            "hint: set dp to 4; tp to 4; pp to 2; cp to 4; or start 8 ranks",
        ),
        (
            lambda: Topology.of(8, dp=3),
            "dp 3 does not make a world of 8 ranks\n\nhint: set dp to 8; or start 3 ranks",
        ),
        (lambda: Topology.of(8, tp=0), "tp=0 is below 1\n\nhint: every degree and every count is at least 1"),
        (lambda: Topology(dp=2.0), "dp=2.0 is not an integer"),
        (
            lambda: Topology(dp=2, order="tp-cp-dp-pp"),
            "order 'tp-cp-dp-pp' does not name each of tp, cp, ep, dp, pp once\n\n"
            'hint: write the axes from fastest to slowest, such as "tp-cp-ep-dp-pp"',
        ),
        (
            lambda: Topology(dp=6, dp_replicate=4),
            "dp_replicate=4 does not divide dp=6\n\nhint: set dp_replicate to 1, 2, 3 or 6",
        ),
        (
            lambda: Topology(dp=2, tp=2, cp=2, ep=3),
            "ep=3 does not divide the 8 ranks of a stage (tp 2 x cp 2 x dp 2)\n\nhint: set ep to 1, 2, 4 or 8",
        ),
        (
            lambda: Topology(dp=2, tp=2, pp=2, ep=4, order="tp-pp-cp-ep-dp"),
            'order "tp-pp-cp-ep-dp" with ep 4 numbers the pipeline groups of attention 0, 2, ... and those of the '
            'experts 0, 1, ...: a stage would have different ranks for the two\n\nhint: put pp last: "tp-cp-ep-dp-pp"',
        ),
        (
            lambda: Topology(dp=4).groups("sp"),
            "axis 'sp' of 'sp' is not known\n\nhint: axes are tp, cp, dp, pp; replica and shard for HSDP; ep and edp for "
            "experts; joined as in dp-cp",
        ),
        (lambda: Topology(dp=4).groups("dp-cp-dp"), "'dp-cp-dp' names replica twice\n\nhint: name every axis once"),
        (
            lambda: Topology(dp=4).groups("cp-ep"),
            "'cp-ep' mixes cp with ep: the axes of attention (tp, cp, dp) and of experts (ep, edp) number the same ranks "
            "in two ways\n\nhint: use axes of one kind; pp goes with either",
        ),
        (
            lambda: Topology(dp=4, tp=2, cp=3).grid(["dp", "tp"]),
            "axes dp, tp make 8 of the 24 ranks\n\nhint: also name cp",
        ),
        (lambda: Topology(dp=1, cp=6).cp_levels(4), "inner=4 does not divide cp=6\n\nhint: use 1, 2, 3 or 6"),
        (lambda: Topology(dp=2).coordinates(2), "rank 2 is not one of the 2 ranks 0..1"),
        (
            lambda: Topology(dp=2).global_batch(0),
            "micro_batch_size=0 is below 1\n\nhint: every degree and every count is at least 1",
        ),
    ],
)
def test_refusals(make, text):
    with pytest.raises(SpecError) as error:
        make()
    assert str(error.value) == text


def test_any_order_will_do_without_experts():
    assert {Topology(dp=2, tp=2, pp=2, order=order).edp for order in ORDERS} == {4}
    assert ORDER in ORDERS
