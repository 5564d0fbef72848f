"""The global stream of rows: once per epoch, the same at every dp degree, resumed without a gap or a repeat."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.data import Batch, FitConfig, Loader, TokenStore, eval_batches
from longspan.errors import DataError, SpecError

lengths_strategy = st.lists(st.integers(1, 9), min_size=1, max_size=10)
degrees = st.integers(1, 4)
fits = st.none() | st.builds(FitConfig, buffer=st.integers(1, 6), buckets=st.sampled_from([(), (2,)]))


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
    options = {"seq_len": 4, "seed": 0, **options}
    return [Loader(store, dp_rank=rank, dp_size=dp_size, **options) for rank in range(dp_size)]


def stream(loaders, steps):
    """Digests of batches in the order of the global stream, for micro_batch_size=1."""
    return [next(loader).digest() for _ in range(steps) for loader in loaders]


def test_64_rows_world_4_cp2_accumulation_2_are_16_steps():
    store = make_store([16] * 16)
    world, cp, gradient_accumulation_steps = 4, 2, 2
    loader = Loader(store, seq_len=4, dp_rank=0, dp_size=world // cp, seed=0)
    assert loader.rows_per_epoch == 64
    assert loader.steps_per_epoch(world // cp, gradient_accumulation_steps) == 16
    for _ in range(16 * gradient_accumulation_steps):
        assert loader.epoch == 0
        next(loader)
    assert loader.epoch == 1


def test_a_step_that_reaches_past_the_epoch_counts():
    loader = Loader(make_store([9]), seq_len=4, dp_rank=0, dp_size=1, seed=0)
    assert (loader.rows_per_epoch, loader.steps_per_epoch(2), loader.steps_per_epoch(2, 2)) == (3, 2, 1)


def test_rows_are_dealt_in_turn():
    loaders = make_loaders(make_store([32]), 2, micro_batch_size=2, shuffle=False)
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


@given(lengths_strategy, st.integers(3, 12), degrees, st.integers(0, 3), st.booleans(), fits)
@settings(deadline=None)
def test_every_token_once_per_epoch(lengths, seq_len, dp_size, seed, shuffle, fit):
    store = make_store(lengths)
    loaders = make_loaders(store, dp_size, seq_len=seq_len, seed=seed, shuffle=shuffle, fit=fit)
    (alone,) = make_loaders(store, 1, seq_len=seq_len, seed=seed, shuffle=shuffle, fit=fit)
    epochs = [[], [], []]
    while alone.epoch < 3:
        epochs[alone.epoch].append(next(alone))
    batches = [next(loader) for _ in range(-(-sum(map(len, epochs)) // dp_size)) for loader in loaders]
    for rows in epochs:
        ids = np.concatenate([batch.input_ids for batch in batches[: len(rows)]])
        assert sorted(ids.tolist()) == list(range(sum(lengths)))
        batches = batches[len(rows) :]


@given(lengths_strategy, degrees, st.integers(1, 3), degrees, fits)
@settings(deadline=None)
def test_the_same_rows_at_every_dp_degree(lengths, dp_size, micro_batch_size, gradient_accumulation_steps, fit):
    """Batches of (dp_size, micro_batch_size, accumulation) are those of dp 1, one row a batch, dealt in turn."""
    store = make_store(lengths)
    loaders = make_loaders(store, dp_size, micro_batch_size=micro_batch_size, fit=fit)
    (alone,) = make_loaders(store, 1, fit=fit)
    for _ in range(3 * gradient_accumulation_steps):
        rows = [next(alone) for _ in range(dp_size * micro_batch_size)]
        for rank, loader in enumerate(loaders):
            assert next(loader).digest() == Batch.concat(rows[rank::dp_size]).digest()
        assert loaders[0].state_dict() == alone.state_dict()


@given(lengths_strategy, degrees, degrees, st.integers(0, 12), fits)
@settings(deadline=None)
def test_resuming_at_another_dp_degree_repeats_and_skips_nothing(lengths, before, after, steps, fit):
    store = make_store(lengths)
    (alone,) = make_loaders(store, 1, fit=fit)
    first = make_loaders(store, before, fit=fit)
    seen = stream(first, steps)
    states = [json.loads(json.dumps(loader.state_dict())) for loader in first]
    assert all(state == states[0] for state in states)
    second = make_loaders(store, after, fit=fit)
    for loader in second:
        loader.load_state_dict(states[0])
    assert seen + stream(second, 9) == stream([alone], steps * before + 9 * after)


@pytest.mark.parametrize("balance", ["none", "area"])
def test_an_epoch_in_parts_at_dp_1_2_and_4_reads_every_token_once(balance):
    """Accumulation keeps 4 rows a step, in the middle of the second epoch, whose rows may be more or fewer."""
    store = make_store(np.random.default_rng(0).integers(1, 40, 300))
    fit = FitConfig(buffer=16, balance=balance)
    options = {"seq_len": 64, "fit": fit, "rows_per_step": 4}
    (alone,) = make_loaders(store, 1, **options)
    state, ids = alone.state_dict(), []
    for dp_size, steps in ((1, 15), (2, 40), (4, 20)):
        loaders = make_loaders(store, dp_size, **options)
        for loader in loaders:
            loader.load_state_dict(json.loads(json.dumps(state)))
        for _ in range(steps * 4 // dp_size):
            ids += [next(loader).input_ids for loader in loaders]
        state = loaders[0].state_dict()
        assert all(loader.state_dict() == state for loader in loaders)
    for epoch in range(3):
        rows = alone.rows_per_epoch
        assert sorted(np.concatenate(ids[:rows]).tolist()) == list(range(store.num_tokens))
        assert all(next(alone).input_ids.tolist() == row.tolist() for row in ids[:rows])
        assert alone.epoch == epoch + 1
        ids = ids[rows:]


def test_steps_are_evened_wherever_an_epoch_begins():
    """21 rows an epoch, 10 of them one long document: a step of 2 that is not of one kind is an exception."""
    store = make_store([8] * 10 + [1] * 81)
    (loader,) = make_loaders(store, 1, seq_len=8, fit=FitConfig(balance="area"), rows_per_step=2)
    assert loader.rows_per_epoch == 21
    steps = [{next(loader).lengths for _ in range(2)} for _ in range(10 * 21 // 2)]
    assert loader.epoch == 10
    mixed = sum((8,) in step and len(step) == 2 for step in steps)
    assert mixed <= 2 * 10  # in a window of 8 steps, and where one epoch follows another


def test_epochs_may_differ_in_rows():
    (loader,) = make_loaders(make_store([5, 3, 6, 2, 4, 4, 7, 1]), 1, seq_len=8, fit=FitConfig(buffer=2))
    rows = []
    while loader.epoch < 20:
        if loader.epoch == len(rows):
            rows.append(loader.rows_per_epoch)
            assert loader.steps_per_epoch(2) == -(-rows[-1] // 2)
        next(loader)
    assert len(set(rows)) > 1


def test_a_document_longer_than_a_row_is_refused_by_its_number():
    store = make_store([4, 5, 9, 3], heldout=[1])
    refuse = FitConfig(long_documents="refuse")
    with pytest.raises(DataError, match="document 2 has 9 tokens, more than seq_len 8; 1 of 3 documents are longer"):
        make_loaders(store, 1, seq_len=8, fit=refuse)
    with pytest.raises(DataError, match="document 1 has 5 tokens, more than seq_len 4; 1 of 1 documents are longer"):
        eval_batches(store, 4, 0, 1, fit=refuse)


def test_a_corpus_without_a_token_is_refused():
    with pytest.raises(DataError, match="there is no token to train on"):
        make_loaders(make_store([0, 0]), 1)


def test_ranks_of_one_group_read_the_same_batch():
    """Nothing but the dp rank distinguishes loaders, so a CP group's digests agree."""
    store = make_store([5] * 10)
    group = [Loader(store, seq_len=8, dp_rank=1, dp_size=2, seed=3) for _ in range(4)]
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
    loader = Loader(store, seq_len=4, dp_rank=0, dp_size=1, seed=0)
    loader.load_state_dict({**loader.state_dict(), "row": 10**9 + 50, "epoch": 10**7, "epoch_start": 10**9})
    assert loader.epoch == 10**7
    next(loader)
    assert len(reads) == 1


