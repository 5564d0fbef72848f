"""Models of transformers under context parallelism equal themselves on one rank, one document at a time."""

from functools import cache

import pytest
import torch

from longspan import ContextParallel, hf
from longspan.data import Batch
from longspan.errors import DisagreementError, SpecError
from longspan.names import IGNORED, LAYOUTS
from longspan.plan import Mask
from tests.hf.models import (
    LENGTHS,
    MODELS,
    alone,
    assert_same,
    documents,
    gradients,
    loss_of,
    packed,
    shifted,
)  # fmt: skip
from tests.ranks import run_threads

Tensor = torch.Tensor
Share = tuple[Tensor, dict[str, Tensor]]
TARGETS = sum(LENGTHS) - len(LENGTHS)
_ROUTES = ["ring", "allgather", "rotate", "exchange", "ulysses", "usp"]
_CROSSES = [(layout, route) for layout in LAYOUTS for route in _ROUTES]


@cache
def wanted(kind: str) -> Share:
    return alone(MODELS[kind].build(MODELS[kind].plain), documents())


def train(group, rank: int, kind: str, layout: str, route: str) -> Share:
    model = MODELS[kind].build("longspan")
    cp = ContextParallel(group, layout, route, heads=(4, 2))
    with hf.sequence(cp, model, packed(documents())) as seq:
        logits = model(**seq.inputs).logits
    loss = loss_of(logits, seq.inputs["shift_labels"], TARGETS)
    seq.backward(loss)
    return loss.detach(), gradients(model)


@pytest.mark.parametrize(("number", "kind"), list(enumerate(MODELS)), ids=list(MODELS))
def test_packed_documents_equal_each_alone(number: int, kind: str) -> None:
    """Each model over two of the crosses of layout and route, so that all are met."""
    for layout, route in (_CROSSES[(2 * number + extra) % len(_CROSSES)] for extra in range(2)):
        assert_same(run_threads(2, train, kind, layout, route), wanted(kind), MODELS[kind].bounds)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", MODELS)
def test_packed_documents_equal_each_alone_everywhere(kind: str) -> None:
    for ranks in (2, 3):
        for layout, route in _CROSSES:
            if ranks == 2 or route not in ("ulysses", "usp"):
                assert_same(run_threads(ranks, train, kind, layout, route), wanted(kind), MODELS[kind].bounds)


@pytest.mark.parametrize("window", [1, 7, 60])
def test_windows_shorter_and_longer_than_a_shard(window: int) -> None:
    tiny = MODELS["mistral"]
    parts = documents([96])

    def on_ranks(group, rank: int) -> Share:
        model = tiny.build("longspan")
        model.config.sliding_window = window
        with hf.sequence(ContextParallel(group), model, packed(parts)) as seq:
            loss = loss_of(model(**seq.inputs).logits, seq.inputs["shift_labels"], 95)
        seq.backward(loss)
        return loss.detach(), gradients(model)

    plain = tiny.build("sdpa")
    plain.config.sliding_window = window
    assert_same(run_threads(2, on_ranks), alone(plain, parts), tiny.bounds)


def padded(side: str) -> dict[str, Tensor]:
    rows, mask = torch.zeros(3, 40, dtype=torch.long), torch.zeros(3, 40, dtype=torch.long)
    for row, part in enumerate(documents()):
        length = part.shape[1]
        place = slice(40 - length, 40) if side == "left" else slice(0, length)
        rows[row, place], mask[row, place] = part[0], 1
    return {"input_ids": rows, "attention_mask": mask, "labels": rows.where(mask == 1, IGNORED)}


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_equal_rows_alone_and_come_back(side: str) -> None:
    def on_ranks(group, rank: int) -> tuple[Share, Tensor]:
        model = MODELS["llama"].build("longspan")
        with hf.sequence(ContextParallel(group), model, padded(side)) as seq:
            logits = model(**seq.inputs).logits
        loss = loss_of(logits, seq.inputs["shift_labels"], TARGETS)
        seq.backward(loss)
        return (loss.detach(), gradients(model)), seq.to_rows(logits.detach()[..., 5], fill=7.0)

    results = run_threads(2, on_ranks)
    assert_same([share for share, _ in results], wanted("llama"), MODELS["llama"].bounds)
    plain = MODELS["llama"].build("sdpa")
    for _, rows in results:
        for row, part in zip(rows, documents(), strict=True):
            length = part.shape[1]
            own, rest = (row[40 - length :], row[: 40 - length]) if side == "left" else (row[:length], row[length:])
            torch.testing.assert_close(own, plain(input_ids=part).logits[0, :, 5], rtol=1e-12, atol=1e-12)
            assert (rest == 7.0).all()


