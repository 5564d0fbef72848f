"""Untied Ulysses (`upipe`, arXiv:2602.21196): project, exchange, attend and project back a few heads at a time.

    for each stage:  x -> q of its heads -> exchange -> attention -> exchange back -> output += out Wo[:, its heads]
                       -> k, v at the first stage that needs these KV heads

Queries, keys and values of all heads never exist at once. Forward saves only x; backward recomputes each stage. A stage
slices the rows of its heads from the weights, so that the weights keep the model's own head order.

    B batch, T slots of this rank, E hidden size, H query heads, K KV heads, D head dim
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from longspan.comm.groups import Group
from longspan.comm.traffic import Call, Phase, call
from longspan.cp.attention import share_of
from longspan.cp.engine.call_checks import check_together
from longspan.cp.engine.executor import Share, attend_rows, differentiate_rows
from longspan.cp.engine.head_exchange import GroupedKernel, HeadExchange
from longspan.cp.engine.merge import accumulation_dtype
from longspan.cp.engine.modes import autocast_like_sdpa, refuse_transforms
from longspan.cp.engine.operators import ShareRef
from longspan.errors import LongspanError, SpecError
from longspan.kernels.protocol import Kernel
from longspan.names import ROUTES
from longspan.plan import HeadStage, Plan, check_heads, head_stages

Tensor = torch.Tensor
Transform = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Projections:
    """The linear projections of an attention layer, as weights `(out, in)`.

    q `(H D, E)`, k and v `(K D, E)`, o `(E, H D)`; biases are optional. `head_dim` is D. `on_q` and `on_k` are applied
    to a few heads `(B, heads, T, D)` at a time before the exchange, such as rotary embedding or a norm; `on_q` and `on_k`
    must treat all heads alike. `used` lists the tensors inside `on_q` and `on_k` that need gradients.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    head_dim: int
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    o_bias: Tensor | None = None
    on_q: Transform = lambda x: x
    on_k: Transform = lambda x: x
    used: tuple[Tensor, ...] = ()


def projected_attention(
    x: Tensor,
    projections: Projections,
    *,
    plan: Plan,
    group: Group = None,
    heads_per_stage: int | None = None,
    scale: float | None = None,
    kernel: str = "auto",
) -> Tensor:
    """A complete attention layer on this rank's slots, `x (B, T, E)` -> `(B, T, E)`, by a plan of route "upipe".

    `heads_per_stage` is the number of query heads computed at a time, over all ranks, equally many per rank.
    Default: the smallest valid number. If it is invalid, raises a `SpecError` that lists the valid numbers. Otherwise
    raises as `attention` does. Differentiable in x, all weights and `used`; backward recomputes attention. Collective, as
    `attention` is.
    """
    if not plan.staged:
        staged = next(name for name, route in ROUTES.items() if route.staged)
        raise SpecError(
            f"projected_attention was given a plan of route {plan.route!r}", hint=f'make the plan with route="{staged}"'
        )
    refuse_transforms(x)
    if autocast_like_sdpa(x)[0] is not x:
        raise SpecError(
            f"route {plan.route!r} was called under autocast; projections run in the dtypes of x and the weights",
            hint="disable autocast for this layer, and cast x and the weights to the dtype to compute in",
        )
    ref = share_of(plan, group, kernel)
    scale = projections.head_dim**-0.5 if scale is None else scale
    weights = [getattr(projections, name) for name in _WEIGHTS]
    out: Tensor = _StagedAttention.apply(x, ref, heads_per_stage, scale, projections, *weights, *projections.used)  # type: ignore[no-untyped-call]
    return out


class UpipeAttention(nn.Module):
    """An attention layer that never holds q, k, v of all heads (route "upipe"). Parameters as in transformers' Llama.

    `head_dim` defaults to `hidden_size / num_heads`.
    """

    def __init__(
        self, hidden_size: int, num_heads: int, num_kv_heads: int, heads_per_stage: int, head_dim: int | None = None
    ) -> None:
        super().__init__()
        check_heads(num_heads, num_kv_heads)
        if head_dim is None and hidden_size % num_heads:
            raise SpecError(
                f"hidden_size {hidden_size} is not a multiple of {num_heads} heads",
                hint="change hidden_size or num_heads, or give head_dim",
            )
        self.head_dim = hidden_size // num_heads if head_dim is None else head_dim
        self.heads_per_stage = heads_per_stage
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=False)

    def forward(self, x: Tensor, plan: Plan, group: Group = None, rotate: Transform = lambda x: x) -> Tensor:
        """`x (B, T, E)` -> `(B, T, E)`. `rotate` applies positions to a few heads `(B, heads, T, D)` of q or k."""
        projections = Projections(
            self.q_proj.weight, self.k_proj.weight, self.v_proj.weight, self.o_proj.weight, self.head_dim,
            on_q=rotate, on_k=rotate,
        )  # fmt: skip
        return projected_attention(x, projections, plan=plan, group=group, heads_per_stage=self.heads_per_stage)


