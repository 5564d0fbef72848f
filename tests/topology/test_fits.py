"""What no model, route or schedule can run on: each wrong topology with the words that a stranger gets."""

import re
from dataclasses import replace

import pytest

from longspan.errors import SpecError
from longspan.topology import ExpertsShape, ModelShape, Topology, check_model

SHAPE = ModelShape(
    num_layers=8, hidden_size=64, head_dim=8, num_heads=8, num_kv_heads=4, intermediate_size=256, vocab_size=1000
)
EXPERTS = replace(
    SHAPE, experts=ExpertsShape(num_experts=8, top_k=2, intermediate_size=64, shared_intermediate_size=256)
)


def shape(**changes) -> ModelShape:
    return replace(SHAPE, **changes)


WRONG = {
    "query heads": (
        Topology(dp=1, tp=3), shape(num_heads=8, num_kv_heads=4), {},
        "tp=3 does not divide 8 query heads\n\nhint: tp divides heads, intermediate_size and vocab_size: set it to 1, 2 or 4",
    ),
    "KV heads": (
        Topology(dp=1, tp=4), shape(num_heads=8, num_kv_heads=2), {},
        "tp=4 does not divide 2 KV heads\n\nhint: tp divides heads, intermediate_size and vocab_size: set it to 1 or 2",
    ),
    "ffn": (
        Topology(dp=1, tp=4), shape(intermediate_size=250), {},
        "tp=4 does not divide intermediate_size=250\n\n"
        "hint: tp divides heads, intermediate_size and vocab_size: set it to 1 or 2; or make intermediate_size a multiple, "
            "such as 252",
    ),
    "vocabulary": (
        Topology(dp=1, tp=2), shape(vocab_size=50257), {},
        "tp=2 does not divide vocab_size=50257\n\n"
        "hint: tp divides heads, intermediate_size and vocab_size: set it to 1; or make vocab_size a multiple, such as 50258",
    ),
    "GQA": (
        Topology(dp=1), shape(num_heads=9, num_kv_heads=4), {},
        "9 query heads are not divisible by 4 KV heads\n\nhint: KV heads may be one of 1, 3, 9",
    ),
    "ulysses after tp": (
        Topology(dp=1, tp=4, cp=4), SHAPE, {"route": "ulysses"},
        "ulysses degree 4 does not divide 2 query heads (8 before tp=4) (1 KV heads)\n\nhint: use a ulysses "
        'degree of 1 or 2; lower tp; keep 4 ranks by route="usp" with inner=2 (ulysses inside, ring outside); or route="ring"',
    ),
    "usp after tp": (
        Topology(dp=1, tp=4, cp=8), SHAPE, {"route": "usp", "inner": 4},
        "inner ulysses degree 4 does not divide 2 query heads (8 before tp=4) (1 KV heads)\n\n"
        'hint: set inner=1 or 2; lower tp; or route="ring"',
    ),
    "inner": (
        Topology(dp=1, cp=4), SHAPE, {"route": "usp", "inner": 3},
        "inner=3 does not divide the 4 ranks of the group\n\nhint: use 1, 2, 4",
    ),
    "ep and the experts": (
        Topology(dp=6, ep=3), EXPERTS, {},
        "ep=3 does not divide 8 experts\n\nhint: ep divides the experts and the 6 ranks of a stage: set it to 1 or 2",
    ),
    "ep without experts": (
        Topology(dp=2, ep=2), SHAPE, {},
        "ep=2 for a model without experts\n\nhint: set ep to 1, or give the model num_experts",
    ),
    "experts without sp": (
        Topology(dp=2, tp=2, ep=2), EXPERTS, {"sp": False},
        "tp=2 with experts and sp=false: all TP ranks would route the same tokens\n\n"
        "hint: set sp to true, or tp to 1",
    ),
    "layers": (
        Topology(dp=1, pp=9), SHAPE, {"gradient_accumulation_steps": 9},
        "pp=9 makes 9 stages, and the model has 8 layers\n\nhint: a stage has at least one layer: set pp to at most 8",
    ),
    "layers of interleaved stages": (
        Topology(dp=1, pp=4), SHAPE, {"gradient_accumulation_steps": 4, "schedule": "interleaved", "stages_per_rank": 3},
        "pp=4 x stages_per_rank=3 makes 12 stages, and the model has 8 layers\n\n"
        "hint: a stage has at least one layer: set pp to at most 2; or lower stages_per_rank",
    ),
    "micro-batches": (
        Topology(dp=1, pp=4), SHAPE, {"gradient_accumulation_steps": 2},
        "gradient_accumulation_steps=2 is less than pp=4: with fewer micro-batches than stages, some stages would always be "
        "idle\n\n"
        "hint: set gradient_accumulation_steps to 4 or more; or lower pp",
    ),
    "rounds of micro-batches": (
        Topology(dp=1, pp=4), SHAPE, {"gradient_accumulation_steps": 6, "schedule": "interleaved", "stages_per_rank": 2},
        "gradient_accumulation_steps=6 is not a multiple of pp=4, which schedule 'interleaved' needs\n\n"
        "hint: set gradient_accumulation_steps to 4 or 8; or schedule to '1f1b'",
    ),
    "nothing to interleave": (
        Topology(dp=1, pp=2), SHAPE, {"gradient_accumulation_steps": 2, "schedule": "interleaved"},
        "schedule 'interleaved' with stages_per_rank=1: there is nothing to interleave\n\n"
        "hint: set stages_per_rank to 2 or more; or schedule to '1f1b'",
    ),
    "stages that 1f1b has not": (
        Topology(dp=1, pp=2), SHAPE, {"gradient_accumulation_steps": 2, "stages_per_rank": 2},
        "stages_per_rank=2 does not apply to schedule '1f1b', which has one stage per rank\n\n"
        "hint: set stages_per_rank to 1; or schedule to 'interleaved' or 'zero-bubble'",
    ),
    "stages without a pipeline": (
        Topology(dp=1), SHAPE, {"stages_per_rank": 2},
        "stages_per_rank=2 does not apply to pp=1, which has one stage\n\nhint: set stages_per_rank to 1; or pp to 2 or more",
    ),
    "a schedule without a pipeline": (
        Topology(dp=1), SHAPE, {"schedule": "interleaved", "stages_per_rank": 2},
        "schedule 'interleaved' does not apply to pp=1, which has one stage\n\n"
        "hint: leave schedule at '1f1b', or set pp to 2 or more",
    ),
    "no sp without tp": (
        Topology(dp=2), SHAPE, {"sp": False}, "sp=false does not apply to tp=1\n\nhint: leave sp out, or set tp to 2 or more",
    ),
    "schedule": (
        Topology(dp=1, pp=2), SHAPE, {"schedule": "gpipe"},
        "schedule 'gpipe' is not known\n\nhint: choose one of 1f1b, interleaved, zero-bubble",
    ),
    "no micro-batch": (
        Topology(dp=1), SHAPE, {"gradient_accumulation_steps": 0},
        "gradient_accumulation_steps=0, stages_per_rank=1: both must be at least 1\n\nhint: set both to 1 or more",
    ),
    "nodes that split tp": (
        Topology(dp=6, tp=4), SHAPE, {"ranks_per_node": 6},
        "a TP group crosses nodes of 6 ranks: ranks 4-7, since tp=4 does not divide 6\n\n"
        "hint: set tp to 1, 2, 3 or 6; or, if a fast link joins several nodes, set ranks_per_node to the number of ranks joined",
    ),
    "tp larger than a node": (
        Topology(dp=2, tp=4), SHAPE, {"ranks_per_node": 2},
        "a TP group crosses nodes of 2 ranks: ranks 0-3, since tp=4 is more than 2\n\n"
        "hint: set tp to 1 or 2; or, if a fast link joins several nodes, set ranks_per_node to the number of ranks joined",
    ),
    "an order that splits tp": (
        Topology(dp=8, tp=2, order="dp-cp-ep-tp-pp"), SHAPE, {"ranks_per_node": 8},
        'a TP group crosses nodes of 8 ranks: ranks 0,8, by order "dp-cp-ep-tp-pp"\n\n'
        "hint: put tp first in the order: tp has the most traffic",
    ),
    "nodes that the world does not fill": (
        Topology(dp=8, tp=2), SHAPE, {"ranks_per_node": 6},
        "nodes of 6 ranks do not make a world of 16\n\n"
        "hint: set ranks_per_node to 1, 2, 4, 8 or 16, or start a multiple of 6 ranks",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_topologies(case):
    topology, model, options, text = WRONG[case]
    with pytest.raises(SpecError) as error:
        check_model(topology, model, **options)
    assert str(error.value) == text


@pytest.mark.parametrize(
    ("case", "axis"),
    [("query heads", "tp"), ("KV heads", "tp"), ("ffn", "tp"), ("ep and the experts", "ep"), ("layers", "pp")],
)
def test_every_degree_that_a_hint_names_fits(case, axis):
    topology, model, options, text = WRONG[case]
    degrees = {name: getattr(topology, name) for name in ("dp", "tp", "pp", "cp", "ep")}
    named = re.search(r"(?:set it to|at most) ([\d, or]+)", text)[1]
    for degree in map(int, re.findall(r"\d+", named)):
        check_model(Topology(**degrees | {axis: degree}), model, **options)


@pytest.mark.parametrize(
    ("topology", "model", "options"),
    [
        (Topology(dp=2, tp=2, cp=2, pp=2), SHAPE, {"gradient_accumulation_steps": 2, "ranks_per_node": 8}),
        (Topology(dp=1, tp=2, cp=4), SHAPE, {"route": "ulysses"}),
        (Topology(dp=1, tp=4, cp=4), SHAPE, {"route": "usp", "inner": 2}),
        (Topology(dp=1, tp=4, cp=4), SHAPE, {"route": "auto"}),
        (Topology(dp=1, tp=4, cp=4), SHAPE, {"route": "usp"}),
        (Topology(dp=2, cp=2, ep=4), EXPERTS, {}),
        (Topology(dp=2, tp=2, ep=2), EXPERTS, {}),
        (Topology(dp=2, tp=2), SHAPE, {"sp": False}),
        (Topology(dp=1, pp=8), SHAPE, {"gradient_accumulation_steps": 9}),
        (
            Topology(dp=1, pp=2),
            SHAPE,
            {"gradient_accumulation_steps": 4, "schedule": "interleaved", "stages_per_rank": 4},
        ),
        (Topology(dp=1, pp=2), SHAPE, {"gradient_accumulation_steps": 2, "schedule": "zero-bubble"}),
        (Topology(dp=1, tp=4), SHAPE, {"ranks_per_node": 8}),
    ],
)
def test_what_fits_is_let_through(topology, model, options):
    assert check_model(topology, model, **options) is None
