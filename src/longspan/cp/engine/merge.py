"""Merge partial attention results in place, in at least fp32 whatever the inputs' dtype.

lse = logaddexp(lse_a, lse_b);   out = out_a exp(lse_a - lse) + out_b exp(lse_b - lse)
"""

import torch

Tensor = torch.Tensor


def merge_(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Merge `other_out (B, H, T, D)` and `other_lse (B, H, T)` into `out` and `lse`, in the (wider) dtype of `out` and `lse`.

    A row that has seen no key has lse -inf and out 0. The merge of two such rows also has lse -inf and out 0.
    """
    other_lse = other_lse.to(lse.dtype)
    weight = torch.sigmoid(other_lse - lse).masked_fill_(other_lse == float("-inf"), 0)
    out.lerp_(other_out.to(out.dtype), weight.unsqueeze(-1))
    torch.logaddexp(lse, other_lse, out=lse)


def merge_sink_(out: Tensor, lse: Tensor, sink: Tensor) -> None:
    """Add `sink (H,)`, a logit per head with value 0, to the softmax denominator of every row, in place."""
    logits = sink.to(lse.dtype).view(1, -1, 1)
    out.mul_(torch.sigmoid(lse - logits).unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, logits))


def sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Return d loss / d sink `(H,)`: `-sum exp(sink - lse) (dout . out)` over rows, with the final out and lse."""
    wide = lse.dtype
    delta = (dout.to(wide) * out.to(wide)).sum(-1)
    weight = torch.exp(sink.to(wide).view(1, -1, 1) - lse)
    return -(weight * delta).sum(dim=(0, 2)).to(sink.dtype)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return fp64 for fp64, otherwise fp32."""
    return torch.promote_types(dtype, torch.float32)
