"""The executor as two registered operators, opaque to torch.compile and selective checkpointing.

    longspan::attention_forward    q, k, v, ..., share, ... -> out, lse, exchanged q, k, v, out for backward
    longspan::attention_backward   dout, q, k, v, out, lse, ..., share, ... -> dq, dk, dv, dsink

A `Share` holds a rank's part of a plan and the group. It is registered as an opaque reference, so that one compilation
serves every plan. Only this file uses torch's private registry of opaque types.
"""

from typing import Any

import torch
from torch._library.opaque_object import MemberType, register_opaque_type
from torch._opaque_base import OpaqueBase

from longspan.cp.engine.call_checks import check_call
from longspan.cp.engine.executor import Share, run_backward, run_forward
from longspan.cp.engine.merge import accumulation_dtype
from longspan.cp.engine.modes import without_autocast
from longspan.errors import SpecError
from longspan.kernels.scores import ScoreChange

Tensor = torch.Tensor


class ShareRef(OpaqueBase):
    """A `Share` as an operator argument, with the kinds of call that the ranks have already compared."""

    def __init__(self, share: Share, agreed: set[str] | None = None) -> None:
        self.share = share
        self.agreed: set[str] = set() if agreed is None else agreed
        heads = share.work.heads
        self.exchanged = [] if heads is None else [heads.num_query, heads.num_kv, share.work.rows, heads.kv[-1][1]]
        """(query heads, KV heads, slots that this rank computes, all KV heads); empty without a head exchange. Fake kernels
        derive output shapes from this, the only member that compiled code can read."""


register_opaque_type(
    ShareRef, typ="reference", members={"exchanged": MemberType.USE_REAL}, guard_fn=lambda ref: ref.exchanged
)


@torch.library.custom_op("longspan::attention_forward", mutates_args=())
def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    alibi: Tensor | None,
    ref: ShareRef,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return (out `(B, H, T, Dv)` of the local shards, lse of the rows computed here, exchanged q, k, v and out). The last is
    empty without a head exchange. Collective."""
    change = ScoreChange.of(softcap, alibi)
    check_call(ref.share, q, k, v, sink, scale, change, ref.agreed)
    with without_autocast(q.device):
        return run_forward(ref.share, q, k, v, sink, scale, change)


@torch.library.custom_op("longspan::attention_backward", mutates_args=())
def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sink: Tensor | None,
    alibi: Tensor | None,
    ref: ShareRef,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv, dsink). dsink is empty without a sink. Collective, whichever gradients are needed."""
    with without_autocast(q.device):
        return run_backward(ref.share, dout, q, k, v, out, lse, sink, scale, ScoreChange.of(softcap, alibi))


@attention_forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    alibi: Tensor | None,
    ref: ShareRef,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    B, H, T, D = q.shape
    Dv, wide = v.shape[3], accumulation_dtype(q.dtype)
    out = q.new_empty(B, H, T, Dv)
    if not ref.exchanged:
        return out, q.new_empty(B, H, T, dtype=wide), []
    own_q, own_kv, rows, _ = ref.exchanged
    together = [q.new_empty(B, heads, rows, dim) for heads, dim in ((own_q, D), (own_kv, D), (own_kv, Dv), (own_q, Dv))]
    return out, q.new_empty(B, own_q, rows, dtype=wide), together


@attention_backward.register_fake
def _(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sink: Tensor | None,
    alibi: Tensor | None,
    ref: ShareRef,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dsink = q.new_empty(0) if sink is None else torch.empty_like(sink)
    if ref.exchanged:
        B, H, T, _ = dout.shape
        dq, dk, dv = (
            x.new_empty(B, n, T, x.shape[3]) for x, n in ((q, H), (k, ref.exchanged[3]), (v, ref.exchanged[3]))
        )
    else:
        dq, dk, dv = (x.new_empty(x.shape[2], *x.shape[:2], x.shape[3]).permute(1, 2, 0, 3) for x in (q, k, v))
    return dq, dk, dv, dsink


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, list[Tensor]]) -> None:
    q, k, v, sink, alibi, ctx.ref, ctx.scale, ctx.softcap = inputs
    out, lse, together = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(lse, *together)
    ctx.save_for_backward(*(together or (q, k, v, out)), lse, sink, alibi)


def _differentiate(ctx: Any, dout: Tensor | None, *_: Any) -> tuple[Any, ...]:
    q, k, v, out, lse, sink, alibi = ctx.saved_tensors
    if dout is None:
        return (None,) * 8
    dq, dk, dv, dsink = attention_backward(dout, q, k, v, out, lse, sink, alibi, ctx.ref, ctx.scale, ctx.softcap)
    wanted = [
        grad if needed else None for grad, needed in zip((dq, dk, dv, dsink), ctx.needs_input_grad[:4], strict=True)
    ]
    return (*wanted, None, None, None, None)


def _refuse(ctx: Any, *_: Any) -> tuple[Any, ...]:
    raise SpecError(
        "a second derivative was requested; longspan attention is differentiable once",
        hint="leave create_graph out, or take second derivatives on one rank with scaled_dot_product_attention",
    )


attention_forward.register_autograd(_differentiate, setup_context=_keep)
attention_backward.register_autograd(_refuse)
