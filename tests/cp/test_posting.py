"""Batches of a communicator finish in the order in which ranks posted them, as on NCCL: nobody waits in a circle."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longspan.comm.matching import Batch
from longspan.errors import CommError
from longspan.kernels.choice import KERNELS
from longspan.plan import Layout, Mask, direct, plan_attention, ring
from tests.examples import examples
from tests.plan.strategies import (
    HEAD_COUNTS,
    HEADS_MOVE,
    INNER_HEADS,
    OUTER_HEADS,
    ROWS_MOVE,
    factored,
    layout_and_mask,
)
from tests.posting import Layer, NoKernel, play, scripts_of
from tests.ranks import run_threads

from .cases import Case, check_in_memory

ROUTES = tuple(route for route in ROWS_MOVE + HEADS_MOVE + INNER_HEADS + OUTER_HEADS if route != "upipe")


@pytest.fixture(autouse=True)
def _no_kernel():
    with patch.dict(KERNELS, none=NoKernel()):
        yield


def once(recorder, layer):
    layer.forward()
    layer.backward()


def two_layers(recorder, layer):
    """Two layers recomputed in backward, while a wrapper gathers the next layer's weights on a communicator of its own and
    scatters gradients behind each: posted before attention, awaited after it."""

    def collective(name):
        return recorder.write("weights", Batch(recorder.rank, collective=name))

    gathered = collective("gather 0")
    for number in (0, 1):
        gathered.wait()
        gathered = collective(f"gather {number + 1}")
        layer.forward()
    scattered = []
    for number in (1, 0):
        gathered.wait()
        gathered = collective(f"gather again {number}")
        layer.forward()
        layer.backward()
        scattered.append(collective(f"scatter {number}"))
    for work in (gathered, *scattered):
        work.wait()


@st.composite
def some_plans(draw):
    """Any route, degrees 2 to 16, layout and mask; packed documents most of the time, which leave most stages idle."""
    degrees = (2, 3, 4, 5, 6, 8, 12, 16)
    route, ranks, inner, heads = draw(factored(ROUTES, degrees, (*HEAD_COUNTS, (16, 4), (5, 1))))
    if draw(st.integers(0, 3)):
        lengths = draw(st.lists(st.integers(1, 3 * ranks), min_size=1, max_size=12))
        mask = Mask.documents(lengths, window=draw(st.none() | st.integers(1, 9)))
        layout = Layout.named(
            draw(st.sampled_from(["zigzag", "balanced", "contiguous"])), mask.seq_len, ranks, masks=[mask]
        )
    else:
        layout, mask = draw(layout_and_mask(1, 60, (ranks,), with_slots=True))
    return plan_attention(layout, mask, route, heads, inner), heads


@examples(60)
@given(some_plans())
def test_no_rank_waits_in_a_circle(case):
    plan, heads = case
    assert play(scripts_of(plan, heads, once)) == ""


@examples(30)
@given(some_plans(), st.booleans())
def test_nor_among_layers_recomputation_and_the_gathers_of_a_wrapper(case, one_queue):
    plan, heads = case
    assert play(scripts_of(plan, heads, two_layers), one_queue=one_queue) == ""


@examples(150)
@given(some_plans())
def test_both_ends_of_a_message_belong_to_one_stage(case):
    """The rule from which the rest follows: ranks post in the order of stages, and no message joins two of them."""
    plan, _ = case
    shares = [plan.rank_plan(rank) for rank in range(plan.ranks)]
    sent, awaited = [], []
    for share in shares:
        for stage in share.stages:
            number = stage.number
            sent += [("rows", number, share.rank, share.ranks[t.peer], t.rows) for t in stage.sends]
            awaited += [("home", number, share.ranks[t.peer], share.rank, t.rows) for t in stage.home_recvs]
            for step in stage.steps:
                ends = (("rows", number - 1, step.recv, awaited), ("grad", number - 1, step.grad_recv, awaited))
                for kind, posted, t, into in (
                    *ends,
                    ("grad", number, step.grad_send, sent),
                    ("home", number, step.home_send, sent),
                ):
                    if t is not None:
                        pair = (share.rank, share.ranks[t.peer])
                        into.append((kind, posted, *(pair if into is sent else pair[::-1]), t.rows))
    assert sorted(sent) == sorted(awaited)


SMALLEST = plan_attention(Layout.zigzag(8, 4), Mask.documents([2, 4, 2]))
"""Four ranks of which each pair exchanges something at one distance and nothing at others."""


def dropping(stages):
    """Stages without any idle one: what the ring did, which deadlocked."""
    first, *others = stages
    return (first, *(stage for stage in others if not stage.idle))


def test_the_smallest_case():
    check_in_memory(4, [Case(SMALLEST.layout, SMALLEST.mask, heads) for heads in ((4, 4), (4, 2), (4, 1))])


def _run(group, rank, plan):
    layer = Layer(plan, group, rank, "none", (1, 1))
    layer.forward()
    layer.backward()
    return True


def test_a_ring_without_its_idle_stages_is_caught():
    plans = [(Layout.zigzag(8, 4), Mask.documents([2, 4, 2]))]
    plans += [
        (Layout.named(name, 32, 4, masks=[mask]), mask)
        for name in ("zigzag", "balanced")
        for mask in [Mask.documents([9, 8, 7, 8])]
    ]
    stuck = []
    with patch.object(ring, "in_step", dropping), patch.object(direct, "in_step", dropping):
        for layout, mask in plans:
            scripts = scripts_of(plan_attention(layout, mask), (1, 1), once)
            stuck.append(play(scripts))
            # Small messages that need no receiver hide the fault.
            assert play(scripts_of(plan_attention(layout, mask), (1, 1), once), buffered=1 << 20) == ""
        with pytest.raises(CommError, match="deadlock: rank 0 waits for") as error:
            run_threads(4, _run, plan_attention(*plans[0]))
    assert "rank 0 waits for [1]" in stuck[0]
    assert all(f"rank {rank} waits for" in str(error.value) for rank in range(4))


@pytest.mark.parametrize("route", [*ROWS_MOVE, "ulysses", "usp", "ulysses-ring"])
@pytest.mark.parametrize("comm_dtype", [None, "bf16"])
def test_every_buffer_is_on_the_device(route, comm_dtype):
    """The executor on tensors of another device than the CPU's, over a transport that refuses all others: a rank that has
    nothing to send gives an empty buffer there too, of the type of the others' messages."""
    heads, mask = (8, 4), Mask.documents([3, 9, 1, 4])
    plan = plan_attention(
        Layout.zigzag(17, 4), mask, route, heads, 2 if "usp" in route or "-" in route else None, comm_dtype=comm_dtype
    )
    assert run_threads(4, _on_meta, plan, heads, device="meta") == [True] * 4


def _on_meta(group, rank, plan, heads):
    layer = Layer(plan, group, rank, "none", heads, device="meta")
    layer.forward()
    layer.backward()
    assert layer.like.device == torch.device("meta")
    return True
