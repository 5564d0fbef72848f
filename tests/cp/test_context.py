"""`ContextParallel`: one layout for all tensors of a batch, masks by name, disagreement found before an exchange."""

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from longspan.advise import Planner
from longspan.comm.traffic import record
from longspan.cp.context import ContextParallel
from longspan.errors import SpecError
from longspan.names import LAYOUTS
from longspan.plan import Mask
from tests.oracle import Inputs, dense_attention, make_inputs, raised, relative_error
from tests.plan.strategies import NAMES as LAYOUTS_WITHOUT_MASKS
from tests.ranks import run_ranks


def opened(cp, mask, ids=None):
    with cp.sequence(mask, ids) as sequence:
        return sequence


@pytest.mark.parametrize(
    ("how", "text"),
    [
        (
            {"comm_dtype": torch.float16},
            "comm_dtype 'torch.float16' is not known\n\n"
            "hint: choose one of bf16, fp8, or leave comm_dtype out to send rows in their own dtype",
        ),
        (
            {"route": "ulysses"},
            "route 'ulysses' exchanges heads, but heads is not given\n\nhint: set heads=(query, KV)",
        ),
        (
            {"route": "auto", "inner": 2},
            "inner=2 does not apply to route 'auto', which chooses the inner degree\n\nhint: leave inner out",
        ),
        ({"inner": 2}, "inner=2 does not apply to route 'ring', which has one level\n\nhint: leave inner out"),
        (
            {"layout": "spiral"},
            f"layout 'spiral' is not known\n\nhint: choose one of {', '.join(LAYOUTS)}",
        ),
        (
            {"route": "tube"},
            "route 'tube' is not known\n\nhint: choose one of auto, ring, allgather, rotate, exchange, ulysses, upipe, usp, "
            "allgather-ulysses, exchange-ulysses, ulysses-ring",
        ),
        (
            {"heads": (9, 2)},
            "9 query heads are not divisible by 2 KV heads\n\nhint: KV heads may be one of 1, 3, 9",
        ),
        ({"pad_to_multiple_of": 0}, "pad_to_multiple_of=0 must be at least 1"),
    ],
)
def test_refused_when_it_is_made(how, text):
    with pytest.raises(SpecError) as error:
        ContextParallel(None, **how)
    assert str(error.value) == text


def test_a_group_that_is_none():
    with pytest.raises(SpecError, match="str is neither a process group nor a DeviceMesh"):
        ContextParallel("cp")
    with pytest.raises(TypeError, match="unexpected keyword argument 'dropout_p'"):
        ContextParallel(None, dropout_p=0.1)


def test_masks_over_other_numbers_of_tokens():
    cp = ContextParallel(None)
    with pytest.raises(SpecError) as error:
        opened(cp, {"full": Mask.causal(8), "window": Mask.causal(9, window=2)})
    assert str(error.value) == (
        "the masks of a batch cover different numbers of tokens: {'full': 8, 'window': 9}\n\n"
        "hint: give masks with the same seq_len"
    )
    with pytest.raises(SpecError, match=r"the masks of a batch cover different numbers of tokens: \{\}"):
        opened(cp, {})


def test_a_mask_must_be_named_where_there_are_several():
    q, k, v, _ = make_inputs(8)
    sequence = opened(ContextParallel(None), {"full": Mask.causal(8), "window": Mask.causal(8, window=2)})
    for name in (None, "wide"):
        with pytest.raises(SpecError) as error:
            sequence.attention(q, k, v, mask=name)
        assert str(error.value) == (f"mask {name!r} is not a mask of this sequence\n\nhint: choose one of full, window")
    with pytest.raises(TypeError, match="unexpected keyword argument 'dropout_p'"):
        sequence.attention(q, k, v, mask="full", dropout_p=0.1)


def test_one_mask_needs_no_name_and_is_called_full():
    inputs = make_inputs(8)
    sequence = opened(ContextParallel(None), Mask.causal(8))
    want = dense_attention(inputs, Mask.causal(8)).out
    for how in ({}, {"mask": "full"}):
        assert relative_error(sequence.attention(*inputs[:3], **how), want) < 1e-12
    window = opened(ContextParallel(None), {"window": Mask.causal(8, window=3)})
    right = dense_attention(inputs, Mask.causal(8, window=3)).out
    assert relative_error(window.attention(*inputs[:3]), right) < 1e-12


def _without_a_group(group, rank):
    return raised(ContextParallel, None)


def test_a_group_must_be_named_in_a_world_of_several_ranks():
    text = "no group was given in a world of 2 ranks\n\nhint: give dist.group.WORLD, or the context-parallel axis of the mesh"
    assert run_ranks(2, _without_a_group) == [("SpecError", text)] * 2


