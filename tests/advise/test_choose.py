"""`route="auto"`: the costs it goes by, and choices that are obvious."""

import json
from dataclasses import asdict, replace

import pytest

from longspan.advise import Costs, Planner
from longspan.errors import SpecError
from longspan.plan import Mask, plan_attention

RECORD = asdict(Costs())


def test_costs_survive_their_file(tmp_path):
    costs = Costs(head_dim=64, message_bandwidth=1e9, tile_speed=((32, 1e9), (512, 4e9)), source="a test")
    costs.save(tmp_path / "costs.json")
    assert Costs.load(tmp_path / "costs.json") == costs


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "holds no measured costs: "),
        ("[]", "holds no measured costs: "),
        ('{"head_dim": 64}', "holds no measured costs: a record without all_to_all_bandwidth, "),
        (json.dumps(RECORD | {"weight": 3}), "holds no measured costs: a record with unknown weight"),
        (json.dumps(RECORD | {"head_dim": "64"}), "holds no measured costs: head_dim='64' is not a positive number"),
        (json.dumps(RECORD | {"message_bandwidth": 0}), "message_bandwidth=0 is not a positive number"),
        (json.dumps(RECORD | {"node_bandwidth": float("nan")}), "node_bandwidth=nan is not a positive number"),
        (json.dumps(RECORD | {"tile_speed": [[128, -8.0]]}), "tile_speed at 128 rows=-8.0 is not a positive number"),
        (json.dumps(RECORD | {"tile_speed": [3]}), "tile_speed is not a list of [rows, FLOP/s]"),
    ],
)
def test_a_file_that_holds_something_else(tmp_path, text, told):
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(SpecError) as error:
        Costs.load(path)
    assert told in str(error.value)
    assert str(error.value).endswith("\n\nhint: longspan bench calibrate writes one")


def test_a_file_that_does_not_exist(tmp_path):
    with pytest.raises(SpecError, match=r"cannot read .*/none\.json: No such file or directory"):
        Costs.load(tmp_path / "none.json")


def test_speed_between_and_beyond_the_measured_sizes():
    costs = Costs(tile_speed=((128, 1e12), (1024, 2e12), (4096, 8e12)))
    assert [costs.speed(rows) for rows in (1, 128, 576, 1024, 4096, 10**6)] == [1e12, 1e12, 1.5e12, 2e12, 8e12, 8e12]


def test_a_document_is_whole_where_its_tokens_take_less_time_than_a_cut():
    costs = Costs(head_dim=64, message_latency=20e-6, tile_overhead=10e-6, tile_speed=((128, 1e13), (1024, 1e14)))
    # 80 us a cut; a token takes 72 x 512^2 / 1e14 = 0.19 us besides, and n of them 3584 n^2 / speed(n) in attention.
    n = costs.min_split_tokens(8)
    linear, attention = 72 * 512**2 / 1e14, 3.5 * 2 * 512
    assert linear * (n - 1) + attention * (n - 1) ** 2 / costs.speed(n - 1) <= 80e-6
    assert linear * n + attention * n**2 / costs.speed(n) > 80e-6
    assert 300 < n < 420
    assert replace(costs, message_latency=20e-3).min_split_tokens(8) > 50 * n
    assert costs.min_split_tokens(64) < n / 8


def choose(mask, P, heads, **how):
    return Planner(P, route="auto", heads=heads, **how).plans({"full": mask})[1]["full"]


def test_the_choice_has_a_reason_that_names_the_others():
    plan = choose(Mask.causal(65536), 8, (32, 8))
    assert plan.reason.startswith(f"{plan.route}")
    assert "ms a layer, forward and backward; " in plan.reason
    assert plan.reason.endswith("(typical figures of one H100 node)")
    for route in ("ring", "exchange", "ulysses", "usp"):
        assert route in plan.reason
    assert plan_attention(plan.layout, plan.mask).reason == ""


def test_the_same_arguments_give_the_same_plan():
    assert choose(Mask.causal(4096), 8, (32, 8)) == choose(Mask.causal(4096), 8, (32, 8))


def test_free_messages_make_the_ring_and_free_exchanges_make_ulysses():
    """With one kind of traffic all but free and the other slow, the choice is the route that uses the free one."""
    free, slow = 1e18, 1e7
    one = choose(
        Mask.full(8192),
        4,
        (8, 8),
        costs=Costs(all_to_all_bandwidth=free, all_to_all_latency=1e-9, message_bandwidth=slow),
    )
    assert one.route == "ulysses"
    other = choose(
        Mask.full(8192), 4, (8, 8), costs=Costs(message_bandwidth=free, message_latency=1e-9, all_to_all_bandwidth=slow)
    )
    assert other.route in ("ring", "exchange")


def test_routes_that_the_heads_do_not_allow_are_not_chosen():
    for heads in ((9, 3), (1, 1), None):
        plan = choose(Mask.full(8192), 4, heads, costs=Costs(message_bandwidth=1e6))
        assert plan.route in ("ring", "exchange")


def test_one_rank_has_nothing_to_choose():
    plan = choose(Mask.causal(64), 1, (8, 8))
    assert (plan.route, plan.bytes(0, "backward", 64, 2)) == ("ring", 0)


def test_slow_nodes_make_two_levels():
    """Where one exchange among all ranks would cross the nodes, heads and rows are dealt with on a level each."""
    costs = Costs(message_bandwidth=1e10)
    assert choose(Mask.full(65536), 8, (32, 32), costs=costs).route == "ulysses"
    plan = choose(Mask.full(65536), 8, (32, 32), ranks_per_node=4, costs=replace(costs, node_bandwidth=1e8))
    assert plan.degrees.levels is not None
    assert f"{plan.route} (inner {plan.degrees.levels[1]}): about " in plan.reason


def test_hops_take_time_beside_tiles_not_after_them():
    """Two ranks, full mask, 1,024 tokens each: a stage's tile takes c = 4 x 64 x 1024^2 / 1e12 s = 268 us forward and 2.5 c
    backward; a hop of keys and values takes c, gradients going home 2 c. All hide: 2 c + 5 c = 1.88 ms; one after the other it
    would be 7 c + 4 c = 2.95 ms."""
    c = 4 * 64 * 1024**2 / 1e12
    costs = Costs(
        head_dim=64, itemsize=2, message_bandwidth=1024 * 2 * 64 * 2 / c, message_latency=1e-12, tile_overhead=1e-12,
        tile_speed=((1024, 1e12),),
    )  # fmt: skip
    plan = Planner(2, "contiguous", "auto", costs=costs).plans({"full": Mask.full(2048)})[1]["full"]
    assert plan.reason.startswith("ring: about 1.88 ms a layer")
