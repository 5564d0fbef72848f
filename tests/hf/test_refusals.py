"""Wrong uses of `longspan.hf`, each told before anything is computed, with the values and the way out."""

import pytest
import torch
import torch.nn as nn
from transformers import masking_utils

from longspan import ContextParallel, hf
from longspan.errors import DataError, DisagreementError, LongspanError, SpecError
from longspan.hf.interface import attention_function
from longspan.hf.wrappers import averaging_ranks
from tests.hf.models import MODELS, documents, packed
from tests.ranks import run_threads

IDS = documents([12])[0]
ONES = torch.ones(1, 12, dtype=torch.long)
BATCHES = {
    "no ids": ({"labels": IDS}, "the batch holds no input_ids", "leave other keys out"),
    "shifted": ({"input_ids": IDS, "shift_labels": IDS}, "the batch holds 'shift_labels'", "give labels as the collator makes"),
    "embeddings": ({"input_ids": IDS, "inputs_embeds": IDS}, "the batch holds 'inputs_embeds'", "give input_ids"),
    "logits to keep": ({"input_ids": IDS, "logits_to_keep": 1}, "the batch holds 'logits_to_keep'", "seq.unshard(out.logits"),
    "a cache": ({"input_ids": IDS, "past_key_values": 1}, "the batch holds 'past_key_values'", "outside hf.sequence"),
    "pixels": ({"input_ids": IDS, "pixel_values": IDS}, "the batch holds 'pixel_values'", "beside seq.inputs"),
    "cu_seq_lens": ({"input_ids": IDS, "cu_seq_lens_q": IDS}, "the batch holds 'cu_seq_lens_q'", "that restart at 0"),
    "a dense mask": (
        {"input_ids": IDS, "attention_mask": torch.ones(1, 1, 12, 12)}, "attention_mask of shape (1, 1, 12, 12)", "2-D",
    ),
    "a mask with holes": (
        {"input_ids": IDS, "attention_mask": torch.tensor([[1, 1, 0, 1] * 3])}, "padding between", "",
    ),
    "positions of a shard": (
        {"input_ids": IDS, "position_ids": torch.arange(6, 18)[None]}, "position 6 at", "of the global row, before sharding",
    ),
    "positions over padding": (
        {
            "input_ids": IDS,
            "attention_mask": torch.tensor([[0, 0, *[1] * 10]]),
            "position_ids": torch.arange(12)[None],
        },
        "position_ids of padded rows do not count the tokens of each row from 0", "leave position_ids out",
    ),
    "labels of another length": ({"input_ids": IDS, "labels": IDS[:, :5]}, "labels", ""),
    "ids of three dims": ({"input_ids": IDS[None]}, "input_ids", ""),
}  # fmt: skip


def told(cp: ContextParallel, model: nn.Module, batch: object) -> LongspanError:
    with pytest.raises(LongspanError) as error, hf.sequence(cp, model, batch):
        pass
    return error.value


def test_batches_that_have_no_meaning_on_a_shard() -> None:
    def on_ranks(group, rank: int) -> dict[str, tuple[str, str]]:
        model, cp = MODELS["llama"].build("longspan"), ContextParallel(group)
        errors = {name: told(cp, model, batch) for name, (batch, *_) in BATCHES.items()}
        assert all(isinstance(error, SpecError | DataError) for error in errors.values())
        return {name: (error.message, error.hint or "") for name, error in errors.items()}

    for errors in run_threads(2, on_ranks):
        for name, (_, message, hint) in BATCHES.items():
            assert message in errors[name][0], (name, errors[name])
            assert hint in errors[name][1], (name, errors[name])


def test_one_rank_s_wrong_batch_is_told_on_all() -> None:
    def on_ranks(group, rank: int) -> str:
        batch = {"input_ids": IDS} if rank else {"input_ids": IDS, "pixel_values": IDS}
        error = told(ContextParallel(group), MODELS["llama"].build("longspan"), batch)
        assert isinstance(error, DisagreementError if rank else SpecError)
        return str(error)

    first, second = run_threads(2, on_ranks)
    assert first.startswith("the batch holds 'pixel_values'")
    assert second.startswith("rank 0 failed: the batch holds 'pixel_values'")


def test_ranks_that_count_other_targets_are_told() -> None:
    def on_ranks(group, rank: int) -> None:
        model = MODELS["llama"].build("longspan")
        with (
            pytest.raises(DisagreementError, match="different token ids"),
            hf.sequence(ContextParallel(group), model, packed(documents()), num_targets=90 + rank),
        ):
            pass

    run_threads(2, on_ranks)


def test_models_that_are_not_set_up() -> None:
    cp = ContextParallel(None)
    sdpa = told(cp, MODELS["llama"].build("sdpa"), packed(documents()))
    assert sdpa.message == "LlamaForCausalLM was built with attn_implementation='sdpa'"
    assert 'model.set_attn_implementation("longspan")' in str(sdpa)
    assert "Linear is not a model of transformers: it has no config" in str(
        told(cp, nn.Linear(2, 2), packed(documents()))
    )
    spread = MODELS["llama"].build("longspan")
    spread.hf_device_map = {"model.layers.0": "cuda:0", "model.layers.1": "cuda:1"}
    assert "lies on devices cuda:0, cuda:1 (hf_device_map)" in str(told(cp, spread, packed(documents())))


