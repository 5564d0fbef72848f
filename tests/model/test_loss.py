"""The loss against values worked out by hand and against plain, unchunked cross-entropy in fp64; on real ranks, each with a
part of the vocabulary, too."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from longspan.errors import SpecError
from longspan.model import VocabShard, count_targets, mean_loss_scale, token_loss_sum
from tests.launches import Launches, on_meta
from tests.oracle import raised
from tests.ranks import run_ranks

from .reference import relative_error

ZIGZAG = ([0, 1, 6, 7], [2, 3, 4, 5])
CONTIGUOUS = ([0, 1, 2, 3], [4, 5, 6, 7])
STRIPED = ([0, 2, 4, 6], [1, 3, 5, 7])


def tokens_with_losses(losses: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and a head whose token losses against label 0 are as given: of logits (0, a) it is log(1 + e^a)."""
    hidden = torch.tensor([[0.0, math.log(math.expm1(loss))] for loss in losses], dtype=torch.float64)
    return hidden.requires_grad_(), torch.eye(2, dtype=torch.float64).requires_grad_()


def plain(hidden, labels, weight):
    return F.cross_entropy((hidden @ weight.T).flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum")


def random_case(dtype, num_tokens=64, hidden_size=8, vocab=17):
    generator = torch.Generator().manual_seed(1)
    hidden = (
        torch.randn(1, num_tokens, hidden_size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    )
    weight = torch.randn(vocab, hidden_size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(vocab, (1, num_tokens), generator=generator)
    labels[0, ::5] = -100
    return hidden, labels, weight


@pytest.mark.parametrize("shards", [ZIGZAG, CONTIGUOUS, STRIPED])
def test_mean_is_over_all_valid_tokens_in_every_layout(shards):
    hidden, weight = tokens_with_losses([9, 9, 9, 2, 4, 6, 8, 10])
    labels = torch.tensor([-100, -100, -100, 0, 0, 0, 0, 0])
    scale = mean_loss_scale(count_targets(labels), group_size=2)
    losses = [token_loss_sum(hidden[own], labels[own], weight) * scale for own in shards]
    assert (sum(losses) / 2).item() == pytest.approx(6.0, rel=1e-12)  # what a wrapper that averages over 2 ranks makes


def test_accumulated_micro_batches_weigh_by_their_tokens():
    batches = [[5.0], [1.0] * 7]
    sums = [
        token_loss_sum(hidden, torch.zeros(len(hidden), dtype=torch.int64), weight)
        for hidden, weight in map(tokens_with_losses, batches)
    ]
    assert (sum(sums) * mean_loss_scale(8, group_size=1)).item() == pytest.approx(1.5, rel=1e-12)


def test_padding_on_one_rank_leaves_the_mean_of_the_real_tokens():
    hidden, weight = tokens_with_losses([1, 2, 3, 4, 5, 6, 7, 8] + [50] * 8)
    labels = torch.tensor([0] * 8 + [-100] * 8)
    scale = mean_loss_scale(8, group_size=2)
    losses = [token_loss_sum(hidden[own], labels[own], weight) * scale for own in (slice(0, 8), slice(8, 16))]
    assert losses[1].item() == 0.0
    losses[1].backward()
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))
    assert torch.equal(weight.grad, torch.zeros_like(weight))
    losses[0].backward()
    assert hidden.grad.isfinite().all()
    assert weight.grad.isfinite().all()
    assert (sum(losses) / 2).item() == pytest.approx(4.5, rel=1e-12)


def test_a_wholly_ignored_batch_is_zero_and_warns():
    hidden, weight = tokens_with_losses([1, 2])
    labels = torch.full((2,), -100)
    with pytest.warns(UserWarning, match="every label of the global batch is ignored"):
        scale = mean_loss_scale(count_targets(labels), group_size=4)
    loss = token_loss_sum(hidden, labels, weight) * scale
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_a_batch_with_a_target_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert mean_loss_scale(10, group_size=4) == 0.4


def test_an_empty_shard_is_zero_and_stays_in_the_graph():
    hidden = torch.zeros(2, 0, 4, requires_grad=True)
    weight = torch.ones(3, 4, requires_grad=True)
    loss = token_loss_sum(hidden, torch.zeros(2, 0, dtype=torch.int64), weight)
    loss.backward()
    assert loss.item() == 0.0
    assert hidden.grad.shape == (2, 0, 4)
    assert torch.equal(weight.grad, torch.zeros(3, 4))


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64, 1000, None])
def test_chunks_do_not_change_loss_or_gradients(chunk_tokens):
    hidden, labels, weight = random_case(torch.float64)
    right = torch.autograd.grad(plain(hidden, labels, weight) * 3, (hidden, weight))
    loss = token_loss_sum(hidden, labels, weight, chunk_tokens=chunk_tokens)
    assert loss.item() == pytest.approx(plain(hidden, labels, weight).item(), rel=1e-13)
    for value, expected in zip(torch.autograd.grad(loss * 3, (hidden, weight)), right, strict=True):
        assert relative_error(value, expected) < 1e-13


