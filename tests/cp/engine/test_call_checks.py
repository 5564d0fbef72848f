"""What an attention call refuses, on every rank, before anything moves."""

from unittest.mock import patch

import pytest
import torch

from longspan.comm.in_memory import MemoryGroup
from longspan.comm.traffic import record
from longspan.cp.attention import attention
from longspan.cp.context import ContextParallel
from longspan.cp.engine import call_checks as checks
from longspan.cp.engine.call_checks import check_together
from longspan.cp.engine.executor import Share
from longspan.errors import SpecError
from longspan.plan import Layout, Mask, plan_attention
from tests.oracle import raised
from tests.ranks import run_ranks, run_threads

S = 12


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype)


Q, K = zeros(1, 4, S, 8), zeros(1, 2, S, 8)
REFUSED = {
    "three dims": (
        (Q[0], K[0], K[0], {}),
        "q (4, 12, 8), k (2, 12, 8), v (2, 12, 8): attention takes 4-D tensors (batch, heads, slots, head_dim)",
    ),
    "slots": (
        (Q[:, :, :6], K[:, :, :6], K[:, :, :6], {}),
        "q (1, 4, 6, 8), k (1, 2, 6, 8), v (1, 2, 6, 8): rank 0 of the plan holds 12 of 12 tokens\n\n"
        "hint: shard q, k, v by the plan's layout; dim 2 is the sequence",
    ),
    "slots of keys alone": (
        (Q, K[:, :, :6], K, {}),
        "q (1, 4, 12, 8), k (1, 2, 6, 8), v (1, 2, 12, 8): rank 0 of the plan holds 12 of 12 tokens\n\n"
        "hint: shard q, k, v by the plan's layout; dim 2 is the sequence",
    ),
    "heads and slots exchanged": (
        (Q.transpose(1, 2), K.transpose(1, 2), K.transpose(1, 2), {}),
        "q (1, 12, 4, 8), k (1, 12, 2, 8), v (1, 12, 2, 8): rank 0 of the plan holds 12 of 12 tokens\n\n"
        "hint: shard q, k, v by the plan's layout; dim 2 is the sequence",
    ),
    "batch": (
        (Q.expand(2, -1, -1, -1), K, K, {}),
        "q (2, 4, 12, 8), k (1, 2, 12, 8), v (1, 2, 12, 8): batch sizes, KV heads of k and v, and head dims of q and "
        "k must agree",
    ),
    "KV heads": (
        (Q, K, zeros(1, 1, S, 8), {}),
        "q (1, 4, 12, 8), k (1, 2, 12, 8), v (1, 1, 12, 8): batch sizes, KV heads of k and v, and head dims of q and "
        "k must agree",
    ),
    "head dim": (
        (Q, K[..., :4], K, {}),
        "q (1, 4, 12, 8), k (1, 2, 12, 4), v (1, 2, 12, 8): batch sizes, KV heads of k and v, and head dims of q and "
        "k must agree",
    ),
    "heads not divisible": (
        (zeros(1, 9, S, 8), K, K, {}),
        "9 query heads are not divisible by 2 KV heads\n\nhint: KV heads may be one of 1, 3, 9",
    ),
    "types": (
        (Q, K.double(), K, {}),
        "q is torch.float32 on cpu, k torch.float64 on cpu, v torch.float32 on cpu: dtypes and devices differ",
    ),
    "sink": (
        (Q, K, K, {"sink": zeros(2)}),
        "sink has shape (2,); it needs one logit for each of 4 query heads",
    ),
    "sink of another rank": (
        (Q, K, K, {"sink": zeros(1, 4)}),
        "sink has shape (1, 4); it needs one logit for each of 4 query heads",
    ),
    "unknown kernel": (
        (Q, K, K, {"kernel": "flash9"}),
        "kernel 'flash9' is not known\n\nhint: choose one of auto, flash3, cudnn, sdpa, flash2, efficient, flex, reference",
    ),
    "scale of nothing": (
        (Q, K, K, {"scale": 0.0}),
        "scale=0.0 is not a positive number\n\nhint: for a negative scale, negate q",
    ),
    "negative scale": (
        (Q, K, K, {"scale": -0.5}),
        "scale=-0.5 is not a positive number\n\nhint: for a negative scale, negate q",
    ),
    "kernel that cannot": (
        (Q, K, K[..., :4], {"kernel": "sdpa"}),
        "kernel 'sdpa' cannot compute this call: keys have dim 8 and values 4; flash attention takes equal dims\n\n"
        'hint: set kernel="auto"',
    ),
    "not floating": (
        (Q.long(), K.long(), K.long(), {}),
        "kernel 'reference' cannot compute this call: torch.int64 is not a floating-point dtype\n\nhint: set kernel=\"auto\"",
    ),
}


