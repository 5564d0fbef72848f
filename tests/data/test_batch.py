"""Labels, positions and document lengths of the global row; the literal rows of CASES.md."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longspan.data import Batch, lengths_from_positions, positions, shift_labels
from longspan.spec import DataError

IDS8 = np.arange(8)
documents_strategy = st.lists(
    st.lists(st.integers(0, 99), max_size=6).map(lambda ids: np.array(ids, np.int64)), min_size=1, max_size=6
).filter(lambda documents: sum(d.size for d in documents) > 0)


def test_labels_are_shifted_before_sharding():
    labels = shift_labels(IDS8, [8])
    assert labels.dtype == np.int64
    assert labels[[0, 1, 6, 7]].tolist() == [1, 2, 7, -100]  # zigzag, cp2, r0
    assert labels[[2, 3, 4, 5]].tolist() == [3, 4, 5, 6]  # r1


def test_one_document_of_16_has_15_targets():
    assert Batch.from_documents([np.arange(16)]).num_targets == 15


def test_two_documents_of_4_have_6_targets():
    batch = Batch.from_documents([np.arange(4), np.arange(4, 8)])
    assert batch.num_targets == 6
    assert batch.labels.tolist() == [1, 2, 3, -100, 5, 6, 7, -100]


def test_labels_not_yet_shifted_are_an_error():
    with pytest.raises(
        DataError, match="label 0 at token 0, which is followed by 1: labels of a batch are shifted, once"
    ):
        Batch(IDS8, IDS8, positions([8]), (8,))


def test_labels_shifted_already_are_not_shifted_again():
    labels = shift_labels(IDS8, [8])
    assert Batch(IDS8, labels, positions([8]), (8,)).labels.tolist() == [1, 2, 3, 4, 5, 6, 7, -100]
    with pytest.raises(DataError, match="label 2 at token 0, which is followed by 1"):
        Batch(IDS8, shift_labels(labels, [8]), positions([8]), (8,))


def test_labels_across_documents_are_an_error():
    with pytest.raises(DataError, match="label 4 at token 3, which is the last of its document"):
        Batch(IDS8, shift_labels(IDS8, [8]), positions([4, 4]), (4, 4))


def test_prompt_12_ignored_and_response_4():
    mask = np.array([0] * 12 + [1] * 4)
    batch = Batch.from_documents([np.arange(16)], [mask])
    valid = batch.labels != -100
    assert np.flatnonzero(valid).tolist() == [11, 12, 13, 14]  # the prompt's last token predicts the response's first
    zigzag = [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]
    assert [int(valid[rank].sum()) for rank in zigzag] == [1, 2, 1, 0]


def test_positions_of_one_document():
    assert positions([8])[[0, 1, 6, 7]].tolist() == [0, 1, 6, 7]


def test_positions_of_two_documents():
    assert positions([4, 4])[[0, 1, 6, 7]].tolist() == [0, 1, 2, 3]


def test_the_longest_position_is_that_of_the_global_row():
    assert Batch.from_documents([np.arange(16)]).position_ids.max() == 15


def test_resets_are_documents():
    assert lengths_from_positions([0, 1, 2, 3, 4, 0, 1, 2]) == (5, 3)
    assert lengths_from_positions([0, 0, 1, 0]) == (1, 2, 1)
    assert lengths_from_positions([]) == ()


def test_zero_lengths_are_harmless():
    lengths = np.diff([0, 4, 8, 8, 8])
    assert shift_labels(IDS8, lengths).tolist() == [1, 2, 3, -100, 5, 6, 7, -100]
    assert positions(lengths).tolist() == [0, 1, 2, 3] * 2
    assert Batch.from_documents([IDS8[:4], IDS8[4:], [], []]).lengths == (4, 4, 0, 0)
    assert shift_labels(IDS8, [0, 4, 0, 4]).tolist() == [1, 2, 3, -100, 5, 6, 7, -100]


def test_positions_of_a_shard_are_refused():
    with pytest.raises(DataError, match="position 12 at token 4 follows 3") as caught:
        lengths_from_positions([0, 1, 2, 3, 12, 13, 14, 15])  # zigzag looks like two documents
    assert caught.value.hint == "give the positions of the global row, before it is sharded"
    with pytest.raises(DataError, match="position 4 at token 0 begins the row"):
        lengths_from_positions([4, 5])


def test_values_are_in_the_errors():
    with pytest.raises(DataError, match=r"lengths \[4, 3\] sum to 7, but there are 8 ids"):
        shift_labels(IDS8, [4, 3])
    with pytest.raises(DataError, match=r"lengths \[9, -1\] hold -1"):
        shift_labels(IDS8, [9, -1])
    with pytest.raises(DataError, match=r"loss_mask has shape \(7,\), but there are 8 ids"):
        shift_labels(IDS8, [8], np.ones(7))
    with pytest.raises(DataError, match=r"loss_mask holds 0.5; its values are 0 and 1"):
        shift_labels(IDS8, [8], np.full(8, 0.5))
    with pytest.raises(DataError, match=r"ids has shape \(1, 8\) and dtype int64, not \(S,\) and integer"):
        shift_labels(IDS8[None], [8])
    with pytest.raises(DataError, match=r"document 1 has shape .* and dtype float64"):
        Batch.from_documents([[1], [0.5]])
    with pytest.raises(DataError, match="1 loss masks for 2 documents"):
        Batch.from_documents([[1], [2]], [None])
    with pytest.raises(DataError, match=r"loss mask 1 has shape \(3,\), but there are 1 ids"):
        Batch.from_documents([[1], [2]], [None, [1, 1, 1]])


def test_a_batch_is_checked():
    labels, places = shift_labels(IDS8, [8]), positions([8])
    with pytest.raises(DataError, match="a batch has no token"):
        Batch.from_documents([[], []])
    with pytest.raises(DataError, match="8 input_ids, 7 labels and 8 position_ids are not of one row"):
        Batch(IDS8, labels[:7], places, (8,))
    with pytest.raises(DataError, match="position 4 at token 4 should be 0"):
        Batch(IDS8, shift_labels(IDS8, [4, 4]), places, (4, 4))
    with pytest.raises(DataError, match=r"labels has shape .* and dtype int32"):
        Batch(IDS8, labels.astype(np.int32), places, (8,))
    with pytest.raises(DataError, match="input id -100 at token 2 is negative"):
        Batch.from_documents([[1, 2, -100, 3]])
    with pytest.raises(DataError, match="nothing to concatenate"):
        Batch.concat([])


def test_a_batch_cannot_be_changed():
    batch = Batch.from_documents([IDS8])
    with pytest.raises(ValueError, match="read-only"):
        batch.labels[0] = 5
    assert IDS8.flags.writeable


def test_tensors_are_rows_of_int64():
    batch = Batch.from_documents([np.array([5, 6], np.uint16), np.array([7], np.uint16)])
    tensors = batch.tensors()
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
        "input_ids": [[5, 6, 7]],
        "labels": [[6, -100, -100]],
        "position_ids": [[0, 1, 0]],
    }
    assert all(tensor.dtype == torch.int64 for tensor in tensors.values())
    tensors["input_ids"].zero_()
    assert batch.input_ids.tolist() == [5, 6, 7]


def test_the_digest_sees_every_content():
    batches = [
        Batch.from_documents([[1, 2, 3, 4]]),
        Batch.from_documents([[1, 2, 4, 3]]),
        Batch.from_documents([[1, 2], [3, 4]]),
        Batch.from_documents([[1, 2, 3, 4]], [[1, 1, 0, 1]]),
        Batch.from_documents([[1, 2, 3, 4], []]),
    ]
    assert len({batch.digest() for batch in batches}) == 5
    assert Batch.from_documents([np.array([1, 2, 3, 4], np.uint16)]).digest() == batches[0].digest()
    assert len(batches[0].digest()) == 32


@given(documents_strategy, st.data())
def test_labels_follow_their_definition(documents, data):
    masks = [data.draw(st.lists(st.integers(0, 1), min_size=d.size, max_size=d.size)) for d in documents]
    batch = Batch.from_documents(documents, masks)
    expected = [
        int(d[i + 1]) if i + 1 < d.size and mask[i + 1] else -100
        for d, mask in zip(documents, masks, strict=True)
        for i in range(d.size)
    ]
    assert batch.labels.tolist() == expected
    assert batch.num_targets == sum(label != -100 for label in expected)
    assert batch.position_ids.tolist() == [i for d in documents for i in range(d.size)]
    assert lengths_from_positions(batch.position_ids) == tuple(n for n in batch.lengths if n)


@given(documents_strategy, documents_strategy)
def test_concat_is_the_batch_of_all_documents(first, second):
    joined = Batch.concat([Batch.from_documents(first), Batch.from_documents(second)])
    assert joined.digest() == Batch.from_documents(first + second).digest()
    assert joined.seq_len == sum(d.size for d in first + second)
