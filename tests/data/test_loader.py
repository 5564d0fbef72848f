"""The global stream of rows: once per epoch, the same at every dp degree, resumed without a gap or a repeat."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.data import Batch, Loader, TokenStore, eval_batches
from longspan.spec import DataError, SpecError

lengths_strategy = st.lists(st.integers(1, 9), min_size=1, max_size=10)
degrees = st.integers(1, 4)


def make_store(lengths, heldout=(), **changes):
    """A store whose tokens are numbered through all documents."""
    values = {
        "tokens": np.arange(sum(lengths), dtype=np.uint16),
        "offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        "train": np.setdiff1d(np.arange(len(lengths)), heldout),
        "heldout": np.array(heldout, np.int64),
        "vocab_size": 1 << 16,
        "tokenizer": "numbers",
        "corpus": "c" * 64,
        "heldout_fraction": 0.5,
        "seed": 0,
    }
    return TokenStore(**{**values, **changes})


def make_loaders(store, dp_size, **options):
    options = {"row_tokens": 4, "seed": 0, **options}
    return [Loader(store, dp_rank=rank, dp_size=dp_size, **options) for rank in range(dp_size)]


def stream(loaders, steps):
    """Digests of batches in the order of the global stream, for rows_per_batch=1."""
    return [next(loader).digest() for _ in range(steps) for loader in loaders]


def test_64_rows_world_4_cp2_accumulation_2_are_16_steps():
    store = make_store([16] * 16)
    world, cp, accumulation = 4, 2, 2
    loader = Loader(store, row_tokens=4, dp_rank=0, dp_size=world // cp, seed=0)
    assert loader.rows_per_epoch == 64
    assert loader.steps_per_epoch(world // cp, accumulation) == 16
    for _ in range(16 * accumulation):
        assert loader.epoch == 0
        next(loader)
    assert loader.epoch == 1


def test_a_step_that_reaches_past_the_epoch_counts():
    loader = Loader(make_store([9]), row_tokens=4, dp_rank=0, dp_size=1, seed=0)
    assert (loader.rows_per_epoch, loader.steps_per_epoch(2), loader.steps_per_epoch(2, 2)) == (3, 2, 1)


def test_rows_are_dealt_in_turn():
    loaders = make_loaders(make_store([32]), 2, rows_per_batch=2, shuffle=False)
    assert [next(loader).input_ids.tolist() for loader in loaders] == [
        [0, 1, 2, 3, 8, 9, 10, 11],
        [4, 5, 6, 7, 12, 13, 14, 15],
    ]
    assert next(loaders[0]).lengths == (4, 4)


def test_a_row_keeps_documents_apart():
    (loader,) = make_loaders(make_store([3, 6, 1]), 1, shuffle=False)
    batches = [next(loader) for _ in range(4)]
    assert [batch.lengths for batch in batches] == [(3, 1), (4,), (1, 1), (3, 1)]
    assert batches[2].num_targets == 0
    assert batches[1].position_ids.tolist() == [0, 1, 2, 3]


def test_epochs_are_shuffled_differently_and_by_seed():
    def order(seed, epoch):
        (loader,) = make_loaders(make_store([4] * 50), 1, seed=seed)
        return [next(loader).input_ids[0] // 4 for _ in range(50 * (epoch + 1))][-50:]

    orders = [order(0, 0), order(0, 1), order(1, 0)]
    assert all(sorted(o) == list(range(50)) for o in orders)
    assert len({tuple(o) for o in orders}) == 3
    assert orders[0] == order(0, 0)


def test_the_order_of_a_seed_is_fixed_for_good():
    (loader,) = make_loaders(make_store([4] * 8), 1, seed=7)
    assert [int(next(loader).input_ids[0]) // 4 for _ in range(8)] == [6, 3, 4, 0, 2, 7, 5, 1]


@given(lengths_strategy, st.integers(1, 12), degrees, st.integers(0, 3), st.booleans())
@settings(deadline=None)
def test_every_token_once_per_epoch(lengths, row_tokens, dp_size, seed, shuffle):
    store = make_store(lengths)
    loaders = make_loaders(store, dp_size, row_tokens=row_tokens, seed=seed, shuffle=shuffle)
    rows = loaders[0].rows_per_epoch
    steps = -(-3 * rows // dp_size)
    batches = [next(loader) for _ in range(steps) for loader in loaders]
    for epoch in range(3):
        ids = np.concatenate([batch.input_ids for batch in batches[epoch * rows : (epoch + 1) * rows]])
        assert sorted(ids.tolist()) == list(range(sum(lengths)))


@given(lengths_strategy, degrees, st.integers(1, 3), degrees)
@settings(deadline=None)
def test_the_same_rows_at_every_dp_degree(lengths, dp_size, rows_per_batch, accumulation):
    """Batches of (dp_size, rows_per_batch, accumulation) are those of dp 1, one row a batch, dealt in turn."""
    store = make_store(lengths)
    loaders = make_loaders(store, dp_size, rows_per_batch=rows_per_batch)
    (alone,) = make_loaders(store, 1)
    for _ in range(3 * accumulation):
        rows = [next(alone) for _ in range(dp_size * rows_per_batch)]
        for rank, loader in enumerate(loaders):
            assert next(loader).digest() == Batch.concat(rows[rank::dp_size]).digest()
        assert loaders[0].state_dict() == alone.state_dict()


@given(lengths_strategy, degrees, degrees, st.integers(0, 12))
@settings(deadline=None)
def test_resuming_at_another_dp_degree_repeats_and_skips_nothing(lengths, before, after, steps):
    store = make_store(lengths)
    (alone,) = make_loaders(store, 1)
    first = make_loaders(store, before)
    seen = stream(first, steps)
    states = [json.loads(json.dumps(loader.state_dict())) for loader in first]
    assert all(state == states[0] for state in states)
    second = make_loaders(store, after)
    for loader in second:
        loader.load_state_dict(states[0])
    assert seen + stream(second, 9) == stream([alone], steps * before + 9 * after)


def test_ranks_of_one_group_read_the_same_batch():
    """Nothing but the dp rank distinguishes loaders, so a CP group's digests agree."""
    store = make_store([5] * 10)
    group = [Loader(store, row_tokens=8, dp_rank=1, dp_size=2, seed=3) for _ in range(4)]
    for _ in range(10):
        assert len({next(loader).digest() for loader in group}) == 1


