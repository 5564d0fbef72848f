"""Checks of an attention call before any exchange, first on each rank, then across the ranks."""

from typing import NoReturn

import torch

from longspan.comm.agree import check_agreement
from longspan.comm.groups import RankGroup
from longspan.comm.transport import transport_of
from longspan.cp.engine.executor import Share
from longspan.errors import LongspanError, SpecError
from longspan.kernels.scores import ScoreChange
from longspan.plan import check_heads

Tensor = torch.Tensor


def check_call(
    share: Share,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    scale: float,
    change: ScoreChange | None,
    agreed: set[str],
) -> None:
    """Raise `SpecError` if the tensors do not fit the plan. The ranks compare plans, shapes, dtypes and scales.

    On CPU the ranks compare every call (0.1 ms over gloo), and an error of one rank is raised on all ranks. On CUDA the
    comparison would make the host wait for the device, so the ranks compare only the first call of each kind. If a rank
    has an error in a later call, only this rank raises, and the other ranks end at their timeout. `agreed` holds the
    kinds compared so far, for one plan's share, or for all plans of a `ContextParallel`, whose ranks compare plans once
    per micro-batch.
    """
    problem: LongspanError | None = None
    try:
        _check_tensors(share, q, k, v, sink)
        if not 0 < scale < float("inf"):
            raise SpecError(f"scale={scale} is not a positive number", hint="for a negative scale, negate q")
        _check_change(change, q)
        share.kernel_for(q, k, v, change)
    except LongspanError as error:
        problem = error
    heads_and_dims = (
        f"{q.shape[0]} {tuple(q.shape[1:2])} {tuple(k.shape[1:2])} {tuple(q.shape[3:])} {tuple(v.shape[3:])}"
    )
    check_together(
        share, agreed, q.device, f"{heads_and_dims} {q.dtype} {scale} {sink is not None} {_described(change)}", problem
    )


def check_together(
    share: Share, agreed: set[str], device: torch.device, call: str, problem: LongspanError | None
) -> None:
    """Raise on all ranks if any rank has a `problem`, or if plans or kinds of `call` differ between ranks."""
    call = f"{share.name} {call}"
    if device.type == "cuda" and agreed:
        if problem is not None:
            raise problem
        if call in agreed:
            return
    check_agreement(share.group, _compared(share.digest, call), problem)
    if device.type == "cuda" and not agreed and share.group is not None:
        transport_of(share.group).connect(device)
    agreed.add(call)


def announce(group: RankGroup | None, problem: Exception) -> NoReturn:
    """Raise `problem`, found in place of an attention call, on this rank, and its text on the ranks that make the call."""
    check_agreement(group, _compared(b"", ""), problem)
    raise problem


def _compared(digest: bytes, call: str) -> dict[str, bytes]:
    return {"plans": digest, "shapes, types, scales or changes of scores": call.encode()}


def _check_change(change: ScoreChange | None, q: Tensor) -> None:
    if change is None:
        return
    if change.softcap is not None and not 0 < change.softcap < float("inf"):
        raise SpecError(f"softcap={change.softcap} is not a positive number", hint="use softcap=None for no cap")
    slopes = change.slopes
    if slopes is not None and (
        slopes.shape != (q.shape[1],) or not slopes.is_floating_point() or slopes.device != q.device
    ):
        raise SpecError(
            f"alibi is {tuple(slopes.shape)} {slopes.dtype} on {slopes.device}",
            hint=f"give one floating-point slope for each of the {q.shape[1]} query heads, on {q.device}",
        )


def _described(change: ScoreChange | None) -> str:
    """Describe the change for comparison. On CUDA without the slopes' values, because reading them would synchronise."""
    if change is None:
        return ""
    slopes = change.slopes
    return f"softcap {change.softcap} alibi {slopes.tolist() if slopes is not None and slopes.is_cpu else slopes is not None}"


def _check_tensors(share: Share, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> None:
    if share.staged:
        raise SpecError(
            f"route {share.route!r} was given q, k and v of all heads, which this route exists to avoid",
            hint='pass the layer\'s input to longspan.projected_attention (or UpipeAttention), or set route="ulysses"',
        )
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise SpecError(f"{shapes}: attention takes 4-D tensors (batch, heads, slots, head_dim)")
    slots = share.work.slots
    if not q.shape[2] == k.shape[2] == v.shape[2] == slots:
        raise SpecError(
            f"{shapes}: rank {share.work.rank} of the plan holds {slots} of {share.seq_len} tokens",
            hint="shard q, k, v by the plan's layout; dim 2 is the sequence",
        )
    if q.shape[0] != k.shape[0] or k.shape[:2] != v.shape[:2] or q.shape[3] != k.shape[3]:
        raise SpecError(f"{shapes}: batch sizes, KV heads of k and v, and head dims of q and k must agree")
    heads = check_heads(q.shape[1], k.shape[1])
    if share.heads is not None and heads != share.heads:
        raise SpecError(
            f"q and k have {heads} (query, KV) heads; the plan was made for {share.heads}",
            hint=f"make the plan with heads={heads}",
        )
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        raise SpecError(
            f"q is {q.dtype} on {q.device}, k {k.dtype} on {k.device}, v {v.dtype} on {v.device}: dtypes and devices differ"
        )
    if sink is not None and sink.shape != (q.shape[1],):
        raise SpecError(f"sink has shape {tuple(sink.shape)}; it needs one logit for each of {q.shape[1]} query heads")