def test_rows_shorter_than_the_group_and_ranks_without_targets() -> None:
    """Three tokens over four ranks, of which one is a target; and a row without any."""

    def on_ranks(group, rank: int, labels: Tensor) -> tuple[Share, float]:
        model = MODELS["llama"].build("longspan")
        batch = {"input_ids": torch.tensor([[5, 6, 7]]), "labels": labels}
        with hf.sequence(ContextParallel(group, "contiguous"), model, batch) as seq:
            out = model(**seq.inputs)
            loss = loss_of(out.logits, seq.inputs["shift_labels"], 1)
        seq.backward(loss)
        return (loss.detach(), gradients(model)), out.loss.item()

    plain = MODELS["llama"].build("sdpa")
    loss = loss_of(plain(input_ids=torch.tensor([[5, 6, 7]])).logits, torch.tensor([[-100, 7, -100]]), 1)
    loss.backward()
    results = run_threads(4, on_ranks, torch.tensor([[-100, -100, 7]]))
    assert_same([share for share, _ in results], (loss.detach(), gradients(plain)), MODELS["llama"].bounds)
    assert sum(own for _, own in results) == pytest.approx(loss.item(), abs=1e-6)
    none = run_threads(4, on_ranks, torch.full((1, 3), -100))
    assert all(own == 0 and share == 0 for (share, _), own in none)


def test_losses_of_micro_batches_sum_to_the_mean_over_all_targets() -> None:
    """Two micro-batches interleaved: both forwards, then both backwards. The number of targets is counted beforehand."""
    batches = [packed(documents([40, 17])), packed(documents([39], seed=2))]
    parts = [*documents([40, 17]), *documents([39], seed=2)]

    def on_ranks(group, rank: int) -> tuple[float, dict[str, Tensor]]:
        model = MODELS["llama"].build("longspan")
        cp = ContextParallel(group)
        count, losses = hf.count_targets(batches), []
        assert count == TARGETS
        for batch in batches:
            with hf.sequence(cp, model, batch, num_targets=count) as seq:
                losses.append((seq, model(**seq.inputs).loss))
        for seq, loss in losses:
            seq.backward(loss)
        return sum(loss.detach() for _, loss in losses), gradients(model)

    assert_same(run_threads(2, on_ranks), alone(MODELS["llama"].build("sdpa"), parts), (1e-5, 1e-6))


def test_data_parallel_ranks_count_targets_together() -> None:
    def on_ranks(group, rank: int) -> int:
        return hf.count_targets([packed(documents([10 + rank]))], group)

    assert run_threads(2, on_ranks) == [9 + 10] * 2


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_the_balancing_loss_of_experts_is_that_of_the_whole_row(kind: str) -> None:
    """Held against the formula on the router logits of one rank, documents side by side under a dense mask."""
    parts = documents([40, 17])

    def on_ranks(group, rank: int) -> tuple[Tensor, dict[str, Tensor]]:
        model = MODELS[kind].build("longspan")
        with hf.sequence(ContextParallel(group, pad_to_multiple_of=8), model, packed(parts)) as seq:
            aux = model(**seq.inputs, output_router_logits=True).aux_loss
        aux.backward()
        return aux.detach(), gradients(model)

    model = MODELS[kind].build("sdpa" if kind != "gpt_oss" else "eager")
    routers = [model(input_ids=part, output_router_logits=True, use_cache=False).router_logits for part in parts]
    weights = torch.cat([logits.softmax(-1) for document in routers for logits in document])
    chosen = torch.zeros_like(weights).scatter_(1, weights.topk(2, -1).indices, 1.0)
    aux = (chosen.mean(0) * weights.mean(0)).sum() * weights.shape[1]
    aux.backward()
    assert_same(run_threads(2, on_ranks), (aux.detach(), gradients(model)), (1e-6, 1e-5))