def test_resuming_reads_no_token_of_the_rows_before():
    class Guarded(TokenStore):
        def document(self, number, start=0, stop=None):
            reads.append(number)
            return super().document(number, start, stop)

    reads = []
    base = make_store([4] * 100)
    store = Guarded(**vars(base))
    loader = Loader(store, row_tokens=4, dp_rank=0, dp_size=1, seed=0)
    loader.load_state_dict({**loader.state_dict(), "row": 10**9 + 50})
    assert loader.epoch == 10**7
    next(loader)
    assert len(reads) == 1


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"corpus": "d" * 64}, {}, "corpus is cccccccccccc... in the state, dddddddddddd... here"),
        ({"tokenizer": "bytes"}, {}, "tokenizer is 'numbers' in the state, 'bytes' here"),
        ({"heldout_fraction": 0.1}, {}, "heldout_fraction is 0.5 in the state, 0.1 here"),
        ({"seed": 4}, {}, "split_seed is 0 in the state, 4 here"),
        ({}, {"seed": 1}, "seed is 0 in the state, 1 here"),
        ({}, {"shuffle": False}, "shuffle is True in the state, False here"),
        ({}, {"row_tokens": 8, "seed": 2}, "seed is 0 in the state, 2 here; row_tokens is 4 in the state, 8 here"),
    ],
)
def test_a_state_of_another_stream_names_the_values(changes, options, message):
    (saved,) = make_loaders(make_store([4, 4]), 1)
    (loader,) = make_loaders(make_store([4, 4], **changes), 1, **options)
    with pytest.raises(DataError) as caught:
        loader.load_state_dict(saved.state_dict())
    assert caught.value.message == f"loader state is of another stream: {message}"


def test_a_state_that_is_none_is_refused():
    (loader,) = make_loaders(make_store([4, 4]), 1)
    with pytest.raises(DataError, match=r"loader state has the keys \['rows'\], not \['corpus', .*\]"):
        loader.load_state_dict({"rows": 4})
    with pytest.raises(DataError, match="row -1, not a count"):
        loader.load_state_dict({**loader.state_dict(), "row": -1})


def test_arguments_are_checked():
    store = make_store([4, 4])
    for wrong, message in [
        ({"dp_rank": 2}, r"dp_rank 2 is not in 0..1 \(dp_size 2\)"),
        ({"dp_rank": -1}, "dp_rank -1 is not in"),
        ({"dp_size": 0}, "dp_size 0 is below 1"),
        ({"rows_per_batch": 0}, "rows_per_batch 0 is below 1"),
        ({"row_tokens": 0}, "row_tokens 0 is below 1"),
        ({"seed": -1}, "seed -1 is negative"),
    ]:
        with pytest.raises(SpecError, match=message):
            Loader(store, **{"row_tokens": 4, "dp_rank": 0, "dp_size": 2, "seed": 0, **wrong})
    (loader,) = make_loaders(store, 1)
    with pytest.raises(SpecError, match="dp_size 2 and accumulation 0 must be 1 or more"):
        loader.steps_per_epoch(2, 0)


@given(lengths_strategy, degrees, st.none() | st.integers(1, 5))
def test_evaluation_reads_each_heldout_row_once(lengths, dp_size, max_rows):
    store = make_store([3, *lengths], heldout=range(1, len(lengths) + 1))
    ranks = [list(eval_batches(store, 4, rank, dp_size, max_rows)) for rank in range(dp_size)]
    assert len({len(batches) for batches in ranks}) == 1
    dealt = [batch for step in zip(*ranks, strict=True) for batch in step]
    rows = [batch for batch in dealt if batch is not None]
    assert dealt == rows + [None] * (len(dealt) - len(rows))
    assert len(dealt) - len(rows) < dp_size
    ids = list(itertools.chain.from_iterable(batch.input_ids.tolist() for batch in rows))
    assert ids == list(range(3, 3 + sum(lengths)))[: 4 * max_rows if max_rows else None]


def test_evaluation_needs_heldout_documents():
    with pytest.raises(DataError, match="no document is held out"):
        eval_batches(make_store([4]), 4, 0, 1)
    with pytest.raises(SpecError, match="max_rows 0 is below 1"):
        eval_batches(make_store([4, 4], heldout=[1]), 4, 0, 1, 0)
