"""Merge partial attention results: in place, at least in fp32, whatever the inputs' type.

lse = logaddexp(lse_a, lse_b);   out = out_a exp(lse_a - lse) + out_b exp(lse_b - lse)
"""

import torch

Tensor = torch.Tensor


def merge_(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Fold `other_out (B, H, T, D)`, `other_lse (B, H, T)` into `out` and `lse`, which keep their (wider) type.

    A row that has seen nothing has lse -inf and out 0; merging two such rows gives such a row.
    """
    other_lse = other_lse.to(lse.dtype)
    weight = torch.sigmoid(other_lse - lse).masked_fill_(other_lse == float("-inf"), 0)
    out.lerp_(other_out.to(out.dtype), weight.unsqueeze(-1))
    torch.logaddexp(lse, other_lse, out=lse)


def merge_sink_(out: Tensor, lse: Tensor, sink: Tensor) -> None:
    """One more term in the denominator of every row: a logit per head, `sink (H,)`, whose value is 0."""
    logits = sink.to(lse.dtype).view(1, -1, 1)
    out.mul_(torch.sigmoid(lse - logits).unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, logits))


def sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """d loss / d sink over the given rows, from the final `out` and `lse`: `-sum exp(sink - lse) (dout . out)`, `(H,)`."""
    wide = lse.dtype
    delta = (dout.to(wide) * out.to(wide)).sum(-1)
    weight = torch.exp(sink.to(wide).view(1, -1, 1) - lse)
    return -(weight * delta).sum(dim=(0, 2)).to(sink.dtype)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)