def test_gradcheck():
    hidden, labels, weight = random_case(torch.float64, num_tokens=6, hidden_size=3, vocab=5)
    assert torch.autograd.gradcheck(lambda h, w: token_loss_sum(h, labels, w, chunk_tokens=4), (hidden, weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_good_as_unchunked_torch_over_many_chunks(dtype):
    hidden, labels, weight = random_case(dtype, num_tokens=4096)
    h64, w64 = (x.detach().double().requires_grad_() for x in (hidden, weight))
    right = [plain(h64, labels, w64), *torch.autograd.grad(plain(h64, labels, w64), (h64, w64))]
    logits = (hidden @ weight.T)[0].float()
    torch_loss = F.cross_entropy(logits, labels[0], ignore_index=-100, reduction="sum")
    loss = token_loss_sum(hidden, labels, weight, chunk_tokens=8)
    theirs = [torch_loss, *torch.autograd.grad(torch_loss, (hidden, weight))]
    ours = [loss, *torch.autograd.grad(loss, (hidden, weight))]
    assert [x.dtype for x in ours] == [torch.float32, dtype, dtype]
    for value, reference, expected in zip(ours, theirs, right, strict=True):
        assert relative_error(value.double(), expected) <= 2 * relative_error(reference.double(), expected) + 1e-6


def test_only_a_chunk_of_logits_exists_at_a_time(monkeypatch):
    seen = []
    real = F.linear
    monkeypatch.setattr(F, "linear", lambda h, w: seen.append(real(h, w)) or seen[-1])
    hidden, labels, weight = random_case(torch.float32)
    token_loss_sum(hidden, labels, weight, chunk_tokens=20).backward()
    assert [tuple(logits.shape) for logits in seen] == [(20, 17), (20, 17), (20, 17), (4, 17)] * 2


def test_nan_in_an_ignored_row_does_not_reach_the_loss():
    hidden = torch.tensor([[math.nan, 0.0], [0.0, 0.0]])
    loss = token_loss_sum(hidden, torch.tensor([-100, 1]), torch.eye(2))
    assert loss.item() == pytest.approx(math.log(2), rel=1e-6)


def test_autocast_sees_the_same_logits_in_forward_and_backward():
    hidden, labels, weight = random_case(torch.float32)
    right = token_loss_sum(hidden, labels, weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(token_loss_sum(hidden, labels, weight), right)


class Outputs(TorchDispatchMode):
    """The shapes of all tensors that operators return, and the names of the operators."""

    def __init__(self):
        super().__init__()
        self.sizes, self.names = set(), []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.names.append(function.name())
        self.sizes.update(
            size for x in torch.utils._pytree.tree_leaves(result) if torch.is_tensor(x) for size in x.shape
        )
        return result


def _by_vocabulary(group, rank, dtype, sizes, labels, chunk_tokens):
    """Loss, this part's gradients, and what was made: the head's rows are cut into `sizes`."""
    hidden, _, weight = random_case(dtype, num_tokens=labels.numel(), vocab=sum(sizes))
    start = sum(sizes[:rank])
    own = weight.detach()[start : start + sizes[rank]].clone().requires_grad_()
    with Outputs() as outputs:
        vocab = VocabShard(start, sum(sizes), group)
        loss = token_loss_sum(hidden, labels, own, chunk_tokens=chunk_tokens, vocab=vocab)
        grads = torch.autograd.grad(loss * 3, (hidden, own))
    collectives = [name for name in outputs.names if name.startswith("c10d")]
    return loss.detach(), *grads, outputs.sizes, collectives


PARTS = [(16, 15), (11, 11, 9), (1, 0, 30)]


@pytest.mark.parametrize("chunk_tokens", [7, None])
@pytest.mark.parametrize("sizes", PARTS, ids=str)
def test_parts_of_the_vocabulary_give_the_loss_and_gradients_of_the_whole(sizes, chunk_tokens):
    hidden, labels, weight = random_case(torch.float64, num_tokens=60, vocab=31)
    right = plain(hidden, labels, weight)
    right_hidden, right_weight = torch.autograd.grad(right * 3, (hidden, weight))
    losses, by_hidden, by_weight, made, collectives = zip(
        *run_ranks(len(sizes), _by_vocabulary, torch.float64, sizes, labels, chunk_tokens), strict=True
    )
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    assert losses[0].item() == pytest.approx(right.item(), rel=1e-13)
    assert relative_error(sum(by_hidden), right_hidden) < 1e-13
    assert [len(grad) for grad in by_weight] == list(sizes)
    assert relative_error(torch.cat(by_weight), right_weight) < 1e-13
    # Each rank makes logits of its own part alone; one all-gather in forward is all that travels.
    assert all(size in own and 31 not in own for size, own in zip(sizes, made, strict=True))
    assert all(len(names) == 1 and "gather" in names[0] for names in collectives)


def test_parts_in_half_precision_are_as_good_as_the_whole():
    hidden, labels, weight = random_case(torch.bfloat16, num_tokens=512, vocab=31)
    h64, w64 = (x.detach().double().requires_grad_() for x in (hidden, weight))
    right = plain(h64, labels, w64)
    right = [right, *torch.autograd.grad(right * 3, (h64, w64))]
    whole = token_loss_sum(hidden, labels, weight, chunk_tokens=64)
    whole = [whole, *torch.autograd.grad(whole * 3, (hidden, weight))]
    results = run_ranks(2, _by_vocabulary, torch.bfloat16, (16, 15), labels, 64)
    losses, by_hidden, by_weight, _, _ = zip(*results, strict=True)
    parts = [losses[0], sum(x.float() for x in by_hidden), torch.cat(by_weight)]
    assert [loss.dtype for loss in losses] == [torch.float32] * 2
    assert {grad.dtype for grad in (*by_hidden, *by_weight)} == {torch.bfloat16}
    for value, reference, expected in zip(parts, whole, right, strict=True):
        assert relative_error(value.double(), expected) <= 2 * relative_error(reference.double(), expected) + 1e-6


@pytest.mark.parametrize("labels", [torch.full((1, 9), -100), torch.zeros(1, 0, dtype=torch.int64)])
def test_parts_without_a_target_are_zero(labels):
    for loss, by_hidden, by_weight, _, _ in run_ranks(2, _by_vocabulary, torch.float64, (3, 2), labels, 4):
        assert loss.item() == 0.0
        assert torch.equal(by_hidden, torch.zeros(*labels.shape, 8, dtype=torch.float64))
        assert torch.equal(by_weight, torch.zeros(len(by_weight), 8, dtype=torch.float64))


def _refused(group, rank, start, label):
    vocab = VocabShard(start, 6, group)
    return raised(token_loss_sum, torch.zeros(1, 4), torch.tensor([label]), torch.zeros(3, 4), vocab=vocab)


@pytest.mark.parametrize(
    ("start", "label", "words"),
    [
        (3, 6, "label 6 is outside [0, 6)"),
        (4, 0, "3 rows that start at row 4 exceed a head of 6 rows\n\nhint: set start to"),
        (-1, 0, "3 rows that start at row -1 exceed a head of 6"),
    ],
)
def test_a_part_refuses_what_the_whole_head_has_not(start, label, words):
    for kind, text in run_ranks(2, _refused, start, label):
        assert kind == "SpecError"
        assert text.startswith(words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"labels": torch.tensor([0, 5])}, r"label 5 is outside \[0, 3\)[\s\S]*use -100"),
        ({"labels": torch.tensor([-1, 0])}, r"label -1 is outside \[0, 3\)"),
        ({"labels": torch.tensor([0])}, r"labels \(1,\) do not match hidden \(2, 4\)[\s\S]*then shard them"),
        ({"labels": torch.tensor([0, 1], dtype=torch.int32)}, r"labels are torch.int32[\s\S]*int64"),
        ({"weight": torch.zeros(3, 5)}, r"weight \(3, 5\) torch.float32 does not match hidden \(2, 4\)"),
        ({"weight": torch.zeros(3, 4).double()}, r"weight \(3, 4\) torch.float64 does not match"),
        ({"chunk_tokens": 0}, r"chunk_tokens 0 is below 1[\s\S]*64 MiB"),
    ],
)
def test_errors_name_the_values_and_the_way_out(change, words):
    given = {"hidden": torch.zeros(2, 4), "labels": torch.tensor([0, 1]), "weight": torch.zeros(3, 4)} | change
    with pytest.raises(SpecError, match=words):
        token_loss_sum(**given)


@pytest.mark.parametrize(("targets", "group"), [(-1, 1), (3, 0)])
def test_scale_refuses_impossible_counts(targets, group):
    with pytest.raises(SpecError, match=rf"num_targets_global {targets} .* group_size {group} "):
        mean_loss_scale(targets, group)


def test_on_an_accelerator_products_are_wide_and_few():
    # 1 GiB of fp32 logits over 128k is 2,048 tokens: 16k tokens make 8 chunks, each of one product in forward and three in
    # backward (the logits again, the gradients of hidden states and head) with a dozen operators round them.
    hidden, weight = (on_meta(*shape).requires_grad_() for shape in ((2**14, 2**12), (2**17, 2**12)))
    labels = on_meta(2**14, dtype=torch.int64)
    with Launches() as seen:
        token_loss_sum(hidden, labels, weight).backward()
    assert seen.counts["mm"] == 4 * 8
    assert seen.total <= 8 * 17 + 40


def test_chunk_tokens_overrides_the_device():
    hidden, weight, labels = on_meta(100, 8), on_meta(50, 8), on_meta(100, dtype=torch.int64)
    with Launches() as seen:
        token_loss_sum(hidden, labels, weight, chunk_tokens=10)
    assert seen.counts["mm"] == 10
