"""`route="auto"`: choices that are obvious, and the reason given."""

from longspan.advise import Costs, Planner
from longspan.plan import Mask, plan_attention


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
    plan = choose(
        Mask.full(65536), 8, (32, 32), ranks_per_node=4, costs=costs.model_copy(update={"node_bandwidth": 1e8})
    )
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
