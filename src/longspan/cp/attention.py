"""`attention`: local shards in, local shard out, exact over the whole sequence, differentiable."""

import torch

from longspan.comm.groups import Group, as_group, rank_and_size
from longspan.cp.engine.executor import Share
from longspan.cp.engine.modes import autocast_like_sdpa, refuse_transforms
from longspan.cp.engine.operators import ShareRef, attention_forward
from longspan.errors import SpecError
from longspan.plan import Plan


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    plan: Plan,
    group: Group = None,
    scale: float | None = None,
    kernel: str = "auto",
    sink: torch.Tensor | None = None,
    softcap: float | None = None,
    alibi: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax attention of this rank's queries over every key of the sequence that the plan's mask lets them see.

    q `(B, H, T, D)`, k `(B, K, T, D)`, v `(B, K, T, Dv)` are this rank's slots; the result is `(B, H, T, Dv)` in q's type, 0 for
    dead slots and queries that see nothing. `group` is a process group or 1-D mesh of `plan.ranks` ranks, or for a route of two
    levels a 2-D mesh (outer, inner). `scale` defaults to `D ** -0.5`. `kernel` is "auto", "flash3", "cudnn", "sdpa", "flash2",
    "efficient", "flex" or "reference". `sink (H,)` is a learnable logit per head in every row's denominator; its gradient holds
    what this rank computed, its rows or its heads, like that of any replicated parameter. `softcap` c makes a score s
    `c tanh(s / c)`; `alibi (H,)` then takes `alibi[h] |i - j|` off it, i and j counted on the global token axis. On CUDA `flex`
    takes both and `flash2` a soft-cap; else these run on the reference kernel, slowly.

    Collective: every rank of the group calls it alike, forward and backward, and the ranks compare what they were given. There
    is no dropout, and the mask is the plan's. Raises `SpecError` before any exchange if the tensors do not fit the plan,
    `DisagreementError` if ranks differ, `CommError` if a peer is lost (gloo; under NCCL the watchdog ends the process). On CUDA
    ranks compare the first call of each kind alone: what is wrong with a later one is raised where it is wrong. Else as
    `scaled_dot_product_attention`, autocast included; differentiable once, in reverse mode.
    """
    return attend(q, k, v, share_of(plan, group, kernel), scale, sink, softcap, alibi)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ref: ShareRef,
    scale: float | None = None,
    sink: torch.Tensor | None = None,
    softcap: float | None = None,
    alibi: torch.Tensor | None = None,
) -> torch.Tensor:
    """`attention` by a rank's share of a plan. Compiled code goes through it, and is the same for all plans."""
    refuse_transforms(q, k, v, sink)
    q, k, v = autocast_like_sdpa(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if alibi is not None and not isinstance(alibi, torch.Tensor):
        raise SpecError(f"alibi={alibi!r} is not a tensor", hint="give the slopes as torch.tensor([...])")
    if alibi is not None and alibi.requires_grad:
        raise SpecError("the slopes of ALiBi are constants, and these require a gradient", hint="give alibi.detach()")
    out, *_ = attention_forward(q, k, v, sink, alibi, ref, scale, softcap)
    return out


def share_of(
    plan: Plan, group: Group, kernel: str = "auto", name: str = "", agreed: set[str] | None = None
) -> ShareRef:
    """This rank's share of a plan in a group, made once and kept for as long as the plan lives.

    `agreed`: the kinds of call that ranks have compared, kept by a caller whose ranks have compared the plan of that `name`.
    """
    process_group = as_group(group, plan.degrees.levels)
    kept = plan.attachments
    key = (process_group, kernel, name)
    if key not in kept:
        rank, size = rank_and_size(process_group)
        if size != plan.ranks:
            raise SpecError(
                f"the plan is for {plan.ranks} ranks and the group has {size}",
                hint=f"make the layout with ranks={size}" if size > 1 else "give group=",
            )
        kept[key] = ShareRef(Share.of(plan, rank, process_group, kernel, name), agreed)
    ref: ShareRef = kept[key]
    return ref
