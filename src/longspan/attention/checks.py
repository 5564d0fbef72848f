"""What an attention call must satisfy before anything moves; the first call on a plan also compares the ranks."""

import torch

from longspan.attention.executor import Share
from longspan.attention.kernel import choose_kernel
from longspan.comm.agree import check_agreement
from longspan.plan import check_heads
from longspan.spec import LongspanError, SpecError

Tensor = torch.Tensor


def check_call(
    share: Share, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, scale: float, *, agree: bool
) -> None:
    """Raise `SpecError` if the tensors do not fit the plan.

    With `agree` (collective) the ranks compare plan and shapes, and a problem of one rank is raised on all.
    """
    problem: LongspanError | None = None
    try:
        _check_tensors(share, q, k, v, sink)
        choose_kernel(share.kernel, q, k, v)
    except LongspanError as error:
        problem = error
    if agree:
        shapes = (
            f"{q.shape[0]} {q.shape[1]} {k.shape[1]} {q.shape[-1]} {v.shape[-1]} {q.dtype} {scale} {sink is not None}"
        )
        check_agreement(share.group, {"plans": share.plan.digest, "shapes, types or scales": shapes.encode()}, problem)
    elif problem is not None:
        raise problem


def _check_tensors(share: Share, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise SpecError(f"{shapes}: attention takes (batch, heads, slots, head_dim) tensors")
    slots = share.plan.layout.num_slots(share.rank)
    if not q.shape[2] == k.shape[2] == v.shape[2] == slots:
        raise SpecError(
            f"{shapes}: rank {share.rank} of the plan holds {slots} of {share.plan.seq_len} tokens",
            hint="shard q, k, v by the plan's layout; dim 2 is the sequence",
        )
    if q.shape[0] != k.shape[0] or k.shape[:2] != v.shape[:2] or q.shape[3] != k.shape[3]:
        raise SpecError(f"{shapes}: batch sizes, KV heads of k and v, and head dims of q and k must agree")
    heads = check_heads(q.shape[1], k.shape[1])
    if share.plan.heads is not None and heads != share.plan.heads:
        raise SpecError(f"{heads} query and KV heads were given; the plan was made for {share.plan.heads}")
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        raise SpecError(
            f"q is {q.dtype} on {q.device}, k {k.dtype} on {k.device}, v {v.dtype} on {v.device}: they must be alike"
        )
    if sink is not None and sink.shape != (q.shape[1],):
        raise SpecError(f"sink has shape {tuple(sink.shape)}; one logit for each of {q.shape[1]} query heads is needed")