_WEIGHTS = ("q", "k", "v", "o", "q_bias", "k_bias", "v_bias", "o_bias")


class _StagedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        ref: ShareRef,
        heads_per_stage: int | None,
        scale: float,
        projections: Projections,
        *tensors: Any,
    ) -> Tensor:
        stages = _check(ref, x, heads_per_stage, scale, projections)
        ctx.made_of = ref.share, stages, scale, projections
        ctx.save_for_backward(x, *tensors)
        return _Layer(ref.share, stages, scale, projections, x).forward()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        share, stages, scale, projections = ctx.made_of
        x, *tensors = ctx.saved_tensors
        # Use the saved weights, because FSDP may have freed and gathered the weights in `projections` since.
        saved = replace(projections, **dict(zip(_WEIGHTS, tensors, strict=False)), used=tuple(tensors[len(_WEIGHTS) :]))
        dx, gradients = _Layer(share, stages, scale, saved, x).backward(dy)
        return (dx, None, None, None, None, *gradients)


@dataclass
class _Heads:
    """A few heads of q, k or v on this rank's slots, with the autograd graph of their transform, if any."""

    name: str
    heads: tuple[int, ...]
    projected: Tensor | None = None
    made: Tensor | None = None


@dataclass
class _KV:
    """The KV heads that successive stages share: on this rank's slots, after the exchange, and the gradients so far."""

    local: tuple[_Heads, _Heads]
    exchange: HeadExchange
    rows: tuple[Tensor, Tensor]
    gradients: list[Tensor] | None = None

    def add(self, dk: Tensor, dv: Tensor) -> None:
        if self.gradients is None:
            self.gradients = [dk, dv]
        else:
            self.gradients[0] += dk
            self.gradients[1] += dv


