"""Groups on nodes: which stay inside, against a count rank by rank; and what is said where a busy axis leaves its node."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.errors import SpecError
from longspan.topology import BUSIEST_FIRST, Nodes, Topology
from longspan.topology.nodes import short_ranks
from tests.examples import examples

from .test_axes import ORDERS

thorough = examples(200)


def test_the_16_rank_example_on_two_nodes():
    nodes = Nodes(Topology.of(16, tp=2, cp=2, pp=2), 8, domain=4)
    assert nodes.ranks == (tuple(range(8)), tuple(range(8, 16)))
    assert {axis: nodes.spread(axis) for axis in ("tp", "cp", "dp", "pp")} == {
        "tp": (1,) * 8, "cp": (1,) * 8, "dp": (1,) * 8, "pp": (2,) * 8,
    }  # fmt: skip
    assert nodes.spread("cp", 4) == (1,) * 8
    assert nodes.spread("dp", 4) == (2,) * 8
    assert nodes.spread("tp-dp-pp") == (2, 2)
    assert nodes.warnings() == ()


def test_some_groups_of_an_axis_may_cross():
    # tp 3 on nodes of 4: ranks 0-2 | 3,4,5 | 6,7,8 | 9-11.
    nodes = Nodes(Topology.of(12, tp=3), 4)
    assert nodes.spread("tp") == (1, 2, 2, 1)


def test_ranks_of_a_cp_group_on_one_node():
    assert Nodes(Topology.of(16, tp=2, cp=4), 4).together("cp") == 2
    assert Nodes(Topology.of(16, tp=2, cp=4), 16).together("cp") == 4
    assert Nodes(Topology.of(12, cp=6), 4).together("cp") == 2
    assert Nodes(Topology.of(16, cp=2), 1).together("cp") == 1


@thorough
@given(
    st.tuples(*[st.sampled_from([1, 2, 3, 4])] * 4),
    st.sampled_from(ORDERS),
    st.sampled_from([1, 2, 3, 4, 6, 8, 12]),
)
def test_spread_and_warnings_rank_by_rank(degrees, order, size):
    topology = Topology(**dict(zip(("dp", "tp", "pp", "cp"), degrees, strict=True)), order=order)
    if topology.world % size:
        return
    nodes = Nodes(topology, size)
    leaves = {}
    for axis in BUSIEST_FIRST:
        counts = [len({rank // size for rank in group}) for group in topology.groups(axis)]
        assert nodes.spread(axis) == tuple(counts)
        leaves[axis] = max(counts) > 1
    used = [axis for axis in BUSIEST_FIRST if topology.degree(axis) > 1]
    expected = [
        axis
        for n, axis in enumerate(used)
        if leaves[axis] and (axis == "tp" or not all(leaves[other] for other in used[n + 1 :]))
    ]
    assert [warning.split()[0] for warning in nodes.warnings()] == expected


@pytest.mark.parametrize(
    ("topology", "size", "domain", "warnings"),
    [
        (
            Topology.of(32, tp=2, pp=2, order="pp-cp-ep-dp-tp"), 8, None,
            [
                'tp crosses nodes of 8 ranks, as ranks 0,16 do; pp, which sends less, does not: set order to '
                '"tp-cp-ep-dp-pp"',
                'dp crosses nodes of 8 ranks, as ranks 0,2,..,14 do; pp, which sends less, does not: set order to '
                '"tp-cp-ep-dp-pp"',
            ],
        ),
        (
            Topology.of(64, cp=8, ep=16), 8, None,
            ["ep crosses nodes of 8 ranks, as ranks 0-15 do; cp, which sends less, does not: set ep to 1, 2, 4 or 8"],
        ),
        (
            Topology.of(32, tp=16), 8, None,
            ["tp crosses nodes of 8 ranks, as ranks 0-15 do; every layer waits for TP: set tp to 1, 2, 4 or 8"],
        ),
        (
            Topology.of(16, tp=2, cp=4, order="cp-tp-ep-dp-pp"), 8, 4,
            [
                'tp crosses domains of 4 ranks, as ranks 0,4 do; cp, which sends less, does not: set order to '
                '"tp-cp-ep-dp-pp"'
            ],
        ),
        (Topology.of(64, tp=8, cp=4, pp=2), 8, 4, []),
    ],
)  # fmt: skip
def test_warnings(topology, size, domain, warnings):
    assert list(Nodes(topology, size, domain).warnings()) == warnings


@pytest.mark.parametrize(
    ("topology", "size", "way_out"),
    [
        (Topology.of(32, tp=2, pp=2, order="pp-cp-ep-dp-tp"), 8, {"order": "tp-cp-ep-dp-pp"}),
        (Topology.of(64, cp=8, ep=16), 8, {"ep": 8}),
        (Topology.of(32, tp=16), 8, {"tp": 8}),
    ],
)
def test_the_way_out_is_one(topology, size, way_out):
    degrees = {name: getattr(topology, name) for name in ("tp", "pp", "cp", "ep", "order")}
    assert Nodes(topology, size).warnings()
    assert Nodes(Topology.of(topology.world, **degrees | way_out), size).warnings() == ()


def test_nodes_where_nobody_says():
    sizes = {world: Nodes.usual(Topology.of(world)).ranks_per_node for world in (1, 6, 8, 12, 13, 16, 1024)}
    assert sizes == {1: 1, 6: 6, 8: 8, 12: 4, 13: 13, 16: 8, 1024: 8}


def test_a_world_smaller_than_a_node_has_one():
    nodes = Nodes(Topology.of(6, tp=2), 8)
    assert (nodes.ranks, nodes.spread("dp")) == ((tuple(range(6)),), (1, 1))


@pytest.mark.parametrize(
    ("size", "domain", "text"),
    [
        (
            6, None,
            "nodes of 6 ranks do not make a world of 16\n\n"
            "hint: set ranks_per_node to 1, 2, 4, 8 or 16, or start a multiple of 6 ranks",
        ),
        (8, 3, "domains of 3 ranks do not make a node of 8\n\nhint: set domain to 1, 2, 4 or 8"),
        (0, None, "nodes of 0 ranks do not make a world of 16\n\nhint: set ranks_per_node to 1, 2, 4, 8 or 16"),
    ],
)  # fmt: skip
def test_refusals(size, domain, text):
    with pytest.raises(SpecError) as error:
        Nodes(Topology.of(16), size, domain)
    assert str(error.value) == text


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ((3,), "3"),
        ((0, 1), "0,1"),
        ((0, 1, 2), "0-2"),
        ((0, 1, 8, 9), "0,1,8,9"),
        ((0, 8, 16, 24), "0,8,16,24"),
        ((0, 8, 16, 24, 32), "0,8,..,32"),
        ((*range(8), *range(16, 24)), "0-7,16-23"),
        ((0, 1, 4, 5, 8, 9, 12, 13, 16, 17), "0,1,4,5,..,16,17"),
    ],
)
def test_ranks_in_few_words(ranks, words):
    assert short_ranks(ranks) == words
