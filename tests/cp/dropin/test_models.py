"""Tiny models of transformers inside `context_parallel`, on 2 ranks: as in one process, or refused with a text.

Sequences of 30 tokens, 15 on a rank, zigzag and contiguous. The ranks run all cases in one visit.
"""

import re
import warnings

import pytest
import torch
import torch.nn.functional as F

from longspan import context_parallel
from longspan.plan import Mask
from tests.oracle import raised, relative_error
from tests.ranks import own_ranks, run_ranks

S = 30
LAYOUTS = ("zigzag", "contiguous")
SIZES = {
    "vocab_size": 29,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
SMALL_GPT = {"n_embd": 32, "n_head": 4, "n_layer": 2}
LLAMA4 = {"intermediate_size_mlp": 48, "num_local_experts": 2, "floor_scale": 4}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
MIXED = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 20}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


def make(name, dtype=torch.float64, **options):
    """A random model, in evaluation mode."""
    import transformers

    config = getattr(transformers, f"{name}Config")(**{**SIZES, "experts_implementation": "eager", **options})
    heads = [f"{name.removesuffix('Text')}{head}" for head in ("ForCausalLM", "LMHeadModel", "ForMaskedLM")]
    torch.manual_seed(0)
    return getattr(transformers, next(head for head in heads if hasattr(transformers, head)))(config).to(dtype).eval()


def total(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def error(group, layout, model, *, gives=("position_ids", "attention_mask"), documents=(S,), labels=False, **how):
    """How far logits, loss and gradients inside are from those of each document in one process."""
    ids = torch.randint(3, 29, (1, S), generator=torch.Generator().manual_seed(1))
    targets = ids.roll(-1, 1)
    inputs = {
        "input_ids": ids,
        "position_ids": torch.cat([torch.arange(length) for length in documents])[None],
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": torch.zeros_like(ids),
    }
    inputs = {name: x for name, x in inputs.items() if name in ("input_ids", *gives)}
    wanted = torch.cat([model(part, use_cache=False).logits for part in ids.split(documents, 1)], 1)
    gradients = torch.autograd.grad(total(wanted, targets), list(model.parameters()), allow_unused=True)
    model.zero_grad()
    held = (*inputs.values(), targets)
    with context_parallel(group, buffers=held, buffer_seq_dims=(1,) * len(held), layout=layout, **how) as cp:
        local = model(**inputs, use_cache=False, **({"labels": targets} if labels else {})).logits
        loss = total(local, targets)
        loss.backward()
    errors = [relative_error(cp.unshard(local.detach(), 1), wanted)]
    for x, y in zip(
        (loss.detach(), *(x.grad for x in model.parameters())), (total(wanted, targets), *gradients), strict=True
    ):
        if y is not None:
            torch.distributed.all_reduce(x, group=group)
            errors.append(relative_error(x, y))
    return max(errors)


RIGHT = {
    "Llama": ("Llama", {}, {}),
    "Qwen3": ("Qwen3", {}, {}),
    "Mixtral": ("Mixtral", EXPERTS, {}),
    "Qwen3-MoE": ("Qwen3Moe", EXPERTS, {}),
    "GPT-2": ("GPT2", dict(**SMALL_GPT, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0), {}),
    "OPT": ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32}, {}),
    "BERT": ("Bert", {}, {"gives": ("position_ids", "attention_mask", "token_type_ids")}),
    "a window of the sequence": ("Mistral", {"sliding_window": S}, {}),
    "the window given as mask": ("Mistral", {"sliding_window": 20}, {"mask": Mask.causal(S, window=20)}),
    "documents within the window": (
        "Qwen2",
        {**MIXED, "use_sliding_window": True},
        {"mask": Mask.documents([12, 18]), "documents": (12, 18)},
    ),
    "arange allowed": (
        "Llama4Text",
        dict(**LLAMA4, attention_chunk_size=64, attn_temperature_tuning=False),
        {"allow_local": ["arange"]},
    ),
}

