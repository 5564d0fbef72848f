"""The CP=1 side equals plain torch that shares nothing with it but the first weights and the rows."""

import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from benchmarks.harness import peak_bytes
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.profiler import ProfilerActivity, profile

from longspan.data import Batch, Loader, open_store
from longspan.model import Decoder
from longspan.train.model import make_model
from longspan.verify.baseline import attend_blocks, attend_documents, loss_sum, run_baseline
from tests.train import reference
from tests.train.tiny import make_config, numbered_batch, write_corpus


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("baseline")
    write_corpus(folder, documents=12)
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gradient_accumulation_steps": 2, "parallel__dp": 2, "micro_batch_size": 2},
        {"model__windows": [5, None]},
        {"model__tie_embeddings": True},
    ],
)
def test_losses_norms_and_gradients(folder: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    config = make_config(folder, **changes)
    rows = config.micro_batch_size * config.gradient_accumulation_steps * (config.parallel.dp or 1)
    loader = Loader(open_store(config.data), seq_len=48, dp_rank=0, dp_size=1, seed=0)
    steps = []
    for _ in range(3):
        batches = [next(loader) for _ in range(rows)]
        steps.append([
            [(document, [1] * len(document)) for document in _documents(batch)] for batch in batches
        ])  # fmt: skip
    want = reference.train(config, steps)
    seen = run_baseline(config, 3, tmp_path / "gradients")
    assert seen.losses == pytest.approx(want.losses, rel=1e-9)
    assert seen.grad_norms == pytest.approx(want.norms, rel=1e-9)
    gradients = seen.read_gradients()
    assert gradients.keys() == want.gradients.keys()
    for name, gradient in gradients.items():
        scale = float(want.gradients[name].abs().max())
        torch.testing.assert_close(gradient, want.gradients[name], rtol=0, atol=1e-9 * scale, msg=name)


def _documents(batch: Any) -> list[list[int]]:
    return [part.tolist() for part in torch.from_numpy(batch.input_ids.copy()).split(list(batch.lengths))]


def test_documents_and_windows_by_hand() -> None:
    """CASES: documents 5+3, q=k=0, v_j=j: `out[5] = 5`; S=16, window 4: `out[8] = 6.5`."""
    v = torch.arange(16.0).view(1, 1, 16, 1)
    zero = torch.zeros(1, 1, 16, 2)
    packed = attend_documents(zero[:, :, :8], zero[:, :, :8], v[:, :, :8], [5, 0, 3], "full").flatten()
    assert packed.tolist() == pytest.approx([0.0, 0.5, 1.0, 1.5, 2.0, 5.0, 5.5, 6.0])
    assert attend_documents(zero, zero, v, [16], "full").flatten()[8] == pytest.approx(4.0)
    assert attend_documents(zero, zero, v, [16], "window-4").flatten()[8] == pytest.approx(6.5)


def test_a_shared_prompt_by_hand() -> None:
    """Prompt 2, responses 1 + 2, q=k=0, v_j=j: the second response sees 0, 1 and itself; a window counts positions."""
    v = torch.arange(5.0).view(1, 1, 5, 1)
    zero = torch.zeros(1, 1, 5, 2)
    out = attend_documents(zero, zero, v, [2, 1, 2], "full", (-1, 0, 0)).flatten()
    assert out.tolist() == pytest.approx([0.0, 0.5, (0 + 1 + 2) / 3, (0 + 1 + 3) / 3, (0 + 1 + 3 + 4) / 4])
    out = attend_documents(zero, zero, v, [2, 1, 2], "window-2", (-1, 0, 0)).flatten()
    assert out.tolist() == pytest.approx([0.0, 0.5, (1 + 2) / 2, (1 + 3) / 2, (3 + 4) / 2])


@pytest.mark.parametrize("windows", [None, [4, None]])
def test_shared_prompts_equal_sequences_of_their_own(windows: list[int | None] | None) -> None:
    config = make_config(**({} if windows is None else {"model__windows": windows}))
    prompt, responses = [3, 1, 4, 1, 5, 9], [[2, 6, 5], [], [3, 5, 8, 9]]
    alone = [(prompt + response, [0] * len(prompt) + [1] * len(response)) for response in responses]
    model = make_model(config)
    weights = {name: w.detach().clone().requires_grad_() for name, w in model.state_dict().items()}
    want = torch.stack([reference.loss_sum(weights, model.config, document) for document in alone]).sum()
    want.backward()
    got = loss_sum(model, Batch.from_shared_prompt(prompt, responses))
    got.backward()
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-10, atol=1e-10, msg=name)


