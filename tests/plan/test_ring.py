"""The ring carried out by brute force: each pair once, each row no farther than needed, each gradient home."""

import numpy as np
import pytest
from hypothesis import given, settings

from longspan.plan import Layout, Mask, Tile, Transfer, plan_attention
from longspan.plan.ring import Ring

from .brute import carry_out, needed_distances
from .strategies import layout_and_mask


@settings(max_examples=250, deadline=None, derandomize=True)
@given(layout_and_mask(with_slots=True))
def test_carried_out_by_brute_force(case):
    layout, mask = case
    plan, dense, P = plan_attention(layout, mask), mask.dense(), layout.ranks
    direction = Ring(layout, mask).direction
    run = carry_out(plan, direction)
    assert np.array_equal(run.pairs, dense)
    assert run.pairs_by_rank == [plan.area(rank) for rank in range(P)]
    assert np.array_equal(run.seen_home, dense.sum(axis=0))

    distances = {d: needed_distances(layout, dense, d) for d in (1, -1)}
    hops = {d: sum(far[-1] for far in distances[d] if far) for d in (1, -1)}
    assert direction == (1 if hops[1] <= hops[-1] else -1)
    received = [0] * P
    owner = {int(token): rank for rank in range(P) for token in layout.positions(rank) if token >= 0}
    for key, far in enumerate(distances[direction]):
        for hop in range(1, far[-1] + 1 if far else 1):
            received[(owner[key] + direction * hop) % P] += 1
    assert run.received == received == [plan.rows_received(rank) for rank in range(P)]
    shares = [plan.rank_plan(rank) for rank in range(P)]
    assert sum(share.rows_sent for share in shares) == hops[direction]
    # Gradients of a row start at the nearest rank that needs it and go home in one message from the farthest.
    assert sum(share.grad_rows_sent for share in shares) == sum(f[-1] - f[0] + 1 for f in distances[direction] if f)
    for rank, share in enumerate(shares):
        assert (share.rank, share.slots, share.tokens) == (rank, layout.num_slots(rank), layout.counts[rank])
        assert share.steps[0].source == rank
        assert share.steps[0].rows == share.slots
        for step in share.steps:
            for transfer in (step.send, step.recv, step.grad_send, step.grad_recv, step.home_send, step.home_recv):
                if transfer is not None:
                    runs = np.array(transfer.runs)
                    assert transfer.peer != rank
                    assert (runs[:, 0] < runs[:, 1]).all()
                    assert (runs[1:, 0] > runs[:-1, 1]).all()


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
    steps = plan.rank_plan(0).steps
    assert [step.source for step in steps] == [0, 3, 2, 1]
    assert [step.recv for step in steps] == [None, *[Transfer(3, ((0, 2),))] * 3]
    assert [step.send for step in steps] == [*[Transfer(1, ((0, 2),))] * 3, None]


def test_the_last_rank_of_a_row_sends_its_gradient_home():
    steps = plan_attention(Layout.contiguous(8, 4), Mask.full(8)).rank_plan(0).steps
    # All three other ranks need every row: gradients are passed on at distances 1 and 2 and go home from distance 3.
    assert [(s.grad_recv, s.grad_send, s.home_send, s.home_recv) for s in steps] == [
        (None, None, None, None),
        (None, Transfer(1, ((0, 2),)), None, None),
        (Transfer(3, ((0, 2),)), Transfer(1, ((0, 2),)), None, None),
        (Transfer(3, ((0, 2),)), None, Transfer(1, ((0, 2),)), Transfer(3, ((0, 2),))),
    ]


def test_zigzag_of_eight_makes_64_kernel_calls_and_three_quarters_of_the_traffic():
    S, P = 65536, 8
    plan = plan_attention(Layout.zigzag(S, P), Mask.causal(S))
    assert sum(len(step.tiles) for rank in range(P) for step in plan.rank_plan(rank).steps) == 64
    plain = P * (P - 1) * S // P
    sent = [plan.rank_plan(rank).rows_sent for rank in range(P)]
    assert sum(sent) == sum(plan.rows_received(rank) for rank in range(P)) == 0.75 * plain
    assert min(sent) >= 0.5 * plain / P
    assert max(sent) <= plain / P


def test_a_window_receives_less_than_the_window():
    plan = plan_attention(Layout.contiguous(65536, 8), Mask.causal(65536, window=1024))
    assert [plan.rows_received(rank) for rank in range(8)] == [0] + [1023] * 7


def test_documents_that_lie_on_one_rank_send_nothing():
    plan = plan_attention(Layout.contiguous(64, 4), Mask.documents([16] * 4))
    for rank in range(4):
        assert len(plan.rank_plan(rank).steps) == 1
        assert plan.rows_received(rank) == plan.bytes(rank, "backward", 64, 2) == 0


def test_documents_across_shard_edges_see_their_whole_prefix():
    lengths = [19, 28, 24, 12, 25, 8, 4, 8]
    plan = plan_attention(Layout.contiguous(128, 4), Mask.documents(lengths))
    # Rank 1 holds 32..63: it needs 19..31 of document 19..47; rank 2 (64..95) needs 47..63 and rank 3 83..95.
    assert [plan.rows_received(rank) for rank in range(4)] == [0, 32 - 19, 64 - 47, 96 - 83]