PACKING = (
    "packing is 'stream' in the state, 'fit' here; buffer is None in the state, 8 here; buckets is None in the state, [] "
    "here; long_documents is None in the state, 'cut' here; balance is None in the state, 'none' here"
)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"corpus": "d" * 64}, {}, "corpus is cccccccccccc... in the state, dddddddddddd... here"),
        ({"tokenizer": "bytes"}, {}, "tokenizer is 'numbers' in the state, 'bytes' here"),
        ({"heldout_fraction": 0.1}, {}, "heldout_fraction is 0.5 in the state, 0.1 here"),
        ({"seed": 4}, {}, "split_seed is 0 in the state, 4 here"),
        ({}, {"seed": 1}, "seed is 0 in the state, 1 here"),
        ({}, {"shuffle": False}, "shuffle is True in the state, False here"),
        ({}, {"fit": FitConfig(buffer=8)}, PACKING),
        ({}, {"seq_len": 8, "seed": 2}, "seed is 0 in the state, 2 here; seq_len is 4 in the state, 8 here"),
    ],
)
def test_a_state_of_another_stream_names_the_values(changes, options, message):
    (saved,) = make_loaders(make_store([4, 4]), 1)
    (loader,) = make_loaders(make_store([4, 4], **changes), 1, **options)
    with pytest.raises(DataError) as caught:
        loader.load_state_dict(saved.state_dict())
    assert caught.value.message == f"loader state is of another stream: {message}"


