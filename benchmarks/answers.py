"""Inputs of the two-node benchmarks, and the check of results against plain SDPA on one rank."""

from functools import cache

import torch
import torch.nn.functional as F

from longspan import Layout, Mask, shard

HEAD_DIM = 64


@cache
def inputs(seq_len: int, heads: tuple[int, int]) -> list[torch.Tensor]:
    """Return q, k, v and dout `(1, H or K, S, D)` in fp32, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    num_q, num_kv = heads
    return [torch.randn(1, n, seq_len, HEAD_DIM, generator=generator) for n in (num_q, num_kv, num_kv, num_q)]


@cache
def right(mask: Mask, heads: tuple[int, int]) -> list[torch.Tensor]:
    """Return (out, dq, dk, dv) of the unsharded sequence by SDPA."""
    *leaves, dout = inputs(mask.seq_len, heads)
    leaves = [x.detach().requires_grad_() for x in leaves]
    causal = mask == Mask.causal(mask.seq_len)  # avoids an S x S mask
    dense = None if causal else torch.from_numpy(mask.dense())
    out = F.scaled_dot_product_attention(*leaves, attn_mask=dense, is_causal=causal, enable_gqa=heads[0] != heads[1])
    out.backward(dout)
    return [out.detach(), *(x.grad for x in leaves)]


def check(name: str, ours: list[torch.Tensor], answer: list[torch.Tensor], layout: Layout, rank: int) -> None:
    """Raise AssertionError if this rank's out, dq, dk or dv is off by more than 1e-4 of the tensor's maximum."""
    for what, mine, whole in zip(("out", "dq", "dk", "dv"), ours, answer, strict=True):
        off = (mine - shard(whole, layout, rank, 2)).abs().max() / whole.abs().max()
        if off > 1e-4:
            raise AssertionError(f"{name}: {what} of rank {rank} is off by {off:.1e} of the tensor's largest value")
