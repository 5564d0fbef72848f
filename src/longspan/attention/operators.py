"""The executor as registered operators, so that compiled code and selective checkpointing see two calls and no internals.

    longspan::attention_forward    q, k, v, sink, share, scale -> out, lse
    longspan::attention_backward   dout, q, k, v, out, lse, sink, share, scale -> dq, dk, dv, dsink

Plan and group travel in a `Share`, registered as an opaque reference: one compilation serves every plan. This is the only file
that touches that private registry.
"""

from typing import Any

import torch
from torch._library.opaque_object import register_opaque_type
from torch._opaque_base import OpaqueBase

from longspan.attention.checks import check_call
from longspan.attention.executor import Share, run_backward, run_forward
from longspan.attention.merge import accumulation_dtype

Tensor = torch.Tensor


class ShareRef(OpaqueBase):
    """A `Share` that operators take, and the kinds of call for which its ranks have shown that they hold the same."""

    def __init__(self, share: Share) -> None:
        self.share = share
        self.agreed: set[str] = set()


register_opaque_type(ShareRef, typ="reference")


@torch.library.custom_op("longspan::attention_forward", mutates_args=())
def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, ref: ShareRef, scale: float
) -> tuple[Tensor, Tensor]:
    """Out `(B, H, T, Dv)` and lse `(B, H, T)` of local shards. Sends and receives."""
    check_call(ref.share, q, k, v, sink, scale, ref.agreed)
    return run_forward(ref.share, q, k, v, sink, scale)


@torch.library.custom_op("longspan::attention_backward", mutates_args=())
def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sink: Tensor | None,
    ref: ShareRef,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and of the sink (empty without one). Sends and receives, whichever of them are wanted."""
    return run_backward(ref.share, dout, q, k, v, out, lse, sink, scale)


@attention_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, ref: ShareRef, scale: float) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))


@attention_backward.register_fake
def _(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sink: Tensor | None,
    ref: ShareRef,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty(x.shape[2], *x.shape[:2], x.shape[3]).permute(1, 2, 0, 3) for x in (q, k, v))
    return dq, dk, dv, q.new_empty(0) if sink is None else torch.empty_like(sink)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sink, ctx.ref, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, sink)


def _differentiate(ctx: Any, dout: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, sink = ctx.saved_tensors
    dq, dk, dv, dsink = attention_backward(dout, q, k, v, out, lse, sink, ctx.ref, ctx.scale)
    wanted = [
        grad if needed else None for grad, needed in zip((dq, dk, dv, dsink), ctx.needs_input_grad[:4], strict=True)
    ]
    return (*wanted, None, None)


attention_forward.register_autograd(_differentiate, setup_context=_keep)
