"""`attention`: exact attention over a sharded sequence. Local shards in, local shard out, differentiable."""

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
    """Softmax attention of this rank's queries over all keys of the sequence that are visible in the plan's mask.

    q `(B, H, T, D)`, k `(B, K, T, D)`, v `(B, K, T, Dv)` are this rank's slots. Returns `(B, H, T, Dv)` in q's dtype, 0
    for padding slots and for queries that see no key.

    - `group`: a process group or 1-D mesh of `plan.ranks` ranks. A route of two levels also takes a 2-D mesh (outer,
      inner).
    - `scale`: default `D ** -0.5`.
    - `kernel`: "auto", "flash3", "cudnn", "sdpa", "flash2", "efficient", "flex" or "reference".
    - `sink` `(H,)`: a learnable logit per head in the softmax denominator of every row. Its gradient covers the rows or
      heads that this rank computed, as for any replicated parameter.
    - `softcap` c: replaces a score s by `c tanh(s / c)`.
    - `alibi` `(H,)`: subtracts `alibi[h] |i - j|` from a score after the soft-cap, i and j on the global token axis. On
      CUDA, `flex` supports `softcap` and `alibi`, and `flash2` supports `softcap`; otherwise the slow reference kernel runs.

    Collective: every rank of the group makes the same calls, forward and backward. Raises `SpecError` before any
    exchange if the tensors do not fit the plan, `DisagreementError` if ranks differ, and `CommError` if a peer is lost
    (gloo; under NCCL the watchdog ends the process). On CUDA, ranks compare only the first call of each kind: an error in
    a later call is raised only on the rank that has it. Autocast applies as in `scaled_dot_product_attention`. There is
    no mask argument and no dropout. Differentiable once, in reverse mode.
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
    """`attention` with a rank's share of a plan. Compiled code calls `attend`, so that one graph serves all plans."""
    refuse_transforms(q, k, v, sink)
    q, k, v = autocast_like_sdpa(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if alibi is not None and not isinstance(alibi, torch.Tensor):
        raise SpecError(f"alibi={alibi!r} is not a tensor", hint="give the slopes as torch.tensor([...])")
    if alibi is not None and alibi.requires_grad:
        raise SpecError("alibi requires a gradient; ALiBi slopes are constants", hint="give alibi.detach()")
    out, *_ = attention_forward(q, k, v, sink, alibi, ref, scale, softcap)
    return out


def share_of(
    plan: Plan, group: Group, kernel: str = "auto", name: str = "", agreed: set[str] | None = None
) -> ShareRef:
    """Return this rank's share of a plan in a group. The share is made once and cached on the plan.

    `agreed` holds the kinds of call that the ranks have already compared. Pass `agreed` only if the ranks have compared
    the plan of that `name`.
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