CALLS = {
    "logits_to_keep": ({"logits_to_keep": 1}, "was given logits_to_keep= within hf.sequence", "seq.unshard(out.logits"),
    "use_cache": ({"use_cache": True}, "was given use_cache= within hf.sequence", "generation"),
    "output_attentions": ({"output_attentions": True}, "was given output_attentions=", "never computed"),
    "other tokens": ({"input_ids": IDS}, "was given other tokens than those of hf.sequence", "model(**seq.inputs)"),
    "own labels": ({"labels": IDS, "shift_labels": None}, "was given labels, which it would shift within", "whole row"),
    "selected keys": ({"indices": IDS}, "LlamaAttention passed indices= to its attention", "hf.check"),
    "a mask of its own": (
        {"attention_mask": torch.ones(1, 1, 48, 48).bool()},
        "calls attention without the mask of",
        "text model",
    ),
}


def test_calls_of_the_model_within_a_sequence() -> None:
    def on_ranks(group, rank: int) -> None:
        model, cp = MODELS["llama"].build("longspan"), ContextParallel(group)
        for name, (keywords, message, hint) in CALLS.items():
            with hf.sequence(cp, model, packed(documents())) as seq:
                with pytest.raises(SpecError) as error:
                    model(**(seq.inputs | keywords))
                assert message in error.value.message, name
                assert hint in str(error.value.hint), name
                if name == "logits_to_keep":
                    with (
                        pytest.raises(SpecError, match=r"entered inside hf\.sequence") as nested,
                        hf.sequence(cp, model, {}),
                    ):
                        pass
                    assert "backward may run later" in str(nested.value)
                with pytest.raises(SpecError, match=r"positions \[96\] are not global token positions 0..95"):
                    seq.unshard(torch.zeros(1, 48), positions=[96])

    run_threads(2, on_ranks)


def test_dropout_of_attention_is_refused_in_training_alone() -> None:
    def on_ranks(group, rank: int) -> tuple[str, str]:
        model = MODELS["llama"].build("longspan").train()
        model.model.layers[1].self_attn.attention_dropout = 0.25
        cp = ContextParallel(group)
        at_start = str(told(cp, model, packed(documents())))
        with hf.sequence(cp, model.eval(), packed(documents())) as seq:
            assert model(**seq.inputs).loss > 0
            with pytest.raises(SpecError) as error:
                model.train()(**seq.inputs)
        return at_start, str(error.value)

    for at_start, at_the_call in run_threads(2, on_ranks):
        assert "layer 1, model.layers.1.self_attn (LlamaAttention) has dropout attention_dropout=0.25" in at_start
        assert at_the_call.startswith(
            "LlamaAttention has attention dropout 0.25, which longspan attention does not have"
        )
        assert "attention_dropout=0.0" in at_the_call


def test_a_forgotten_sequence_is_refused_in_training_with_a_cp_group() -> None:
    def on_ranks(group, rank: int) -> str:
        model, cp = MODELS["llama"].build("longspan").train(), ContextParallel(group)
        with pytest.raises(SpecError) as error:
            model(input_ids=IDS)
        assert cp.size == 2
        assert model.eval()(input_ids=IDS).logits.shape == (1, 12, 64)
        return str(error.value)

    for text in run_threads(2, on_ranks):
        assert "attends outside hf.sequence, in training, in a run with context parallelism" in text
        assert "with hf.sequence(cp, model, batch) as seq" in text


def test_masks_that_a_model_lays_over_its_own_are_refused(monkeypatch) -> None:
    model, cp = MODELS["llama"].build("longspan"), ContextParallel(None)
    hf.check(model, 96)
    plain = masking_utils.create_causal_mask

    def with_overlay(**given):
        return plain(**given, or_mask_function=lambda batch, head, query, key: key < 3)

    monkeypatch.setattr("transformers.models.llama.modeling_llama.create_causal_mask", with_overlay)
    with hf.sequence(cp, model, packed(documents())) as seq, pytest.raises(SpecError) as error:
        model(**seq.inputs)
    assert error.value.message.startswith("the model lays a mask of its own over causal attention")
    assert "(LlamaAttention) lays a mask of its own" in str(
        told(cp, MODELS["llama"].build("longspan"), packed(documents()))
    )


def test_image_tokens_in_chunks_are_refused() -> None:
    model = MODELS["llama4_text"].build("longspan")
    batch = {"input_ids": IDS, "token_type_ids": ONES}
    assert "which a 'chunk-8' mask does not have" in str(told(ContextParallel(None), model, batch))


def test_sinks_and_softcaps_without_an_eager_attention_are_refused_outside_a_sequence() -> None:
    q = torch.zeros(1, 2, 4, 8)
    with pytest.raises(SpecError, match="Linear passed softcap, which SDPA does not compute, outside") as error:
        attention_function(nn.Linear(1, 1).eval(), q, q, q, None, softcap=3.0)
    assert 'set_attn_implementation("eager")' in str(error.value)


def test_parts_wrapped_over_different_numbers_of_ranks_are_refused(monkeypatch) -> None:
    monkeypatch.setattr("longspan.hf.wrappers._wrappers", lambda model: [(2, [0, 1]), (4, [0, 1, 2, 3])])
    with pytest.raises(SpecError, match=r"average gradients over different numbers of ranks: \[2, 4\]"):
        averaging_ranks(nn.Linear(1, 1), ContextParallel(None))


def test_the_staged_route_is_refused() -> None:
    def on_ranks(group, rank: int) -> str:
        model, cp = MODELS["llama"].build("longspan"), ContextParallel(group, route="upipe", heads=(4, 2))
        with hf.sequence(cp, model, packed(documents())) as seq, pytest.raises(SpecError) as error:
            model(**seq.inputs)
        return str(error.value)

    assert all("route 'upipe' was given q, k and v of all heads" in text for text in run_threads(2, on_ranks))
