"""Labels, positions and document lengths of the global row; the literal rows of CASES.md."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longspan.data import Batch, lengths_from_positions, positions, shift_labels, to_padded
from longspan.errors import DataError
from longspan.plan import Mask

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "batches.md"
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
        DataError, match="label 0 at token 0, which is followed by 1: labels of a Batch are shifted exactly once"
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
    assert caught.value.hint == "give the positions of the global row, before sharding"
    with pytest.raises(DataError, match="position 4 at token 0 begins the row"):
        lengths_from_positions([4, 5])


def test_values_are_in_the_errors():
    with pytest.raises(DataError, match=r"lengths \[4, 3\] sum to 7, but there are 8 ids"):
        shift_labels(IDS8, [4, 3])
    with pytest.raises(DataError, match=r"lengths \[9, -1\] contain -1"):
        shift_labels(IDS8, [9, -1])
    with pytest.raises(DataError, match=r"loss_mask has shape \(7,\), but the ids have shape \(8,\)"):
        shift_labels(IDS8, [8], np.ones(7))
    with pytest.raises(DataError, match=r"loss_mask holds 0.5; its values are 0 and 1"):
        shift_labels(IDS8, [8], np.full(8, 0.5))
    with pytest.raises(DataError, match=r"ids has shape \(1, 8\) and dtype int64, not \(S,\) and integer"):
        shift_labels(IDS8[None], [8])
    with pytest.raises(DataError, match=r"document 1 has shape .* and dtype float64"):
        Batch.from_documents([[1], [0.5]])
    with pytest.raises(DataError, match="1 loss masks for 2 documents"):
        Batch.from_documents([[1], [2]], [None])
    with pytest.raises(DataError, match=r"loss_mask of document 1 has shape \(3,\), but the ids have shape \(1,\)"):
        Batch.from_documents([[1], [2]], [None, [1, 1, 1]])
    with pytest.raises(DataError, match=r"document 0 is not an array: .*inhomogeneous") as caught:
        Batch.from_documents([[[1], [2, 3]]])
    assert caught.value.hint == "give rows of equal length, and tensors on the CPU"


def test_a_batch_is_checked():
    labels, places = shift_labels(IDS8, [8]), positions([8])
    with pytest.raises(DataError, match="a batch has no token"):
        Batch.from_documents([[], []])
    with pytest.raises(DataError, match="8 input_ids, 7 labels and 8 position_ids differ in number"):
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
        Batch.from_shared_prompt([1, 2, 3], [[4]], [[0]]),
        Batch.from_documents([[1, 2], [3, 4]], [[0, 0], [0, 0]]),
    ]
    assert len({batch.digest() for batch in batches}) == 7
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


# Arrays of any shape: each becomes the batch of its documents.


def same(batch, documents, masks=None):
    """Whether it is the batch of these documents, in all that it holds."""
    return batch.digest() == Batch.from_documents(documents, masks).digest()


def both(test):
    """With arrays and with tensors."""
    return pytest.mark.parametrize("make", [np.array, torch.tensor, list], ids=["numpy", "torch", "lists"])(test)


@both
def test_a_padding_mask_of_rows_of_5_and_8(make):
    """Padded rows are not computed and not counted: 13 tokens, 11 targets, whose pairs are 15 + 36."""
    ids = [[0, 0, 0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11, 12, 13]]
    left = Batch.from_padded(make(ids), make([[0] * 3 + [1] * 5, [1] * 8]))
    assert same(left, [range(1, 6), range(6, 14)])
    assert (left.seq_len, left.num_targets, left.lengths) == (13, 11, (5, 8))
    assert Mask.documents(left.lengths).area == 15 + 36
    right = Batch.from_padded(make([[*ids[0][3:], 0, 0, 0], ids[1]]), make([[True] * 5 + [False] * 3, [True] * 8]))
    assert right.digest() == left.digest()


def test_padding_on_both_sides_and_rows_of_padding():
    ids = np.arange(12).reshape(3, 4)
    batch = Batch.from_padded(ids, [[0, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    assert same(batch, [[1, 2], [], [8, 9, 10, 11]])
    with pytest.raises(DataError, match="a batch has no token"):
        Batch.from_padded(ids, np.zeros((3, 4)))


def test_padding_masks_that_are_refused():
    ids = np.arange(8).reshape(2, 4)
    with pytest.raises(DataError, match="attention_mask of row 1 has padding between tokens") as caught:
        Batch.from_padded(ids, [[1, 1, 1, 1], [1, 0, 1, 1]])
    assert caught.value.hint == "for several documents in one row use Batch.from_positions"
    with pytest.raises(DataError, match="attention_mask holds 2; its values are 0 and 1"):
        Batch.from_padded(ids, [[1, 1, 2, 2], [1, 1, 1, 1]])
    dense = np.tril(np.ones((2, 1, 4, 4)))
    with pytest.raises(DataError, match=r"attention_mask has shape \(2, 1, 4, 4\), but the ids have shape \(2, 4\)"):
        Batch.from_padded(ids, dense)
    with pytest.raises(DataError, match=r"input_ids has shape \(8,\) and dtype int64, not \(B, S\) and integer"):
        Batch.from_padded(ids.ravel(), np.ones(8))
    with pytest.raises(TypeError, match="position_ids"):
        Batch.from_padded(ids, np.ones((2, 4)), position_ids=ids)


@both
def test_resets_of_positions_are_documents(make):
    assert same(Batch.from_positions(make(range(8)), make([0, 1, 2, 3, 4, 0, 1, 2])), [range(5), range(5, 8)])
    rows = Batch.from_positions(make([[1, 2, 3, 4], [5, 6, 7, 8]]), make([[0, 1, 2, 3], [0, 1, 0, 0]]))
    assert same(rows, [[1, 2, 3, 4], [5, 6], [7], [8]])


def test_positions_that_are_refused():
    ids = np.arange(8).reshape(2, 4)
    with pytest.raises(
        DataError, match="position 4 at row 1, token 0 begins the row; a position must be 0 or one more"
    ):
        Batch.from_positions(ids, ids)  # one document over two rows, or two shards of it
    with pytest.raises(DataError, match="position 3 at row 0, token 2 follows 1"):
        Batch.from_positions(ids, [[0, 1, 3, 4], [0, 1, 2, 3]])
    with pytest.raises(DataError, match=r"position_ids has shape \(4,\), but the ids have shape \(2, 4\)"):
        Batch.from_positions(ids, np.arange(4))
    with pytest.raises(DataError, match=r"position_ids has shape \(3, 2, 4\) .* not \(S,\) or \(B, S\)"):
        Batch.from_positions(ids, np.zeros((3, 2, 4), np.int64))


@both
def test_bounds_with_documents_of_length_0(make):
    batch = Batch.from_cu_seqlens(make(range(8)), make([0, 4, 8, 8, 8]))
    assert same(batch, [range(4), range(4, 8), [], []])
    assert Mask.documents(batch.lengths) == Mask.documents([4, 4])
    assert same(Batch.from_cu_seqlens(make([[5, 6, 7]]), make([0, 0, 2, 3])), [[], [5, 6], [7]])


@pytest.mark.parametrize("bounds", [[1, 8], [0, 4], [0, 9], [0, 6, 4, 8], []])
def test_bounds_that_are_refused(bounds):
    with pytest.raises(DataError, match=r"cu_seqlens \[.*\] do not ascend from 0 to the 8 input_ids"):
        Batch.from_cu_seqlens(IDS8, bounds)


def test_bounds_are_of_one_row():
    with pytest.raises(DataError, match="input_ids have 2 rows, but cu_seqlens describe the documents of one row"):
        Batch.from_cu_seqlens(IDS8.reshape(2, 4), [0, 4, 8])


# What is a target, said in the place of the ids.


def rows_of_one(said):
    return {name: values[None] for name, values in said.items()}


WAYS = {
    "documents": lambda ids, labels=None, loss_mask=None: Batch.from_documents([ids], [loss_mask], labels=[labels]),
    "padded": lambda ids, **said: Batch.from_padded(ids[None], np.ones((1, ids.size)), **rows_of_one(said)),
    "positions": lambda ids, **said: Batch.from_positions(ids, np.arange(ids.size), **said),
    "rows": lambda ids, **said: Batch.from_positions(ids[None], np.arange(ids.size)[None], **rows_of_one(said)),
    "cu_seqlens": lambda ids, **said: Batch.from_cu_seqlens(ids, [0, ids.size], **said),
}


@pytest.mark.parametrize("way", WAYS)
def test_labels_in_the_place_of_the_ids_are_shifted_once(way):
    ids = np.arange(10, 18)
    labels = np.where(np.arange(8) < 5, -100, ids)
    batch = WAYS[way](ids, labels=labels)
    assert batch.labels.tolist() == [-100] * 4 + [15, 16, 17, -100]
    assert batch.digest() == WAYS[way](ids, loss_mask=(labels != -100).astype(int)).digest()


@pytest.mark.parametrize("way", WAYS)
def test_labels_shifted_by_the_caller_are_refused(way):
    with pytest.raises(
        DataError, match=r"label 1 at .*token 0.*, whose id is 0: a label must be the id at the same index"
    ) as caught:
        WAYS[way](IDS8, labels=shift_labels(IDS8, [8]))
    assert caught.value.hint == "give labels that are not shifted, with -100 where ignored: Batch shifts them"


@pytest.mark.parametrize("way", WAYS)
def test_labels_beside_a_loss_mask_are_refused(way):
    with pytest.raises(DataError, match=r"labels and loss_mask.* are both given"):
        WAYS[way](IDS8, labels=IDS8, loss_mask=np.ones(8, int))


@pytest.mark.parametrize("way", WAYS)
def test_labels_of_another_shape_are_refused(way):
    with pytest.raises(DataError, match=r"labels.* has shape \((1, )?7,?\), but the ids have shape \((1, )?8,?\)"):
        WAYS[way](IDS8, labels=IDS8[:7])
    with pytest.raises(DataError, match=r"loss_mask.* has shape \((1, )?7,?\), but the ids have shape \((1, )?8,?\)"):
        WAYS[way](IDS8, loss_mask=np.ones(7))


def test_labels_are_those_of_hugging_face():
    """What a collator gives, and the shift that a model of theirs makes of it."""
    ids = torch.tensor([[5, 6, 7, 8, 0, 0], [1, 2, 3, 4, 5, 6]])
    mask = (torch.arange(6) < torch.tensor([[4], [6]])).long()
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :2] = -100
    batch = Batch.from_padded(ids, mask, labels=labels)
    theirs = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    assert to_padded(batch.labels, mask, fill=-100).tolist() == theirs.tolist()


def test_labels_at_padding_are_not_looked_at():
    batch = Batch.from_padded([[5, 6, 0]], [[1, 1, 0]], labels=[[5, 6, 9]])
    assert batch.labels.tolist() == [6, -100]
    with pytest.raises(DataError, match="label 9 at row 0, token 1, whose id is 6"):
        Batch.from_padded([[5, 6, 0]], [[1, 1, 0]], labels=[[5, 9, 0]])


@given(st.data())
def test_every_shape_gives_the_same_batch(data):
    lengths = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any))
    documents = [data.draw(st.lists(st.integers(0, 99), min_size=n, max_size=n)) for n in lengths]
    masks = [data.draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)) for n in lengths]
    before = [data.draw(st.integers(0, max(lengths) + 2 - n)) for n in lengths]

    def padded(parts, fill):
        rows = np.full((len(lengths), max(lengths) + 2), fill)
        for row, part, start in zip(rows, parts, before, strict=True):
            row[start : start + len(part)] = part
        return rows

    want = Batch.from_documents(documents, masks)
    real = padded([[1] * n for n in lengths], 0)
    batch = Batch.from_padded(padded(documents, 7), real, loss_mask=padded(masks, 1))
    assert batch.digest() == want.digest()
    assert np.array_equal(to_padded(batch.input_ids, real, fill=7), padded(documents, 7))
    ids, mask = np.concatenate(documents).astype(int), np.concatenate(masks).astype(int)
    assert Batch.from_cu_seqlens(ids, np.cumsum([0, *lengths]), loss_mask=mask).digest() == want.digest()
    packed = Batch.from_positions(ids, positions(lengths), labels=np.where(mask, ids, -100))
    assert same(packed, [d for d in documents if d], [m for m in masks if m])


def test_the_arrays_given_may_be_used_again():
    ids = torch.arange(8)
    batch = Batch.from_cu_seqlens(ids, torch.tensor([0, 8], dtype=torch.int32))
    ids.zero_()
    assert batch.input_ids.tolist() == list(range(8))


# The way back.


def test_values_go_back_to_their_places():
    mask = [[0, 1, 1], [1, 0, 0]]
    assert to_padded(np.array([1.5, 2.5, 3.5]), mask).tolist() == [[0, 1.5, 2.5], [3.5, 0, 0]]
    values = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.bfloat16, requires_grad=True)
    rows = to_padded(values, torch.tensor(mask), fill=-1)
    assert rows.tolist() == [[-1, 1, 2], [3, -1, -1]]
    assert rows.dtype == torch.bfloat16
    (rows * torch.arange(6).view(2, 3)).sum().backward()
    assert values.grad.tolist() == [[1, 2, 3]]
    assert to_padded(torch.tensor([7, 8, 9]), mask).dtype == torch.int64
    with pytest.raises(DataError, match=r"2 values for the 3 tokens of attention_mask \(2, 3\)"):
        to_padded(np.ones(2), mask)


# A prompt that responses share.


def test_a_shared_prompt_by_hand():
    batch = Batch.from_shared_prompt([1, 2, 3], [[4, 5], torch.tensor([6]), []], [[1, 0], None, None])
    assert batch.input_ids.tolist() == [1, 2, 3, 4, 5, 3, 6, 3]
    assert batch.labels.tolist() == [-100, -100, 4, -100, -100, 6, -100, -100]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 2, 3, 2]
    assert batch.lengths == (2, 3, 2, 1)
    assert batch.parents == (-1, 0, 0, 0)
    assert Batch.from_shared_prompt([9], [[4, 5], [6]]).position_ids.tolist() == [0, 1, 2, 0, 1]


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=5),
    st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=3),
)
def test_a_shared_prompt_has_the_targets_of_its_sequences(prompt, responses):
    shared = Batch.from_shared_prompt(prompt, responses)
    alone = Batch.from_documents(
        [prompt + response for response in responses], [[0] * len(prompt) + [1] * len(r) for r in responses]
    )

    def targets(batch):
        """Each target with its position and what it is predicted from."""
        rows = zip(batch.position_ids, batch.input_ids, batch.labels, strict=True)
        return sorted((*map(int, row),) for row in rows if row[2] != -100)

    assert targets(shared) == targets(alone)
    assert shared.num_targets == sum(map(len, responses))
    assert shared.seq_len == len(prompt) - 1 + sum(map(len, responses)) + len(responses)


def test_concat_keeps_prompts_and_responses_together():
    one, plain = Batch.from_shared_prompt([1, 2, 3], [[4], [5]]), Batch.from_documents([[6, 7]])
    joined = Batch.concat([plain, one, one])
    assert joined.lengths == (2, 2, 2, 2, 2, 2, 2)
    assert joined.parents == (-1, -1, 1, 1, -1, 4, 4)
    assert joined.position_ids.tolist() == [0, 1, *[0, 1, 2, 3, 2, 3] * 2]
    assert Batch.concat([plain, plain]).parents == ()


def test_parents_are_checked():
    places = positions([4, 4], [-1, 0])
    assert places.tolist() == list(range(8))
    labels = shift_labels(IDS8, [4, 4])
    assert Batch(IDS8, labels, places, (4, 4), (-1, 0)).parents == (-1, 0)
    assert Batch(IDS8, labels, positions([4, 4]), (4, 4), (-1, -1)).parents == ()
    with pytest.raises(DataError, match=r"position 0 at token 4 should be 4: .* in every document that has no parent"):
        Batch(IDS8, labels, positions([4, 4]), (4, 4), (-1, 0))
    with pytest.raises(DataError, match="1 parents for 2 documents"):
        Batch(IDS8, labels, places, (4, 4), (-1,))
    for i, parents in enumerate(([0, -1, -1], [-1, 2, -1], [-1, 0, 1], [-2, -1, -1], [-1, -1, -9])):
        with pytest.raises(DataError, match=r"parent -?\d of document \d is not an earlier document") as caught:
            positions([1, 1, 1], parents)
        assert f"of document {[0, 1, 2, 0, 2][i]} " in str(caught.value)


def test_prompts_that_are_refused():
    with pytest.raises(DataError, match="a prompt of 0 tokens with 1 responses; both must be at least 1"):
        Batch.from_shared_prompt([], [[1]])
    with pytest.raises(DataError, match="a prompt of 2 tokens with 0 responses; both must be at least 1"):
        Batch.from_shared_prompt([1, 2], [])
    with pytest.raises(DataError, match=r"loss_mask of response 1 has shape \(1,\), but the ids have shape \(2,\)"):
        Batch.from_shared_prompt([1], [[2], [3, 4]], [None, [1]])


# The guide.


def test_the_python_of_the_guide_runs():
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S)
    assert len(blocks) == 6
    exec("".join(blocks), {})