@pytest.mark.parametrize("agreed", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, agreed):
    (q, k, v, how), text = REFUSED[name]
    plan = plan_attention(Layout.contiguous(S, 1), Mask.causal(S))
    if agreed:
        attention(Q, K, K, plan=plan)
    with record() as calls, pytest.raises(SpecError) as error:
        attention(q, k, v, plan=plan, **how)
    assert str(error.value) == text
    assert calls == []


def test_heads_that_the_plan_was_not_made_for():
    plan = plan_attention(Layout.contiguous(S, 1), Mask.causal(S), heads=(8, 2))
    with pytest.raises(SpecError) as error:
        attention(Q, K, K, plan=plan)
    assert str(error.value) == (
        "q and k have (4, 2) (query, KV) heads; the plan was made for (8, 2)\n\nhint: make the plan with heads=(4, 2)"
    )


def _one_is_wrong(group, rank):
    plan = plan_attention(Layout.contiguous(S, 3), Mask.causal(S))
    q, k = zeros(1, 4, 4, 8), zeros(1, 2, 4, 8)
    if rank == 1:
        k = zeros(1, 3, 4, 8)
    with record() as calls:
        return raised(attention, q, k, k, plan=plan, group=group), calls


def test_a_wrong_tensor_of_one_rank_is_an_error_on_all():
    text = "4 query heads are not divisible by 3 KV heads\n\nhint: KV heads may be one of 1, 2, 4"
    right = [("DisagreementError", f"rank 1 failed: {text}") for _ in range(3)]
    right[1] = ("SpecError", text)
    assert run_ranks(3, _one_is_wrong) == [(error, []) for error in right]


def _differ(group, rank, plans, shapes, scales):
    q, k, dtype = shapes[rank]
    tensors = (zeros(*q, dtype=dtype), zeros(*k, dtype=dtype), zeros(*k, dtype=dtype))
    with record() as calls:
        return raised(attention, *tensors, plan=plans[rank], group=group, scale=scales[rank]), calls


SHAPES = ((1, 4, 4, 8), (1, 2, 4, 8), torch.float32)
LAYOUT = Layout.contiguous(S, 3)
CAUSAL = plan_attention(LAYOUT, Mask.causal(S))


@pytest.mark.parametrize(
    ("plans", "shapes", "scales", "named"),
    [
        (
            [CAUSAL, CAUSAL, plan_attention(LAYOUT, Mask.full(S))],
            [SHAPES] * 3, [None] * 3, "plans: rank 2 differ from rank 0",
        ),
        (
            [plan_attention(Layout.zigzag(S, 3), Mask.causal(S)), CAUSAL, CAUSAL],
            [SHAPES] * 3, [None] * 3, "plans: rank 0 differ from rank 1",
        ),
        (
            [plan_attention(LAYOUT, Mask.documents(lengths)) for lengths in ([5, 7], [6, 6], [5, 7])],
            [SHAPES] * 3, [None] * 3, "plans: rank 1 differ from rank 0",
        ),
        (
            [CAUSAL] * 3, [SHAPES, SHAPES, ((1, 4, 4, 8), (1, 2, 4, 8), torch.float64)], [None] * 3,
            "shapes, types, scales or changes of scores: rank 2 differ from rank 0",
        ),
        (
            [CAUSAL] * 3, [SHAPES, ((1, 4, 4, 8), (1, 4, 4, 8), torch.float32), SHAPES], [None] * 3,
            "shapes, types, scales or changes of scores: rank 1 differ from rank 0",
        ),
        ([CAUSAL] * 3, [SHAPES] * 3, [None, None, 0.5], "shapes, types, scales or changes of scores: rank 2 differ from rank 0"),
    ],
)  # fmt: skip
def test_ranks_that_differ_are_named_on_all_before_any_exchange(plans, shapes, scales, named):
    for error, calls in run_ranks(3, _differ, plans, shapes, scales):
        assert error == (
            "DisagreementError",
            f"the ranks of one context-parallel group were given different {named}\n\n"
            "hint: give all ranks of a CP group the same options and samples: key the loader by the data-parallel rank alone",
        )
        assert calls == []