def _wrong_on_rank_1(group, rank):
    cp = ContextParallel(group)
    return raised(opened, cp, None if rank == 1 else Mask.causal(8))


def test_any_error_of_one_rank_is_heard_by_all():
    (other, told), (own, _) = run_ranks(2, _wrong_on_rank_1)
    assert (other, own) == ("DisagreementError", "AttributeError")
    assert told.startswith("rank 1 failed: ")


def test_a_copy_of_a_model_talks_over_the_same_group():
    cp = ContextParallel(None)
    assert copy.deepcopy({"cp": cp})["cp"] is cp


def test_an_unknown_kernel():
    with pytest.raises(SpecError, match="kernel 'flash9' is not known"):
        ContextParallel(None, kernel="flash9")


def _shards(group, rank):
    cp = ContextParallel(group, pad_to_multiple_of=3)
    sequence = opened(cp, Mask.documents([4, 4]))
    ids = torch.arange(8)[None] + 10
    local = sequence.shard(
        {
            "input_ids": ids,
            "labels": torch.cat((ids[:, 1:], torch.tensor([[-100]])), 1),
            "position_ids": (torch.arange(8) % 4).expand(3, 1, 8),
            "mask": torch.ones(1, 8, dtype=torch.bool),
        },
        dim={"input_ids": 1, "labels": 1, "position_ids": -1, "mask": 1},
    )
    twice = raised(sequence.shard, {"input_ids": local["input_ids"]}, 1)
    wrong = raised(sequence.shard, torch.zeros(32, 4), 0)
    one = raised(sequence.shard, torch.zeros(1, 8), {"x": 1})
    assert torch.equal(sequence.shard(ids, dim=1), local["input_ids"])
    assert torch.equal(sequence.shard(ids, dim=-1), local["input_ids"])
    whole = sequence.unshard(local["input_ids"], dim=1)
    assert torch.equal(whole, ids)
    hidden = torch.ones(1, sequence.layout.num_slots(rank), requires_grad=True)
    (sequence.unshard(hidden, dim=1) * torch.arange(8.0)).sum().backward()
    return {name: x.tolist() for name, x in local.items()}, (twice, wrong, one), hidden.grad.tolist()


def test_shard_fills_dead_slots_by_name():
    (first, refusals, first_grad), (second, _, second_grad) = run_ranks(2, _shards)
    # Zigzag: rank 0 holds 0, 1, 6, 7 and two dead slots, rank 1 the rest.
    assert first["input_ids"] == [[10, 11, 16, 17, 0, 0]]
    assert first["labels"] == [[11, 12, 17, -100, -100, -100]]
    assert first["position_ids"] == [[[0, 1, 2, 3, -1, -1]]] * 3
    assert first["mask"] == [[True] * 4 + [False] * 2]
    assert second["input_ids"] == [[12, 13, 14, 15, 0, 0]]
    assert second["labels"] == [[13, 14, 15, 16, -100, -100]]
    assert (first_grad, second_grad) == ([[0, 1, 6, 7, 0, 0]], [[2, 3, 4, 5, 0, 0]])
    hint = "\n\nhint: give the global tensor; this tensor may be sharded already, or have its sequence in another dim"
    assert refusals == (
        ("SpecError", f"dim 1 of a tensor of shape (1, 6) has 6 rows; the sequence has 8 tokens{hint}"),
        ("SpecError", f"dim 0 of a tensor of shape (32, 4) has 32 rows; the sequence has 8 tokens{hint}"),
        ("SpecError", "dim={'x': 1} for one tensor is not an integer\n\nhint: give dim as an integer"),
    )


def test_slots_are_a_multiple():
    for multiple, slots in ((None, [3, 4]), (1, [4, 4]), (4, [4, 4]), (5, [5, 5]), (64, [64, 64])):
        layout = Planner(2, pad_to_multiple_of=multiple).layout_of({"full": Mask.causal(7)})
        assert [layout.num_slots(rank) for rank in range(2)] == slots


MASKS = {"full": Mask.documents([9, 12]), "window": Mask.documents([9, 12], window=4)}


def _two_masks(group, rank, layout, as_mesh):
    cp = ContextParallel(init_device_mesh("cpu", (2,)) if as_mesh else group, layout=layout, heads=(4, 2))
    results = {}
    with cp.sequence(MASKS) as sequence:
        for name in MASKS:
            inputs = make_inputs(21)
            q, k, v = (sequence.shard(x, dim=2).requires_grad_() for x in inputs[:3])
            out = sequence.unshard(sequence.attention(q, k, v, mask=name, scale=0.2), dim=2)
            results[name] = [out.detach(), q, k, v, (out * inputs.dout).sum()]
    # Backward runs outside the context that ran forward, and in another order.
    for name in reversed(MASKS):
        results[name].pop().backward()
        with torch.no_grad():
            results[name][1:] = [sequence.unshard(x.grad, dim=2) for x in results[name][1:]]
    return results