def test_it_imports_neither_plan_nor_attention() -> None:
    code = (
        "import sys, longspan.verify.baseline\n"
        "found = [m for m in sys.modules if m.startswith(('longspan.plan', 'longspan.attention'))]\n"
        "assert not found, found"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize(("mask", "window"), [("window-7", 7), ("window-1", 1), ("window-64", 64), ("full", 999)])
def test_blocks_equal_a_dense_mask(mask: str, window: int, device_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents of 30, 0, 1 and 33 tokens, the last a child of the first, in blocks of 8 queries and less; out and gradients."""
    monkeypatch.setattr("longspan.verify.baseline.BLOCK", 8)
    lengths, parents, attended = [30, 0, 1, 33], [-1, -1, -1, 0], []
    if device_type == "cuda":  # every mask goes by blocks
        monkeypatch.setattr("longspan.verify.baseline.one_call", lambda q: False)
    draw = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(1, heads, 64, 6, generator=draw, dtype=torch.float64) for heads in (4, 2, 2, 4))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    document = torch.arange(4).repeat_interleave(torch.tensor(lengths))
    # Positions of a child run on from its parent's end.
    position = torch.cat([torch.arange(30), torch.zeros(1, dtype=torch.int64), torch.arange(30, 63)])
    away = position[:, None] - position
    child_of = torch.tensor([-2, -2, -2, 0])[document]
    visible = ((document[:, None] == document) | (child_of[:, None] == document)) & (away >= 0) & (away < window)
    want = sdpa(q, k, v, attn_mask=visible, enable_gqa=True)
    right = torch.autograd.grad(want, (q, k, v), grad)

    def spy(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        if options.get("attn_mask") is not None:
            attended.append((q.shape[2], k.shape[2]))
        return sdpa(q, k, v, **options)

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", spy)
    got = attend_documents(q, k, v, lengths, mask, parents)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    for name, x, y in zip("qkv", torch.autograd.grad(got, (q, k, v), grad), right, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-11, msg=name)
    assert all(queries <= 8 and keys <= queries + window - 1 for queries, keys in attended)
    # ceil(30/8) + ceil(1/8) + ceil(33/8) blocks, forward and again in backward.
    assert len(attended) == (0 if (mask, device_type) == ("full", "cpu") else 2 * (4 + 1 + 5))


def test_scores_of_a_window_do_not_grow_with_the_square_of_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no fused kernel, 4,096 tokens in fp64: all scores would be 128 MiB a head, a block of 64 and its window 0.06 MiB."""
    monkeypatch.setattr("longspan.verify.baseline.BLOCK", 64)
    tensors = [torch.randn(1, 2, 4096, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    with sdpa_kernel(SDPBackend.MATH), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        attend_documents(*tensors, [4096], "window-64").sum().backward()
    rows = 2 * 4096 * 4 * 8
    assert peak_bytes(profiler) < 12 * rows + 20 * (2 * 64 * 127 * 8)


@pytest.mark.parametrize("rows_of_fp64", [512, 64])
def test_blocks_shrink_where_many_heads_see_many_keys(rows_of_fp64: int) -> None:
    """Of 32 heads and S keys 2**28 scores are 2**23 / S queries: all 512 at 16k, 64 at 128k. Nothing is allocated."""
    keys = 2**23 // rows_of_fp64
    q, k, v = (torch.empty(1, heads, keys, 8, device="meta") for heads in (32, 8, 8))
    first = next(attend_blocks(q[:, :, -600:], k, v, keys))
    assert first.shape == (1, 32, rows_of_fp64, 8)


def test_all_of_it_is_on_the_device_of_the_model() -> None:
    """On the meta device an operator that meets tensors of the CPU too raises. Windows, dropout and experts, both ways."""
    experts = {"num_experts": 4, "top_k": 2, "intermediate_size": 32, "balance": 0.1}
    changes = {"model__windows": [9, None], "model__intermediate_size": None, "model__experts": experts, "dropout": 0.1}
    config = make_config(**changes)
    batch = numbered_batch([([1, 2, 3, 4], [1, 1, 1, 1]), ([5, 6, 7], [0, 1, 1])], 0)
    model = Decoder(config.model, dropout=0.1).to("meta").to(torch.bfloat16)
    with (
        patch("longspan.model.experts.one_kernel", return_value=True),
        patch("torch.Tensor.nonzero", lambda x: torch.empty(len(x), 1, dtype=torch.int64, device=x.device)),
    ):
        loss = loss_sum(model, batch, balance=1.0)
        loss.backward()
    assert loss.device.type == "meta"
    assert all(p.grad is not None and p.grad.device.type == "meta" for p in model.parameters())