class _Layer:
    """One call of the layer on this rank, forward or backward."""

    def __init__(
        self, share: Share, stages: tuple[HeadStage, ...], scale: float, projections: Projections, x: Tensor
    ) -> None:
        self.share, self.stages, self.scale, self.maps, self.x = share, stages, scale, projections, x
        self.wide = accumulation_dtype(x.dtype)

    def forward(self) -> Tensor:
        result = self.x.new_zeros(*self.x.shape[:2], self.maps.o.shape[0], dtype=self.wide)
        if self.maps.o_bias is not None:
            result += self.maps.o_bias
        with self._call("forward") as meter:
            kv: _KV | None = None
            for stage in self.stages:
                kv = None if stage.new_kv else kv
                exchange, _, q, kv = self._gather(stage, kv, meter)
                kernel = self._kernel(exchange, q, kv)
                out, _ = attend_rows(self.share, kernel, (q, *kv.rows), None, self.scale, meter)
                del q
                (local,) = exchange.back([out], [], self.x.dtype)
                del out
                _add_product(result, _side_by_side(local), self._columns(stage).mT)
        return result.to(self.x.dtype)

    def backward(self, dy: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        """Return (dx, gradients of the weights in the order of `_WEIGHTS` followed by those of `used`)."""
        D, dtype = self.maps.head_dim, self.x.dtype
        self.dx = torch.zeros_like(self.x, dtype=self.wide)
        weights = {name: getattr(self.maps, name) for name in _WEIGHTS}
        self.sums = {name: torch.zeros_like(w) for name, w in weights.items() if w is not None}
        self.used = [torch.zeros_like(x) for x in self.maps.used]
        if "o_bias" in self.sums:
            self.sums["o_bias"] += dy.flatten(0, 1).sum(0)
        with self._call("backward") as meter:
            kv: _KV | None = None
            for stage in self.stages:
                if stage.new_kv:
                    self._finish(kv)
                    kv = None
                exchange, local_q, q, kv = self._gather(stage, kv, meter)
                kernel = self._kernel(exchange, q, kv)
                out, lse = attend_rows(self.share, kernel, (q, *kv.rows), None, self.scale, meter)
                (local_out,) = exchange.back([out], [], dtype)
                found = _rows(dy).mT @ _rows(_side_by_side(local_out))
                _add_heads(self.sums["o"].unflatten(1, (-1, D)), found.unflatten(1, (-1, D)), stage.query, dim=1)
                del local_out
                (dout,) = exchange.there([(dy @ self._columns(stage)).unflatten(-1, (-1, D)).transpose(1, 2)])
                dq, dk, dv, _ = differentiate_rows(
                    self.share, kernel, dout, (q, *kv.rows), out, lse, None, self.scale, meter, partial=True
                )
                kv.add(dk, dv)
                del q, out, lse, dout, dk, dv
                (dq,) = exchange.back([dq.to(dtype)], [], dtype)
                self._project_back(local_q, dq)
                del local_q, dq
            self._finish(kv)
        return self.dx.to(dtype), [self.sums.get(name) for name in _WEIGHTS] + list(self.used)

    def _gather(self, stage: HeadStage, kv: _KV | None, meter: Call) -> tuple[HeadExchange, _Heads, Tensor, _KV]:
        """Project and exchange the heads of a stage. Returns (exchange, q before the exchange, q, k and v).

        q, k and v hold all rows of this rank's heads of the stage. If `kv` is given, it is reused and only q is projected.
        """
        exchange = HeadExchange(stage.share, self.share.work.slots, self.share.work.rows, self.share.group, meter)
        local_q, made_q = self._project("q", stage.query)
        if kv is not None:
            (q,) = exchange.there([made_q])
            return exchange, local_q, q, kv
        (local_k, made_k), (local_v, made_v) = self._project("k", stage.kv), self._project("v", stage.kv)
        again = stage is not self.stages[0]
        q, k, v = exchange.gather(made_q, made_k, made_v, self.share.comm_dtype, again)
        return exchange, local_q, q, _KV((local_k, local_v), exchange, (k, v))

    def _project(self, name: str, heads: tuple[int, ...]) -> tuple[_Heads, Tensor]:
        """Project x to these heads and transform the heads. Returns (record for backward, heads `(B, heads, T, D)`)."""
        D, bias = self.maps.head_dim, getattr(self.maps, f"{name}_bias")
        rows = self._weight_rows(name, heads)
        bias = None if bias is None else _take_heads(bias.unflatten(0, (-1, D)), heads).flatten()
        projected = F.linear(self.x, rows, bias).unflatten(-1, (-1, D)).transpose(1, 2)
        transform = {"q": self.maps.on_q, "k": self.maps.on_k}.get(name)
        if transform is None:
            return _Heads(name, heads), projected
        with torch.enable_grad():
            projected = projected.detach().requires_grad_()
            made = transform(projected)
        if made.shape != projected.shape or made.dtype != projected.dtype:
            raise SpecError(
                f"on_{name} (rotate) returned {tuple(made.shape)} {made.dtype} for {tuple(projected.shape)} "
                f"{projected.dtype}; shape and dtype must stay the same",
                hint="rotate only the given heads, in their dtype",
            )
        return (_Heads(name, heads) if made is projected else _Heads(name, heads, projected, made)), made.detach()

    def _project_back(self, local: _Heads, gradient: Tensor) -> None:
        """Add the gradients of x, of the heads' weight rows and of `used`, given the gradient of these heads."""
        D, name = self.maps.head_dim, local.name
        if local.made is not None and local.projected is not None:
            wanted = [local.projected, *self.maps.used]
            gradient, *others = torch.autograd.grad(local.made, wanted, gradient, allow_unused=True)
            for total, part in zip(self.used, others, strict=True):
                if part is not None:
                    total += part
        flat = _side_by_side(gradient)
        _add_product(self.dx, flat, self._weight_rows(name, local.heads))
        found = {name: _rows(flat).mT @ _rows(self.x)}
        if f"{name}_bias" in self.sums:
            found[f"{name}_bias"] = _rows(flat).sum(0)
        for key, part in found.items():
            _add_heads(self.sums[key].unflatten(0, (-1, D)), part.unflatten(0, (-1, D)), local.heads)

    def _finish(self, kv: _KV | None) -> None:
        """Return the gradients of KV heads to their ranks, after the last stage that uses these heads."""
        if kv is None or kv.gradients is None:
            return
        dtype, replicated = self.x.dtype, kv.exchange.share.replicates
        gradients = [gradient if replicated else gradient.to(dtype) for gradient in kv.gradients]
        kv.gradients = None
        for local, gradient in zip(kv.local, kv.exchange.back([], gradients, dtype), strict=True):
            self._project_back(local, gradient)

    def _kernel(self, exchange: HeadExchange, q: Tensor, kv: _KV) -> Kernel:
        kernel = self.share.kernel_for(q, *kv.rows)
        exchange.meter.kernel = kernel.name
        return GroupedKernel.of(kernel, exchange.share)

    def _weight_rows(self, name: str, heads: tuple[int, ...]) -> Tensor:
        weight: Tensor = getattr(self.maps, name)
        return _take_heads(weight.unflatten(0, (-1, self.maps.head_dim)), heads).flatten(0, 1)

    def _columns(self, stage: HeadStage) -> Tensor:
        """Columns of the output projection for the heads of a stage: `(E, heads D)`."""
        return _take_heads(self.maps.o.unflatten(1, (-1, self.maps.head_dim)), stage.query, dim=1).flatten(1, 2)

    @contextmanager
    def _call(self, phase: Phase) -> Iterator[Call]:
        with call(phase, self.share.route, self.share.kernel, self.share.work.rank, self.x.device) as meter:
            meter.head_shares = len(self.share.whole_heads.members) * len(self.stages)
            yield meter


def _side_by_side(x: Tensor) -> Tensor:
    """`(B, heads, T, D)` -> `(B, T, heads D)`."""
    return x.transpose(1, 2).flatten(2)


def _rows(x: Tensor) -> Tensor:
    """`(B, T, E)` -> `(B T, E)`."""
    return x.flatten(0, 1)


def _runs(heads: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield ranges of consecutive heads as (first head, count). Indexing a CUDA tensor by a list would synchronise."""
    start = 0
    for place in range(1, len(heads) + 1):
        if place == len(heads) or heads[place] != heads[place - 1] + 1:
            yield heads[start], place - start
            start = place


def _take_heads(x: Tensor, heads: Sequence[int], dim: int = 0) -> Tensor:
    """Select heads of `x` along `dim`. A view if the heads are consecutive."""
    parts = [x.narrow(dim, first, number) for first, number in _runs(heads)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _add_heads(total: Tensor, x: Tensor, heads: Sequence[int], dim: int = 0) -> None:
    """Add `x`, which holds these heads along `dim`, to the same heads of `total`."""
    place = 0
    for first, number in _runs(heads):
        total.narrow(dim, first, number).add_(x.narrow(dim, place, number))
        place += number


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute `total (B, T, E) += a (B, T, n) @ b (n, E)`, without a temporary if the dtypes are equal."""
    if total.dtype == a.dtype:
        _rows(total).addmm_(_rows(a), b)
    else:
        total += a @ b


def _check(
    ref: ShareRef, x: Tensor, heads_per_stage: int | None, scale: float, projections: Projections
) -> tuple[HeadStage, ...]:
    """Return the stages, or raise on all ranks."""
    share, problem = ref.share, None
    stages: tuple[HeadStage, ...] = ()
    try:
        stages = head_stages(share.whole_heads, heads_per_stage)
        _check_shapes(share, x, projections)
    except LongspanError as error:
        problem = error
    kind = f"{tuple(x.shape[:1])} {tuple(x.shape[2:])} {x.dtype} {heads_per_stage} {scale} {projections.head_dim}"
    check_together(share, ref.agreed, x.device, kind, problem)
    return stages


def _check_shapes(share: Share, x: Tensor, maps: Projections) -> None:
    assert share.heads is not None, "the route requires heads"
    if x.ndim != 3 or x.shape[1] != share.work.slots:
        raise SpecError(
            f"x {tuple(x.shape)}: rank {share.work.rank} of the plan holds {share.work.slots} of {share.seq_len} tokens",
            hint="give x as (batch, slots, hidden_size), sharded by the plan's layout",
        )
    (num_q, num_kv), D, E = share.heads, maps.head_dim, x.shape[2]
    right = {"q": (num_q * D, E), "k": (num_kv * D, E), "v": (num_kv * D, E), "o": (maps.o.shape[0], num_q * D)}
    for name, shape in right.items():
        weight: Tensor = getattr(maps, name)
        if tuple(weight.shape) != shape or weight.dtype != x.dtype or weight.device != x.device:
            raise SpecError(
                f"projection {name} must be {shape} {x.dtype} on {x.device}, not {tuple(weight.shape)} {weight.dtype} on "
                f"{weight.device}: x is {tuple(x.shape)}, with {num_q} query and {num_kv} KV heads of dim {D}"
            )