@pytest.mark.parametrize("as_mesh", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS_WITHOUT_MASKS)
def test_two_masks_over_one_layout(layout, as_mesh):
    for results in run_ranks(2, _two_masks, layout, as_mesh):
        for name, mask in MASKS.items():
            for got, want in zip(results[name], dense_attention(make_inputs(21), mask, 0.2), strict=False):
                assert relative_error(got, want) < 1e-12


def _disagree(group, rank, masks, ids, how):
    cp = ContextParallel(group, **how[rank])
    with record() as calls:
        return raised(opened, cp, masks[rank], ids[rank]), len(calls)


CAUSAL, IDS = Mask.causal(12), torch.arange(12)


@pytest.mark.parametrize(
    ("masks", "ids", "how", "named"),
    [
        (
            [CAUSAL, Mask.documents([6, 6]), CAUSAL], [None] * 3, [{}] * 3,
            "layouts, masks or routes: rank 1 differ from rank 0",
        ),
        (
            [CAUSAL] * 3, [None] * 3, [{"layout": "striped"}, {}, {}],
            "layouts, masks or routes: rank 0 differ from rank 1",
        ),
        (
            [{"full": CAUSAL}, {"full": CAUSAL}, {"window": CAUSAL}], [None] * 3, [{}] * 3,
            "layouts, masks or routes: rank 2 differ from rank 0",
        ),
        (
            [{"full": CAUSAL, "window": Mask.causal(12, w)} for w in (3, 3, 4)], [None] * 3, [{}] * 3,
            "layouts, masks or routes: rank 2 differ from rank 0",
        ),
        ([CAUSAL] * 3, [IDS, IDS, IDS.flip(0)], [{}] * 3, "token ids: rank 2 differ from rank 0"),
        ([CAUSAL] * 3, [IDS, None, IDS], [{}] * 3, "token ids: rank 1 differ from rank 0"),
    ],
)  # fmt: skip
def test_ranks_that_differ_are_named_on_all(masks, ids, how, named):
    for error, calls in run_ranks(3, _disagree, masks, ids, how):
        assert error == (
            "DisagreementError",
            f"the ranks of one context-parallel group were given different {named}\n\n"
            "hint: give all ranks of a CP group the same options and samples: key the loader by the data-parallel rank alone",
        )
        assert calls == 0


def test_a_sequence_that_one_rank_cannot_lay_out_is_an_error_on_all():
    wrong = {"full": CAUSAL, "window": Mask.causal(11)}
    text = (
        "the masks of a batch cover different numbers of tokens: {'full': 12, 'window': 11}\n\n"
        "hint: give masks with the same seq_len"
    )
    errors = [error for error, _ in run_ranks(3, _disagree, [CAUSAL, CAUSAL, wrong], [IDS] * 3, [{}] * 3)]
    assert errors == [("DisagreementError", f"rank 2 failed: {text}")] * 2 + [("SpecError", text)]


def _agree(group, rank):
    cp = ContextParallel(group)
    return raised(opened, cp, CAUSAL, IDS), raised(opened, cp, Mask.causal(12), IDS + 0)


def test_ranks_that_agree_go_on():
    assert run_ranks(3, _agree) == [(("", ""), ("", ""))] * 3


def test_an_error_of_the_user_inside_comes_out_itself():
    with pytest.raises(ZeroDivisionError), ContextParallel(None).sequence(CAUSAL):
        _ = 1 / 0


def test_a_mask_that_comes_again_is_not_planned_again_and_old_plans_go():
    cp = ContextParallel(None)
    first = opened(cp, CAUSAL).plans["full"]
    assert opened(cp, Mask.causal(12)).plans["full"] is first
    for window in range(1, 12):
        opened(cp, Mask.causal(12, window))
    assert opened(cp, CAUSAL).plans["full"] is first
    for length in range(13, 40):
        opened(cp, Mask.causal(length))
    assert opened(cp, CAUSAL).plans["full"] is not first
    assert len(cp._planned) <= 16


def _empty_rank(group, rank):
    cp = ContextParallel(group)
    inputs = Inputs(*(x[:, :, :1] for x in make_inputs(2)))
    with cp.sequence(Mask.causal(1)) as sequence:
        q, k, v = (sequence.shard(x, dim=2) for x in inputs[:3])
        assert q.shape[2] == (1 if rank == 0 else 0)
        return torch.equal(sequence.unshard(sequence.attention(q, k, v), dim=2), inputs.v.repeat_interleave(2, 1))


