"""The ring carried out by brute force: each pair once, each row no farther than needed, each gradient home."""

import numpy as np
import pytest
from hypothesis import given

from longspan.plan import Layout, Mask, Tile, Transfer, plan_attention
from longspan.plan.ring import Ring
from tests.examples import examples

from .brute import carry_out, check_transfers, needed_distances, owners
from .strategies import layout_and_mask


@examples(200)
@given(layout_and_mask(with_slots=True))
def test_carried_out_by_brute_force(case):
    layout, mask = case
    plan, dense, P = plan_attention(layout, mask), mask.dense(), layout.ranks
    direction = Ring(layout, mask).direction
    run = carry_out(plan)
    assert np.array_equal(run.pairs, dense)
    assert np.array_equal(run.home, dense)
    assert run.pairs_by_rank == [plan.area(rank) for rank in range(P)]
    check_transfers(plan)

    distances = {d: needed_distances(layout, dense, d) for d in (1, -1)}
    hops = {d: sum(far[-1] for far in distances[d] if far) for d in (1, -1)}
    assert direction == (1 if hops[1] <= hops[-1] else -1)
    owner = owners(layout)
    passing = [[] for _ in range(P)]
    for key, far in enumerate(distances[direction]):
        for hop in range(1, far[-1] + 1 if far else 1):
            passing[(owner[key] + direction * hop) % P].append(key)
    assert [sorted(keys) for keys in run.arrived] == passing
    assert [plan.rows_received(rank) for rank in range(P)] == [len(keys) for keys in passing]
    shares = [plan.rank_plan(rank) for rank in range(P)]
    assert sum(share.rows_sent for share in shares) == hops[direction]
    # Gradients of a row start at the nearest rank that needs it and go home in one message from the farthest.
    assert sum(share.grad_rows_sent for share in shares) == sum(f[-1] - f[0] + 1 for f in distances[direction] if f)
    for rank, share in enumerate(shares):
        assert (share.rank, share.slots, share.tokens) == (rank, layout.num_slots(rank), layout.counts[rank])
        assert all(len(stage.steps) == 1 for stage in share.stages)


@examples(100)
@given(layout_and_mask(with_slots=True))
def test_a_rotation_is_the_ring_with_every_rank_in_every_hop(case):
    layout, mask = case
    rotation, ring, dense = plan_attention(layout, mask, "rotate"), plan_attention(layout, mask), mask.dense()
    run = carry_out(rotation)
    assert np.array_equal(run.pairs, dense)
    assert np.array_equal(run.home, dense)
    assert run.arrived == carry_out(ring).arrived
    check_transfers(rotation)
    shares = [rotation.rank_plan(rank) for rank in range(layout.ranks)]
    assert {share.means for share in shares} == {"collective"}
    # As many all-to-alls as the farthest row has hops, on every rank.
    distances = needed_distances(layout, dense, Ring(layout, mask).direction)
    farthest = max((far[-1] for far in distances if far), default=0)
    assert [len(share.stages) for share in shares] == [1 + farthest] * layout.ranks
    for phase in ("forward", "backward"):
        for rank in range(layout.ranks):
            assert rotation.bytes(rank, phase, 8, 2) == ring.bytes(rank, phase, 8, 2)


@pytest.mark.parametrize("rank", range(4))
def test_zigzag_cp4_causal_is_a_causal_tile_and_three_rectangles(rank):
    S, P = 64, 4
    plan = plan_attention(Layout.zigzag(S, P), Mask.causal(S))
    first, *others = plan.rank_plan(rank).steps
    assert first.tiles == (Tile(0, 16, 0, 16, 0, 15),)
    # Turning towards lower ranks sends less, so KV of rank r + i arrives at step i.
    assert Ring(plan.layout, plan.mask).direction == -1
    assert [step.source for step in others] == [(rank + i) % P for i in (1, 2, 3)]
    for step in others:
        (tile,) = step.tiles
        shape = tile.shape
        assert not shape.has_lo
        assert not shape.has_hi
        if step.source < rank:
            assert (tile.q0, tile.q1, shape.num_k) == (0, 16, 8)
        else:
            assert (tile.q0, tile.q1, shape.num_k) == (8, 16, 16)


def test_plain_ring_of_four():
    plan = plan_attention(Layout.contiguous(8, 4), Mask.full(8))
    stages = plan.rank_plan(0).stages
    assert [[step.source for step in stage.steps] for stage in stages] == [[0], [3], [2], [1]]
    assert [stage.steps[0].recv for stage in stages] == [None, *[Transfer(3, ((0, 2),))] * 3]
    assert [stage.sends for stage in stages] == [*[(Transfer(1, ((0, 2),)),)] * 3, ()]


def test_the_last_rank_of_a_row_sends_its_gradient_home():
    stages = plan_attention(Layout.contiguous(8, 4), Mask.full(8)).rank_plan(0).stages
    all_rows = ((0, 2),)
    # All three other ranks need every row: gradients are passed on at distances 1 and 2 and go home from distance 3.
    assert [(s.steps[0].grad_recv, s.steps[0].grad_send, s.steps[0].home_send, s.home_recvs) for s in stages] == [
        (None, None, None, ()),
        (None, Transfer(1, all_rows), None, ()),
        (Transfer(3, all_rows), Transfer(1, all_rows), None, ()),
        (Transfer(3, all_rows), None, Transfer(1, all_rows), (Transfer(3, all_rows),)),
    ]


@pytest.mark.parametrize("P", [2, 4, 6, 8])
def test_a_pruned_zigzag_ring_sends_three_quarters_of_a_plain_one_half_to_all_of_it_by_rank(P):
    S = 64 * P
    plan = plan_attention(Layout.zigzag(S, P), Mask.causal(S), heads=(4, 2))
    plain = 2 * S * (2 * 16) * (P - 1) // P * 2  # bytes a rank: 2 S d_kv (P - 1) / P elements of bf16
    sent = [plan.bytes(rank, "forward", 16, 2) for rank in range(P)]
    assert sum(sent) == 0.75 * plain * P
    assert min(sent) == 0.5 * plain
    assert max(sent) == plain


def test_zigzag_of_eight_makes_64_kernel_calls():
    S, P = 65536, 8
    plan = plan_attention(Layout.zigzag(S, P), Mask.causal(S))
    assert sum(len(step.tiles) for rank in range(P) for step in plan.rank_plan(rank).steps) == 64
    assert sum(plan.rows_received(rank) for rank in range(P)) == 0.75 * P * (P - 1) * S // P


def test_documents_across_shard_edges_see_their_whole_prefix():
    lengths = [19, 28, 24, 12, 25, 8, 4, 8]
    plan = plan_attention(Layout.contiguous(128, 4), Mask.documents(lengths))
    # Rank 1 holds 32..63: it needs 19..31 of document 19..47; rank 2 (64..95) needs 47..63 and rank 3 83..95.
    assert [plan.rows_received(rank) for rank in range(4)] == [0, 32 - 19, 64 - 47, 96 - 83]
