"""`examples/smollm2.py` says the same on one, two and three ranks: losses of its steps, and the perplexity by position."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from longspan import ContextParallel
from longspan.data import read_documents
from tests.hf.smollm2 import smollm2, tokenizer
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "smollm2.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """Return a folder with a tiny llama and a tokenizer of bytes, for the example's --model."""
    path = tmp_path_factory.mktemp("tiny")
    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({byte: i for i, byte in enumerate([*alphabet, "<end>"])}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=3, head_dim=8, max_position_embeddings=512, initializer_range=0.1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    return str(path)


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("smollm2_example", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trained(group: Any, rank: int, folder: str, dp: int, **options: Any) -> list[float]:
    script, mesh = example(), init_device_mesh("cpu", (dp, group.size() // dp), mesh_dim_names=("dp", "cp"))
    model, tokenizer = script.load(folder)
    return script.train(mesh, ContextParallel(mesh["cp"]), model, tokenizer, steps=4, lr=1e-2, **options)


def in_full(group: Any, rank: int, folder: str) -> list[float]:
    return trained(group, rank, folder, 1, seq_len=300)


def by_lora(group: Any, rank: int, folder: str) -> list[float]:
    return trained(group, rank, folder, 1, seq_len=300, lora=True, recompute=True)


def over_two_rows(group: Any, rank: int, folder: str) -> list[float]:
    return trained(group, rank, folder, 2, seq_len=150)


@pytest.mark.parametrize("how", [in_full, by_lora, over_two_rows])
def test_losses_of_steps_are_those_of_fewer_ranks(how: Any, folder: str) -> None:
    fewer, more = (1, 2) if how is not over_two_rows else (2, 4)
    (wanted, *_), *found = run_ranks(fewer, how, folder), *run_ranks(more, how, folder)
    for losses in found:
        assert losses == pytest.approx(wanted, abs=2e-5)
    assert wanted[-1] < wanted[0] - 0.1


def document_losses(group: Any, rank: int, folder: str) -> torch.Tensor:
    script = example()
    model, tokenizer = script.load(folder)
    cp = ContextParallel(group, route="ulysses", heads=(6, 3)) if group.size() == 3 else ContextParallel(group)
    return script.losses_of_document(cp, model, script.longest_document(tokenizer, 500))


def plain_losses(folder: str, tokens: int) -> torch.Tensor:
    """Compute the losses of the longest document by transformers' own SDPA, its bytes being the tokens."""
    text = max((document.text for document in read_documents("python:stdlib")), key=len)
    vocabulary = {byte: i for i, byte in enumerate(sorted(ByteLevel.alphabet()))}
    assert text[:tokens].isascii()
    ids = torch.tensor([[vocabulary[{" ": "Ġ", "\n": "Ċ"}.get(c, c)] for c in text[:tokens]]])
    logits = AutoModelForCausalLM.from_pretrained(folder)(ids).logits.detach()
    return torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none")


def test_losses_by_position_are_those_of_plain_transformers(folder: str) -> None:
    wanted = plain_losses(folder, 500)
    for ranks in (1, 2, 3):
        for losses in run_ranks(ranks, document_losses, folder):
            torch.testing.assert_close(losses, wanted, rtol=0, atol=2e-5)


def torchrun(ranks: int, *words: str) -> str:
    command = [Path(sys.executable).parent / "torchrun", "--standalone", "--nproc-per-node", str(ranks), SCRIPT, *words]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=True, env=environment).stdout


def rows_of(output: str) -> dict[str, float]:
    """Return the loss of each row of the printed table."""
    return {name.strip(): float(loss) for name, loss in re.findall(r"^ *(\d+ to \d+|all) +(\d\.\d+) ", output, re.M)}


def means(losses: torch.Tensor) -> dict[str, float]:
    """Return the rows of the table for 499 losses, those of positions 1 to 499."""
    spans = {"1 to 127": losses[:127], "128 to 255": losses[127:255], "256 to 499": losses[255:], "all": losses}
    return {name: float(part.mean()) for name, part in spans.items()}


def test_the_table_and_the_picture_by_position(tmp_path: Path, capsys) -> None:
    losses, script = torch.linspace(3, 1, 499), example()
    script.print_by_position(losses)
    assert rows_of(capsys.readouterr().out) == pytest.approx(means(losses), abs=1e-6)
    script.draw_by_position(losses, str(tmp_path / "loss.png"))
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.nightly
def test_the_command_prints_and_draws_the_loss_by_position(folder: str, tmp_path: Path) -> None:
    picture = tmp_path / "loss.png"
    output = torchrun(2, "--model", folder, "--perplexity", "--seq-len", "500", "--plot", str(picture))
    assert rows_of(output) == pytest.approx(means(plain_losses(folder, 500)), abs=1e-5)
    assert picture.exists()


@pytest.fixture(scope="module")
def smollm2_folder(tmp_path_factory) -> str:
    """Return SmolLM2-135M as a folder, which loads in a second where the file of the package takes half a minute."""
    path = tmp_path_factory.mktemp("smollm2")
    smollm2().save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)


@pytest.mark.nightly
@pytest.mark.parametrize("more", [(), ("--lora",)], ids=["in full", "lora"])
def test_smollm2_is_trained_on_two_ranks_as_on_one(more: tuple[str, ...], smollm2_folder: str) -> None:
    words = ("--steps", "4", "--seq-len", "512", *more)
    one = losses_in(torchrun(1, *words))
    two = losses_in(torchrun(2, *words, "--model", smollm2_folder))
    assert len(one) == 4
    assert two == pytest.approx(one, abs=1e-4)


def losses_in(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"step \d: (\d\.\d+) nats", output)]


@pytest.mark.nightly
def test_smollm2_has_the_same_perplexity_on_one_two_and_three_ranks(smollm2_folder: str) -> None:
    words = ("--perplexity", "--seq-len", "2048", "--model", smollm2_folder)
    one, two, three = (rows_of(torchrun(ranks, *words)) for ranks in (1, 2, 3))
    assert len(one) == 6
    assert two == pytest.approx(one, abs=2e-5)
    assert three == pytest.approx(one, abs=2e-5)