def _on_cuda(group, rank, calls):
    """Kinds of calls one after the other, as on CUDA; the error of each."""
    share = Share.of(plan_attention(Layout.contiguous(S, 2), Mask.causal(S)), rank, group, "auto")
    agreed: set[str] = set()
    return [raised(check_together, share, agreed, torch.device("cuda"), kind[rank], None) for kind in calls]


def test_on_cuda_each_kind_of_call_is_compared_once():
    """The host runs ahead of the device there: a kind that has been compared is not compared again, another one is."""
    same = [(kind, kind) for kind in ("a kind", "a kind", "another", "another", "a kind")]
    with patch.object(checks, "check_agreement", side_effect=checks.check_agreement) as compare:
        assert run_threads(2, _on_cuda, same) == [[("", "")] * 5] * 2
    assert compare.call_count == 2 * 2
    for errors in run_threads(2, _on_cuda, [("a kind", "a kind"), ("another", "a third")]):
        assert errors[0] == ("", "")
        assert errors[1][0] == "DisagreementError"
        assert "shapes, types, scales or changes of scores: rank 1 differ from rank 0" in errors[1][1]


def _many_batches(group, rank):
    """Calls of three micro-batches with other documents, two layers each, as on CUDA."""
    cp = ContextParallel(group, heads=(4, 2))
    compared = []

    def compare(group, what, problem=None):
        compared.append(sorted(what))

    for lengths in ([5, 7], [6, 6], [1, 11]):
        with patch.object(checks, "check_agreement", compare), cp.sequence(Mask.documents(lengths)) as seq:
            for _ in range(2):
                ref = seq._shares["full"]
                check_together(ref.share, ref.agreed, torch.device("cuda"), "a kind", None)
    return compared


def test_on_cuda_plans_are_compared_with_the_batch_and_not_again_in_its_first_layer():
    assert run_threads(1, _many_batches) == [[["plans", "shapes, types, scales or changes of scores"]]]


def _late_problem(group, rank):
    share = Share.of(plan_attention(Layout.contiguous(S, 2), Mask.causal(S)), rank, group, "auto")
    agreed: set[str] = set()
    check_together(share, agreed, torch.device("cuda"), "a kind", None)
    problem = SpecError("9 heads") if rank == 1 else None
    return raised(check_together, share, agreed, torch.device("cuda"), "a kind", problem)


def test_on_cuda_a_problem_in_a_later_call_is_raised_where_it_is_alone():
    """What `attention` says of CUDA: the ranks do not compare again, so the others go on, to their communicator's timeout."""
    assert run_threads(2, _late_problem) == [("", ""), ("SpecError", "9 heads")]


def _other_masks(group, rank):
    """Of one sequence with two masks, rank 0 attends by the one and rank 1 by the other, as on CUDA."""
    cp = ContextParallel(group, heads=(4, 2))
    with cp.sequence({"full": Mask.causal(S), "window": Mask.causal(S, window=3)}) as seq:
        shares = seq._shares
    both = [check_together(ref.share, ref.agreed, torch.device("cuda"), "a kind", None) for ref in shares.values()]
    assert both == [None, None]
    fresh: set[str] = set()
    ref = shares[("full", "window")[rank]]
    return raised(check_together, ref.share, fresh, torch.device("cuda"), "a kind", None)


def test_ranks_that_attend_by_other_masks_of_a_sequence():
    """The plan of a mask is compared with the batch; the kind of a call says whose it is."""
    for kind, text in run_threads(2, _other_masks):
        assert kind == "DisagreementError"
        assert "plans: rank 1 differ from rank 0" in text


def test_on_cuda_a_group_is_connected_before_its_first_hop():
    """By all ranks, once: some have nothing to send, and NCCL connects a group in its first operation."""
    with patch.object(MemoryGroup, "connect") as connect:
        run_threads(2, _on_cuda, [("a kind", "a kind"), ("another", "another")])
    assert connect.call_count == 2
