"""fp32, bf16 and fp16: at most twice the error of single-process SDPA in the same type, whatever the degree."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from longspan.comm.sharding import shard, unshard
from longspan.cp.attention import attention
from longspan.plan import Layout, Mask, plan_attention
from tests.oracle import Inputs, dense_attention, make_inputs
from tests.ranks import run_ranks

S, HEADS, DIM = 512, (4, 2), 32
MASKS = {
    "causal": Mask.causal(S),
    "full": Mask.full(S),
    "documents": Mask.documents([100, 13, 399]),
    "window": Mask.causal(S, window=60),
}
NOISE = 4 * torch.finfo(torch.float32).eps
"""Float noise, relative to the tensor: the roundings of a single process may happen to cancel."""


def _attend(group, rank, layout, masks, dtype):
    inputs = make_inputs(S, HEADS, dim=DIM, dtype=dtype)
    results = []
    for mask in masks:
        q, k, v = (shard(x, layout, rank, 2).requires_grad_() for x in inputs[:3])
        out = attention(q, k, v, plan=plan_attention(layout, mask), group=group)
        out.backward(shard(inputs.dout, layout, rank, 2))
        results.append([out.detach(), q.grad, k.grad, v.grad])
    return results


def single_process(inputs, mask):
    q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
    visible = torch.from_numpy(mask.dense())
    if mask == MASKS["full"]:
        how = {}
    elif mask == MASKS["causal"]:
        how = {"is_causal": True}
    else:
        how = {"attn_mask": visible}
    out = scaled_dot_product_attention(q, k, v, enable_gqa=True, **how)
    out.backward(inputs.dout)
    return [out.detach(), q.grad, k.grad, v.grad]


def errors(got, want):
    """Greatest and root-mean-square error, relative to the tensor's greatest and root-mean-square value."""
    difference = got.double() - want
    return (
        (difference.abs().max() / want.abs().max()).item(),
        (difference.square().mean().sqrt() / want.square().mean().sqrt()).item(),
    )


@pytest.mark.parametrize("P", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_error_is_at_most_twice_that_of_one_process(dtype, P):
    layout = Layout.zigzag(S, P)
    inputs = make_inputs(S, HEADS, dim=DIM, dtype=dtype)
    by_rank = run_ranks(P, _attend, layout, list(MASKS.values()), dtype)
    for index, (kind, mask) in enumerate(MASKS.items()):
        want = dense_attention(Inputs(*(x.double() for x in inputs)), mask)
        alone = single_process(inputs, mask)
        for number, name in enumerate(("out", "dq", "dk", "dv")):
            parts = [results[index][number] for results in by_rank]
            assert {part.dtype for part in parts} == {dtype}
            greatest, rms = errors(unshard(parts, layout, 2), want[number])
            greatest_alone, rms_alone = errors(alone[number], want[number])
            assert rms <= 2 * rms_alone + NOISE, (kind, name, rms, rms_alone)
            # The greatest error is one element's: rounding it to the type may cost half a unit, and by luck costs less.
            allowed = 2 * max(greatest_alone, torch.finfo(dtype).eps / 2) + NOISE
            assert greatest <= allowed, (kind, name, greatest, greatest_alone)