def test_a_state_of_another_step_is_refused_where_steps_are_evened():
    def state(rows_per_step, **options):
        (loader,) = make_loaders(make_store([4, 4]), 1, rows_per_step=rows_per_step, fit=FitConfig(**options))
        return loader

    state(2).load_state_dict(state(4).state_dict())
    text = (
        "another stream: rows_per_step is 4 in the state, 2 here\n\n"
        "hint: keep micro_batch_size x dp x gradient_accumulation_steps at 4; or"
    )
    with pytest.raises(DataError, match=text):
        state(2, balance="area").load_state_dict(state(4, balance="area").state_dict())
    with pytest.raises(DataError, match="another stream: buffer is 64 in the state, 8 here"):
        state(2, buffer=8).load_state_dict(state(2).state_dict())


def test_a_state_that_is_none_is_refused():
    (loader,) = make_loaders(make_store([4, 4]), 1)
    with pytest.raises(DataError, match=r"loader state has the keys \['rows'\], not \['balance', .*\]"):
        loader.load_state_dict({"rows": 4})
    with pytest.raises(DataError, match="row -1, not a count"):
        loader.load_state_dict({**loader.state_dict(), "row": -1})
    with pytest.raises(DataError, match=r"epoch_start 1\.5, not a count"):
        loader.load_state_dict({**loader.state_dict(), "epoch_start": 1.5})
    with pytest.raises(DataError, match="row 7, which is not in epoch 2 of rows 4 to 5"):
        loader.load_state_dict({**loader.state_dict(), "row": 7, "epoch": 2, "epoch_start": 4})


def test_arguments_are_checked():
    store = make_store([4, 4])
    for wrong, message in [
        ({"dp_rank": 2}, r"dp_rank 2 is not in 0..1 \(dp_size 2\)"),
        ({"dp_rank": -1}, "dp_rank -1 is not in"),
        ({"dp_size": 0}, "dp_size 0 is below 1"),
        ({"micro_batch_size": 0}, "micro_batch_size 0 is below 1"),
        ({"seq_len": 0}, "seq_len 0 is below 1"),
        ({"seed": -1}, "seed -1 is negative"),
        ({"rows_per_step": 3}, "rows_per_step 3 is not a multiple of dp_size 2 x micro_batch_size 1"),
        ({"rows_per_step": 0}, "rows_per_step 0 is not a multiple"),
        ({"fit": FitConfig(buckets=(4,))}, "bucket 4 is not below seq_len 4"),
    ]:
        with pytest.raises(SpecError, match=message):
            Loader(store, **{"seq_len": 4, "dp_rank": 0, "dp_size": 2, "seed": 0, **wrong})
    (loader,) = make_loaders(store, 1)
    with pytest.raises(SpecError, match="dp_size 2 and gradient_accumulation_steps 0 must be 1 or more"):
        loader.steps_per_epoch(2, 0)


@pytest.mark.parametrize("balance", ["none", "area"])
@given(lengths=lengths_strategy, dp_size=degrees)
def test_evaluation_fits_whole_documents_at_every_dp_degree(balance, lengths, dp_size):
    store, fit = make_store([3, *lengths], heldout=range(1, len(lengths) + 1)), FitConfig(balance=balance)
    ranks = [list(eval_batches(store, 9, rank, dp_size, fit=fit)) for rank in range(dp_size)]
    rows = [batch for step in zip(*ranks, strict=True) for batch in step if batch is not None]
    assert sorted(length for row in rows for length in row.lengths) == sorted(lengths)
    assert [row.digest() for row in rows] == [row.digest() for row in eval_batches(store, 9, 0, 1, fit=FitConfig())]


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