def test_logits_of_chosen_positions_and_the_gradient_of_what_is_gathered() -> None:
    """The same loss on every rank, from values gathered of all: gradients sum to those of one rank."""
    (part,) = documents([40])
    positions = [39, 3, 20]

    def on_ranks(group, rank: int) -> Share:
        model = MODELS["llama"].build("longspan")
        with hf.sequence(ContextParallel(group), model, {"input_ids": part}) as seq:
            assert "labels" not in seq.inputs
            chosen = seq.unshard(model(**seq.inputs).logits, positions=positions)
        loss = chosen.square().sum()
        seq.backward(loss)
        return loss.detach() / 3, gradients(model)

    plain = MODELS["llama"].build("sdpa")
    loss = plain(input_ids=part).logits[:, positions].square().sum()
    loss.backward()
    assert_same(run_threads(3, on_ranks), (loss.detach(), gradients(plain)), (1e-10, 1e-10))


def test_blocks_of_image_tokens_across_the_edge_of_a_shard() -> None:
    """Against the dense masks of Gemma 3: causal or the same image, and within the window."""
    tiny, (part,) = MODELS["gemma3_text"], documents([60])
    image = torch.zeros(1, 60, dtype=torch.long)
    image[0, 5:12] = image[0, 26:34] = 1  # the second crosses the middle

    def on_ranks(group, rank: int, layout: str) -> Share:
        model = tiny.build("longspan")
        batch = {"input_ids": part, "labels": part, "token_type_ids": image}
        with hf.sequence(ContextParallel(group, layout), model, batch) as seq:
            loss = loss_of(model(**seq.inputs).logits, seq.inputs["shift_labels"], 59)
        seq.backward(loss)
        return loss.detach(), gradients(model)

    query, key = torch.arange(60)[:, None], torch.arange(60)
    run = (image[0].diff(prepend=torch.zeros(1, dtype=torch.long)) == 1).cumsum(0) * image[0]
    full = (key <= query) | ((run[:, None] == run) & (run > 0))
    plain = tiny.build("sdpa")
    masks = {"full_attention": full[None, None], "sliding_attention": (full & (key > query - 20))[None, None]}
    loss = loss_of(plain(input_ids=part, attention_mask=masks, use_cache=False).logits, shifted(part), 59)
    loss.backward()
    for layout in ("contiguous", "zigzag"):
        assert_same(run_threads(2, on_ranks, layout), (loss.detach(), gradients(plain)), tiny.bounds)


def test_chunks_begin_in_every_document() -> None:
    assert (Mask.chunked([5, 3], 2).dense() == Mask.documents([2, 2, 1, 2, 1]).dense()).all()
    with pytest.raises(SpecError, match="chunk=0 is below 1"):
        Mask.chunked([5], 0)


def test_evaluation_and_generation_outside_a_sequence_are_those_of_one_rank() -> None:
    """Soft-caps, sinks and windows too, with padding, in the two ways that transformers runs them."""
    for kind in ("llama", "gemma2", "gpt_oss"):
        ours, plain = MODELS[kind].build("longspan").eval(), MODELS[kind].build(MODELS[kind].plain).eval()
        rows = padded("left")
        given = {"input_ids": rows["input_ids"], "attention_mask": rows["attention_mask"]}
        with torch.no_grad():
            real = rows["attention_mask"] == 1
            torch.testing.assert_close(
                ours(**given).logits[real], plain(**given).logits[real], rtol=1e-5, atol=1e-5, equal_nan=True
            )
            prompt = documents([12])[0]
            options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
            assert ours.generate(prompt, **options).tolist() == plain.generate(prompt, **options).tolist()


def test_ranks_with_different_rows_all_get_told() -> None:
    def on_ranks(group, rank: int) -> str:
        model = MODELS["llama"].build("longspan")
        with (
            pytest.raises(DisagreementError) as told,
            hf.sequence(ContextParallel(group), model, packed(documents(seed=rank))),
        ):
            pass
        return str(told.value)

    assert all("different token ids" in text for text in run_threads(2, on_ranks))


def test_a_batch_of_ours_is_taken_as_it_is() -> None:
    batch = Batch.from_documents([part[0].numpy() for part in documents()])

    def on_ranks(group, rank: int) -> Share:
        model = MODELS["llama"].build("longspan")
        with hf.sequence(ContextParallel(group), model, batch) as seq:
            loss = loss_of(model(**seq.inputs).logits, seq.inputs["shift_labels"], TARGETS)
        seq.backward(loss)
        return loss.detach(), gradients(model)

    assert_same(run_threads(2, on_ranks), wanted("llama"), MODELS["llama"].bounds)
