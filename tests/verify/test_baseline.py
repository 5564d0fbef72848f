"""The CP=1 side equals plain torch that shares nothing with it but the first weights and the rows."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan.data import Batch, Loader, open_store
from longspan.train.model import make_model
from longspan.verify.baseline import attend_documents, loss_sum, run_baseline
from tests.train import reference
from tests.train.tiny import make_config, write_corpus


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("baseline")
    write_corpus(folder, documents=12)
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"accumulation": 2, "parallel__dp": 2, "rows_per_batch": 2},
        {"model__windows": [5, None]},
        {"model__tie_embeddings": True},
    ],
)
def test_losses_norms_and_gradients(folder: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    config = make_config(folder, **changes)
    rows = config.rows_per_batch * config.accumulation * (config.parallel.dp or 1)
    loader = Loader(open_store(config.data), row_tokens=48, dp_rank=0, dp_size=1, seed=0)
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