def test_a_sequence_of_one_token_on_four_ranks():
    assert run_ranks(4, _empty_rank) == [True] * 4


def _on_a_mesh(group, rank):
    S, heads = 22, (4, 2)
    inputs, mask = make_inputs(S, heads), Mask.causal(S)
    want = dense_attention(inputs, mask)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    wide = init_device_mesh("cpu", (1, 4), mesh_dim_names=("outer", "inner"))
    errors = []
    for place, route, how in (
        (mesh, "usp", {}), (mesh, "usp", {"inner": 2}), (mesh, "ulysses-ring", {}), (wide, "usp", {}), (group, "usp", {}),
        (mesh["inner"], "ring", {}), (group, "auto", {}), (group, "exchange-ulysses", {"inner": 1}),
    ):  # fmt: skip
        cp = ContextParallel(place, route=route, heads=heads, **how)
        with cp.sequence(mask) as sequence:
            local = sequence.shard({"q": inputs.q, "k": inputs.k, "v": inputs.v}, dim=2)
            leaves = [x.requires_grad_() for x in local.values()]
            out = sequence.attention(*leaves)
            out.backward(sequence.shard(inputs.dout, dim=2))
            errors.append(relative_error(sequence.unshard(out.detach(), dim=2), want.out))
            errors += [relative_error(x.grad, sequence.shard(g, dim=2)) for x, g in zip(leaves, want[1:4], strict=True)]
    refused = [
        raised(ContextParallel, mesh, route="usp", heads=heads, inner=4),
        raised(ContextParallel, mesh, route="ring", heads=heads),
        raised(ContextParallel, group, route="ulysses", heads=(2, 2), tp=2),
        raised(ContextParallel, group, route="usp", heads=heads, inner=3),
    ]
    return max(errors), refused


def test_routes_of_two_levels_on_a_mesh_of_two_axes():
    for error, refused in run_ranks(4, _on_a_mesh):
        assert error < 1e-10
        assert refused == [
            (
                "SpecError",
                "a mesh of 2 x 2 ranks (outer, inner) was given to a route of 1 x 4\n\n"
                "hint: set inner=2, or give a mesh of that shape",
            ),
            (
                "SpecError",
                "a mesh of 2 axes was given to route 'ring', which has one level\n\n"
                'hint: give one axis, such as mesh["cp"], or a group; or set a route of two levels, such as route="usp"',
            ),
            (
                "SpecError",
                "ulysses degree 4 does not divide 2 query heads (4 before tp=2) (2 KV heads)\n\n"
                "hint: use a ulysses degree of 1 or 2; lower tp; "
                'keep 4 ranks by route="usp" with inner=2 (ulysses inside, ring outside); or route="ring"',
            ),
            ("SpecError", "inner=3 does not divide the 4 ranks of the group\n\nhint: use 1, 2, 4"),
        ]


def _rounded(group, rank):
    S, heads = 40, (4, 2)
    inputs, mask = make_inputs(S, heads, dim=16, dtype=torch.float32), Mask.documents([25, 15])
    found = {}
    for route in ("ring", "exchange", "ulysses", "usp"):
        for comm_dtype in (None, torch.bfloat16, "fp8"):
            cp = ContextParallel(group, route=route, heads=heads, comm_dtype=comm_dtype)
            with cp.sequence(mask) as sequence, record() as calls:
                local = sequence.shard({"q": inputs.q, "k": inputs.k, "v": inputs.v}, dim=2)
                out = sequence.unshard(sequence.attention(*local.values()), dim=2)
            found[route, cp.planner.comm_dtype] = (
                relative_error(out, dense_attention(inputs, mask).out),
                calls[0].bytes_sent,
            )
            assert calls[0].bytes_sent == sequence.plans["full"].bytes(rank, "forward", 16, 4)
    return found


def test_rows_that_travel_rounded():
    for found in run_ranks(2, _rounded):
        for route in ("ring", "exchange", "ulysses", "usp"):
            (exact, all_bytes), (bf16, some_bytes), (fp8, few_bytes) = (found[route, w] for w in (None, "bf16", "fp8"))
            assert exact < 1e-6 < bf16 < 2**-7 < fp8 < 2**-2
            assert all_bytes > some_bytes > few_bytes > 0


def test_a_route_that_makes_its_own_queries_refuses_them():
    q, k, v, _ = make_inputs(8)
    with pytest.raises(SpecError) as error:
        opened(ContextParallel(None, route="upipe", heads=(4, 2)), Mask.causal(8)).attention(q, k, v)
    assert str(error.value) == (
        "route 'upipe' was given q, k and v of all heads, which this route exists to avoid\n\n"
        'hint: pass the layer\'s input to longspan.projected_attention (or UpipeAttention), or set route="ulysses"'
    )
