"""A Hugging Face Llama through `longspan.hf`: peak memory at cp=4 over cp=1, and time against longspan's own decoder.

    python -m benchmarks.huggingface memory [--seq-len 32768]
    python -m benchmarks.huggingface time [--seq-len 8192]

Memory: bytes of live tensors by the profiler's events in a forward and backward, logits included, weights and their gradients
not. The side of cp=1 is transformers with SDPA. Time: seconds of the Hugging Face model over those of our decoder of the same
shape, at cp=2 and, for transformers with SDPA, at cp=1; the quotient of the two ratios is what `longspan.hf` itself costs.
"""

import gc
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from benchmarks.harness import Usage, foreign_share, freed_here, peak_bytes, save
from longspan import ContextParallel, Mask, hf
from longspan.comm.launch import join_world, launch, leave_world
from longspan.data import Batch
from longspan.model import Decoder, ModelConfig
from longspan.topology import Topology

SHAPE = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 896}
LAYERS, HEADS, KV_HEADS = 4, 8, 2


@click.group(help=__doc__)
def main() -> None:
    torch.set_num_threads(1)


@main.command(help="Peak memory at cp over cp=1.")
@click.option("--seq-len", default=32768, show_default=True)
@click.option("--cp", default=4, show_default=True)
@click.option("--route", default="ring", show_default=True)
@click.option("--json", "output", type=click.Path(path_type=Path))
def memory(seq_len: int, cp: int, route: str, output: Path | None) -> None:
    (one,), many = (launch(peak_of_model, (n, seq_len, route), n) for n in (1, cp))
    worst = max(many)
    click.echo(f"S={seq_len:,}: cp=1 {one / 2**20:.1f} MiB, cp={cp} at most {worst / 2**20:.1f} MiB: {worst / one:.3f}")
    save(output, {"seq_len": seq_len, "cp": cp, "one": one, "many": many, "ratio": worst / one})


@main.command("time", help="Time over our own decoder's, at cp=2 and cp=1.")
@click.option("--seq-len", default=8192, show_default=True)
@click.option("--repeats", default=7, show_default=True)
@click.option("--json", "output", type=click.Path(path_type=Path))
def time_(seq_len: int, repeats: int, output: Path | None) -> None:
    ratios = {cp: launch(time_ratio, (cp, seq_len, repeats), cp) for cp in (1, 2)}
    quotient = ratios[2] / ratios[1]
    click.echo(
        f"S={seq_len:,}: Hugging Face over our decoder: cp=1 {ratios[1]:.3f}, cp=2 {ratios[2]:.3f}: quotient {quotient:.3f}"
    )
    save(output, {"seq_len": seq_len, "ratios": ratios, "quotient": quotient})


def theirs(attention: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        **SHAPE, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
        max_position_embeddings=2**17,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def batch_of(seq_len: int) -> Batch:
    ids = np.random.default_rng(0).integers(1, SHAPE["vocab_size"], seq_len)
    return Batch.from_documents([ids])


def step_of_theirs(cp: int, seq_len: int, route: str) -> Callable[[], None]:
    """Return a function that runs a forward and backward of the Hugging Face model."""
    batch = batch_of(seq_len)
    if cp == 1:
        model = theirs("sdpa")
        ids, labels = (torch.from_numpy(x.copy())[None] for x in (batch.input_ids, batch.labels))

        def plain() -> None:
            out = model(
                input_ids=ids, labels=labels, shift_labels=labels, num_items_in_batch=seq_len - 1, use_cache=False
            )
            out.loss.backward()

        return plain
    model, context = theirs(hf.NAME), ContextParallel(dist.group.WORLD, route=route, heads=(HEADS, KV_HEADS))

    def sharded() -> None:
        with hf.sequence(context, model, batch) as seq:
            seq.backward(model(**seq.inputs).loss)

    return sharded


def step_of_ours(cp: int, seq_len: int) -> Callable[[], None]:
    """Return a function that runs a forward and backward of our decoder of the same shape."""
    torch.manual_seed(0)
    decoder = Decoder(ModelConfig(**SHAPE, num_layers=LAYERS, num_heads=HEADS, num_kv_heads=KV_HEADS))
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    batch, mask = batch_of(seq_len), Mask.causal(seq_len)
    if cp == 1:
        whole = batch.tensors()

        def plain(q: Tensor, k: Tensor, v: Tensor, mask: str) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        return lambda: decoder(whole["input_ids"], whole["position_ids"], plain, whole["labels"]).backward()
    context = ContextParallel(dist.group.WORLD, heads=(HEADS, KV_HEADS))

    def sharded() -> None:
        with context.sequence(mask, ids=batch.digest()) as seq:
            local = seq.shard(batch.tensors(), dim=1)

            def attend(q: Tensor, k: Tensor, v: Tensor, mask: str) -> Tensor:
                return seq.attention(q, k, v)

            decoder(local["input_ids"], local["position_ids"], attend, local["labels"]).backward()

    return sharded


def in_world(cp: int, work: Callable[[], Any]) -> Any:
    join_world(Topology(dp=1, cp=cp), timedelta(minutes=10))
    try:
        return work()
    finally:
        leave_world()


def peak_of_model(cp: int, seq_len: int, route: str) -> list[int]:
    """Return every rank's peak bytes of live tensors in one forward and backward."""

    def measured() -> list[int]:
        torch.set_num_threads(1)
        step = step_of_theirs(cp, seq_len, route)
        step()  # allocates gradients
        gc.collect()
        activities = [torch.profiler.ProfilerActivity.CPU]
        with freed_here(), torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
            step()
        peaks = [0] * cp
        dist.all_gather_object(peaks, peak_bytes(profiler))
        return peaks

    return in_world(cp, measured)


def time_ratio(cp: int, seq_len: int, repeats: int) -> float:
    """Return the median over repeats of the Hugging Face model's seconds over our decoder's, run in turns."""

    def measured() -> float:
        torch.set_num_threads(1)
        steps = step_of_theirs(cp, seq_len, "ring"), step_of_ours(cp, seq_len)
        ratios: list[float] = []
        for repeat in range(repeats + 1):
            seconds = []
            before, began = Usage.now(), time.perf_counter()
            for step in steps:
                dist.barrier()
                start = time.perf_counter()
                step()
                dist.barrier()
                seconds.append(time.perf_counter() - start)
            if repeat and foreign_share(before, time.perf_counter() - began) < 0.5:
                ratios.append(seconds[0] / seconds[1])
        return statistics.median(ratios)

    return in_world(cp, measured)


if __name__ == "__main__":
    main()
