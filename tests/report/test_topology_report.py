"""A topology as record, table and drawing: the example line by line, that everything fits, and that colour says the same."""

import io
import json

import pytest
from rich.console import Console
from rich.text import Text

from longspan.report import TopologyReport, describe_topology, topology_table
from longspan.report.palette import rank_colors
from longspan.topology import Topology


def drawn(report: TopologyReport, color: bool = False, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    console = Console(file=file, width=80, color_system="truecolor" if color else None, force_terminal=color)
    console.print(topology_table(report))
    file.flush()
    return raw.getvalue().decode(encoding)


def test_the_16_rank_example() -> None:
    text = drawn(describe_topology(Topology.of(16, tp=2, cp=2, pp=2), 8))
    assert [line.rstrip() for line in text.splitlines()] == [
        "16 ranks: dp 2 x tp 2 x pp 2 x cp 2",
        "order tp-cp-ep-dp-pp, fastest to slowest",
        "2 nodes of 8 ranks",
        "4 replicas of the model (tp-pp), the first on ranks 0,1,8,9",
        "a global batch is micro_batch_size x dp 2 x gradient_accumulation_steps rows",
        "",
        "axis       degree   groups   inside a node   nodes of a group",
        "─────────────────────────────────────────────────────────────",
        "tp              2        8             all                  1",
        "dp              2        8             all                  1",
        "cp              2        8             all                  1",
        "pp              2        8            none                  2",
        "dp-cp           4        4             all                  1",
        "tp-cp           4        4             all                  1",
        "tp-dp-cp        8        2             all                  1",
        "tp-dp-pp        8        2            none                  2",
        "tp-pp           4        4            none                  2",
        "",
        "groups",
        "tp        [0,1] [2,3] [4,5] [6,7] [8,9] [10,11] [12,13] [14,15]",
        "dp        [0,4] [1,5] [2,6] [3,7] [8,12] [9,13] [10,14] [11,15]",
        "cp        [0,2] [1,3] [4,6] [5,7] [8,10] [9,11] [12,14] [13,15]",
        "pp        [0,8] [1,9] [2,10] [3,11] [4,12] [5,13] [6,14] [7,15]",
        "dp-cp     [0,2,4,6] [1,3,5,7] [8,10,12,14] [9,11,13,15]",
        "tp-cp     [0-3] [4-7] [8-11] [12-15]",
        "tp-dp-cp  [0-7] [8-15]",
        "tp-dp-pp  [0,1,4,5,8,9,12,13] [2,3,6,7,10,11,14,15]",
        "tp-pp     [0,1,8,9] [2,3,10,11] [4,5,12,13] [6,7,14,15]",
        "",
        "┌─ node 0 ──────────────────────┐ ┌─ node 1 ──────────────────────┐",
        "│ rank   0  1  2  3  4  5  6  7 │ │ rank   8  9 10 11 12 13 14 15 │",
        "│ tp     0  1  0  1  0  1  0  1 │ │ tp     0  1  0  1  0  1  0  1 │",
        "│ cp     0  0  1  1  0  0  1  1 │ │ cp     0  0  1  1  0  0  1  1 │",
        "│ dp     0  0  0  0  1  1  1  1 │ │ dp     0  0  0  0  1  1  1  1 │",
        "│ pp     0  0  0  0  0  0  0  0 │ │ pp     1  1  1  1  1  1  1  1 │",
        "└───────────────────────────────┘ └───────────────────────────────┘",
    ]


def test_experts_domains_replicas_and_warnings() -> None:
    report = describe_topology(Topology.of(8, tp=2, cp=2, ep=4, dp_replicate=2, order="cp-tp-ep-dp-pp"), 4, domain=2)
    lines = [line.rstrip() for line in drawn(report).splitlines()]
    assert lines[0] == "8 ranks: dp 2 x tp 2 x pp 1 x cp 2, ep 4 x edp 2 a stage"
    assert lines[2] == "2 nodes of 4 ranks in domains of 2"
    assert " ".join(lines[6].split()) == "axis degree groups inside a domain inside a node nodes of a group"
    rows = {line.split()[0]: line.split()[1:] for line in lines[8:18] if line}
    assert rows == {
        "tp": ["2", "4", "none", "all", "1"],
        "dp": ["2", "4", "none", "none", "2"],
        "cp": ["2", "4", "all", "all", "1"],
        "replica": ["2", "4", "none", "none", "2"],
        "shard": ["2", "4", "all", "all", "1"],
        "ep": ["4", "2", "none", "all", "1"],
        "edp": ["2", "4", "none", "none", "2"],
        "dp-cp": ["4", "2", "none", "none", "2"],
        "tp-cp": ["4", "2", "none", "all", "1"],
        "tp-dp-cp": ["8", "1", "none", "none", "2"],
    }
    assert "│ rank   0  1 |  2  3 │ │ rank   4  5 |  6  7 │" in lines
    assert "│ ep     0  1 |  2  3 │ │ ep     0  1 |  2  3 │" in lines
    told = " ".join(" ".join(lines).split())
    assert told.endswith(" ".join(f"warning: {warning}" for warning in report.warnings))
    assert [warning.split()[0] for warning in report.warnings] == ["tp", "ep"]


def test_a_group_that_only_sometimes_crosses() -> None:
    lines = drawn(describe_topology(Topology.of(12, tp=3), 4)).splitlines()
    assert next(line.split() for line in lines if line.startswith("tp ")) == ["tp", "3", "4", "2", "up", "to", "2"]


def test_large_nodes_are_folded_and_many_nodes_left_out() -> None:
    text = drawn(describe_topology(Topology.of(144, tp=2, cp=8, pp=3), 72, domain=36))
    assert "│ rank   24  25  26  27  28  29  30  31  32  33  34  35 │" in text
    assert text.count("│ ---") == 2
    lines = [line.rstrip() for line in drawn(describe_topology(Topology.of(1024, tp=8, cp=8, pp=4))).splitlines()]
    assert "128 nodes of 8 ranks (assumed: ranks_per_node is not given)" in lines
    assert [line.strip("┌─┐ ") for line in lines if line.startswith("┌")] == ["node 0", "node 1", "node 2", "node 127"]
    assert "  nodes 3 to 126, ranks 24 to 1015, are alike" in lines
    assert "tp        [0-7] [8-15] [16-23] [24-31] [32-39] [40-47] [48-55] ... 121 more" in lines


@pytest.mark.parametrize("color", [False, True], ids=["numbers", "colour"])
@pytest.mark.parametrize(
    ("world", "degrees", "nodes"),
    [
        (1, {}, {}),
        (13, {}, {}),
        (64, {"tp": 2, "cp": 4, "pp": 2, "ep": 8, "dp_replicate": 2}, {"domain": 4}),
        (128, {"tp": 8, "cp": 4}, {"ranks_per_node": 64, "domain": 4}),
        (146, {"pp": 2}, {"ranks_per_node": 73}),
        (4096, {"tp": 8, "cp": 16, "pp": 8, "ep": 64}, {"ranks_per_node": 16, "domain": 1}),
    ],
)
def test_fits_80_columns(world: int, degrees: dict[str, int], nodes: dict[str, int], color: bool) -> None:
    report = describe_topology(Topology.of(world, **degrees), **nodes)
    text = Text.from_ansi(drawn(report, color)).plain
    assert max(map(len, text.splitlines())) <= 80
    assert all(any(line.split()[:1] == [axes] for line in text.splitlines()) for axes in report.axes)


def test_colour_paints_every_place_of_an_axis() -> None:
    report = describe_topology(Topology.of(16, cp=8))
    text = drawn(report, color=True)
    assert all(f"48;2;{r};{g};{b}m" in text for r, g, b in rank_colors(8))
    plain = [line.rstrip() for line in Text.from_ansi(text).plain.splitlines()]
    assert plain == [line.rstrip() for line in drawn(report).splitlines()]


def test_plain_ascii_where_nothing_else_can_be_written() -> None:
    text = drawn(describe_topology(Topology.of(16, cp=2)), encoding="ascii")
    assert "+- node 0 ----" in text


def test_record() -> None:
    report = describe_topology(Topology.of(16, tp=2, cp=2, ep=2, dp_replicate=2), 8, domain=2)
    data = json.loads(report.to_json(more=[1, 2]))
    assert list(data) == [
        "world", "degrees", "order", "nodes", "ranks_per_node", "assumed", "domain", "warnings", "groups", "reach", "more",
    ]  # fmt: skip
    assert data["degrees"] == {"dp": 4, "tp": 2, "pp": 1, "cp": 2, "ep": 2, "edp": 8, "dp_replicate": 2}
    assert (data["ranks_per_node"], data["assumed"], data["domain"], data["more"]) == (8, False, 2, [1, 2])
    dense = [
        "tp",
        "dp",
        "cp",
        "pp",
        "tp-dp",
        "tp-cp",
        "tp-pp",
        "dp-cp",
        "dp-pp",
        "cp-pp",
        "tp-dp-cp",
        "tp-dp-pp",
        "tp-cp-pp",
    ]
    dense += ["dp-cp-pp", "tp-dp-cp-pp", "replica", "shard"]
    experts = ["ep", "edp", "ep-edp", "ep-pp", "edp-pp", "ep-edp-pp"]
    assert list(data["groups"]) == [*dense, *experts]
    assert data["groups"]["replica"] == [[rank, rank + 8] for rank in range(8)]
    assert data["reach"]["ep"] == {"degree": 2, "groups": 8, "inside_node": 8, "inside_domain": 8, "nodes": 1}
    assert data["reach"]["dp"] == {"degree": 4, "groups": 4, "inside_node": 0, "inside_domain": 0, "nodes": 2}
    assert "[0, 1, 2, 3, 4, 5, 6, 7],\n" in report.to_json()


def test_nodes_are_assumed_where_nobody_says() -> None:
    assert json.loads(describe_topology(Topology.of(16)).to_json())["assumed"] is True
    assert describe_topology(Topology.of(16)).nodes.ranks_per_node == 8