HF = 'call model.set_attn_implementation("longspan") and run the model by longspan.hf.sequence'
CHECK = "longspan.hf.check(model, seq_len=30) says whether longspan can run this model"
OF_20 = "has windows of 20 tokens (sliding_window)"
WINDOWS = f"which would apply to one rank's tokens, not to the 30 of the sequence\n\nhint: {HF}"
ONE_MASK = f"in some layers only, but the window of mask= applies to all layers\n\nhint: {HF}"
RECURRENT = f"which would see one rank's tokens only\n\nhint: {CHECK}"
LINEAR_LAYERS = f"layers of type linear_attention, {RECURRENT}"
EAGER = f"computes attention by hand (attn_implementation 'eager'), over one rank's tokens only\n\nhint: {HF}; {CHECK}"
COUNTED = (
    "one rank's tokens, not the 30 of the sequence\n\n"
    f'hint: {{}}; or {HF}; or set allow_local=("{{}}",) if its dim is not the sequence'
)
POSITIONS = COUNTED.format(
    "add the positions of the sequence, such as position_ids = torch.arange(S)[None], to buffers", "arange"
)
TABLES = COUNTED.format("add the table, or the labels shifted on the global row, to buffers", "slice")
A_MASK = (
    "attn_mask of shape (1, 1, 15, 15) covers one rank's tokens, not the 30 of the sequence; transformers makes such masks "
    "of padding, windows, or positions that jump\n\nhint: give the mask of the global sequence, outside buffers. With "
    f"transformers, add an attention_mask of ones, (1, S), to buffers if only positions jump; else {HF}"
)
REFUSED = {
    "Mistral": ("Mistral", {"sliding_window": 20}, {}),
    "Qwen2": ("Qwen2", {**MIXED, "use_sliding_window": True}, {}),
    "Gemma 3": ("Gemma3Text", MIXED, {}),
    "Olmo 3": ("Olmo3", MIXED, {}),
    "a window within a shard": ("Mistral", {"sliding_window": 8}, {}),
    "Llama 4": ("Llama4Text", dict(**LLAMA4, attention_chunk_size=20), {}),
    "a shorter window than the mask": ("Mistral", {"sliding_window": 20}, {"mask": Mask.causal(S)}),
    "Qwen2, one mask": ("Qwen2", {**MIXED, "use_sliding_window": True}, {"mask": Mask.causal(S, window=20)}),
    "Gemma 3, one mask": ("Gemma3Text", MIXED, {"mask": Mask.causal(S, window=20)}),
    "a mask of a shard": ("Mistral", {"sliding_window": 8}, {"mask": Mask.causal(S, window=8)}),
    "Gemma 2": ("Gemma2", {"sliding_window": 64}, {}),
    "gpt-oss": ("GptOss", {"num_local_experts": 4, "sliding_window": 64}, {}),
    "Bloom": ("Bloom", SMALL_GPT, {"gives": ()}),
    "MPT": ("Mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "expansion_ratio": 2}, {"gives": ()}),
    "Mamba 2": (
        "Mamba2",
        {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8},
        {"gives": ()},
    ),
    "Bamba": ("Bamba", dict(**MAMBA, attn_layer_indices=[1]), {}),
    "Qwen3-Next": (
        "Qwen3Next",
        dict(
            **EXPERTS, **LINEAR, shared_expert_intermediate_size=24, layer_types=["linear_attention", "full_attention"]
        ),
        {},
    ),
    "RWKV": ("Rwkv", {"attention_hidden_size": 32}, {"gives": ()}),
    "attention temperature": ("Llama4Text", dict(**LLAMA4, attention_chunk_size=64, no_rope_layers=[1, 0]), {}),
    "no position_ids": ("Llama", {}, {"gives": ()}),
    "a table of positions": ("Bert", {}, {"gives": ()}),
    "labels": ("Llama", {}, {"labels": True}),
    "dynamic rotation": ("Llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 16}, {}),
}
TEXTS = {
    "Mistral": f"MistralForCausalLM {OF_20}, {WINDOWS}",
    "Qwen2": f"Qwen2ForCausalLM {OF_20}, {WINDOWS}",
    "Gemma 3": f"Gemma3ForCausalLM {OF_20}, {WINDOWS}",
    "Olmo 3": f"Olmo3ForCausalLM {OF_20}, {WINDOWS}",
    "a window within a shard": f"MistralForCausalLM has windows of 8 tokens (sliding_window), {WINDOWS}",
    "Llama 4": f"Llama4ForCausalLM has chunks of 20 tokens (attention_chunk_size), {WINDOWS}",
    "a shorter window than the mask": f"MistralForCausalLM {OF_20}, but mask= lets queries see keys 29 tokens back"
    f"\n\nhint: {HF}",
    "Qwen2, one mask": f"Qwen2ForCausalLM {OF_20} {ONE_MASK}",
    "Gemma 3, one mask": f"Gemma3ForCausalLM {OF_20} {ONE_MASK}",
    "a mask of a shard": A_MASK,
    "Gemma 2": f"Gemma2ForCausalLM {EAGER}",
    "gpt-oss": f"GptOssForCausalLM {EAGER}",
    "Bloom": f"BloomForCausalLM {EAGER}",
    "MPT": f"MptForCausalLM {EAGER}",
    "Mamba 2": f"Mamba2ForCausalLM has {LINEAR_LAYERS}",
    "Bamba": f"BambaForCausalLM has {LINEAR_LAYERS}",
    "Qwen3-Next": f"Qwen3NextForCausalLM has {LINEAR_LAYERS}",
    "RWKV": f"RwkvForCausalLM has recurrent layers, {RECURRENT}",
    "attention temperature": f"aten.arange in Llama4TextAttention.forward counts {POSITIONS}",
    "no position_ids": f"aten.arange in LlamaModel.forward counts {POSITIONS}",
    "a table of positions": f"aten.slice in BertEmbeddings.forward counts or shifts {TABLES}",
    "labels": f"aten.constant_pad_nd in ForCausalLMLoss shifts {TABLES}",
    "dynamic rotation": "LlamaForCausalLM has rope_type 'dynamic', whose frequencies beyond 16 tokens depend on a rank's "
    "last position"
    '\n\nhint: choose a rope_type of fixed frequencies, such as "yarn"',
}


def _run(group, rank):
    found = {}
    for case, (name, options, how) in (RIGHT | REFUSED).items():
        model = make(name, **options)
        for layout in LAYOUTS:
            found[case, layout] = _found(group, layout, model, **how)
    jumping = make("Llama")
    for layout in LAYOUTS:
        for allowed in ((), ("slice", "cumsum")):
            how = {"gives": ("position_ids",), "allow_local": allowed}
            found["jumping positions", layout, allowed] = _found(group, layout, jumping, **how)
    one_expert = {"num_local_experts": 4, "num_experts_per_tok": 1, "experts_implementation": "grouped_mm"}
    found["grouped experts"] = _found(group, "zigzag", make("Mixtral", torch.float32, **one_expert))
    found["no attention"] = _warned(group)
    return found


def _found(group, layout, model, **how):
    """The error, or the type and the text of the exception without the line that it names."""
    errors = []
    kind, text = raised(lambda: errors.append(error(group, layout, model, **how)))
    return (kind, re.sub(r" \(transformers\S+, line \d+\)", "", text)) if kind else errors[0]


def _warned(group):
    ids = torch.arange(S)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with context_parallel(group, buffers=(ids,), buffer_seq_dims=(0,)):
            ids.sum()
        with context_parallel(group, seq_len=S) as cp:
            x = cp.shard(torch.ones(1, 1, S, 4), 2)
            F.scaled_dot_product_attention(x, x, x)
    return [(warning.category, str(warning.message), warning.filename) for warning in caught]


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(2, _run)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", RIGHT)
def test_right(ranks, case, layout):
    assert all(isinstance(found[case, layout], float) and found[case, layout] < 1e-10 for found in ranks), ranks[0][
        case, layout
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", REFUSED)
def test_refused_on_all_ranks(ranks, case, layout):
    assert [found[case, layout] for found in ranks] == [("SpecError", TEXTS[case])] * 2


def test_experts_are_numbered_token_by_token(ranks):
    """By `arange(15)`, one expert for each of 15 tokens."""
    assert max(found["grouped experts"] for found in ranks) < 1e-5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_documents_are_not_sought_in_the_positions_of_a_shard(ranks, layout):
    """Two documents whose border is that of the shards would be taken for one."""
    text = (
        "aten.slice in find_packed_sequence_indices counts or shifts one rank's tokens, not the 30 of the sequence\n\n"
        f"hint: add an attention_mask of ones, (1, S), to buffers, and documents to mask=; or {HF}; "
        'or set allow_local=("slice",) if its dim is not the sequence'
    )
    assert [found["jumping positions", layout, ()] for found in ranks] == [("SpecError", text)] * 2


def test_a_refusal_of_one_rank_reaches_all(ranks):
    """Under zigzag, the positions of rank 0 jump: chunks 0 and 3. Those of rank 1, chunks 1 and 2, do not."""
    case = ("slice", "cumsum")
    found = [found["jumping positions", "zigzag", case] for found in ranks]
    assert found == [("SpecError", A_MASK), ("DisagreementError", f"rank 0 failed: {A_MASK}")]
    assert max(found["jumping positions", "contiguous", case] for found in ranks) < 1e-10


def test_a_context_without_attention_warns(ranks):
    text = (
        "context_parallel ended without a call of scaled_dot_product_attention: attention by other means, if there was "
        "any, covered one rank's tokens only"
    )
    assert [found["no attention"] for found in ranks] == [[(UserWarning, text, __file__)]] * 2


def _quiet(group, rank):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with context_parallel(None, seq_len=S):
            pass
    return [str(warning.message) for warning in caught]


def test_a_fresh_process_is_quiet():
    assert own_ranks(1, _quiet)[0].value == []
