"""Mixture of experts in place of a layer's feed-forward: router, experts over the ranks of a group, balance loss.
Results and gradients do not depend on which rank holds which tokens or experts.

Shapes: B batch, T this rank's slots, E hidden size, N this rank's tokens (no padding slots), X experts, k experts per token,
F intermediate size of an expert, U units, R rows (one row per token and chosen expert).
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longspan.comm.groups import rank_and_size
from longspan.comm.row_exchange import exchange_counts, exchange_rows
from longspan.comm.transport import transport_of
from longspan.errors import SpecError
from longspan.model.model_config import ModelConfig


@dataclass(frozen=True, eq=False)
class Routing:
    """Inputs and outputs of the expert layers for one micro-batch.

    The balance loss is computed per unit: the global micro-batch, or each of its documents.
    """

    live: Tensor
    """bool (B, T): False for padding slots, which are never routed or counted."""
    unit: Tensor
    """int64 (B, T): unit index of each token, from 0; ignored in padding slots."""
    unit_tokens: Tensor
    """int64 (U,): tokens of each unit in the global micro-batch."""
    group: dist.ProcessGroup | None
    """Group of the ranks that share this micro-batch; None if this rank holds all of it."""
    scale: Tensor | float
    """Factor of the balance loss's gradient, in addition to `balance`. Backward reads it: a tensor may be filled until then."""
    sums: dict[int, Tensor] = field(default_factory=dict)
    """Balance loss sum over this rank's tokens by layer index, detached, in fp32 (fp64 for fp64). Overwritten, not
    accumulated, so that a recomputed layer counts once. Empty if `balance` is 0."""
    slots: Tensor | None = None
    """int64 (N,): indices of `live` slots in the flattened B * T. Default: computed by each layer, with a device sync."""


class MixtureOfExperts(nn.Module):
    """`out_t = sum_i w_ti expert_i(x_t) + shared(x_t)` over the `top_k` most probable experts i of the router.

    The router computes `p_t = softmax(gate x_t)` in fp32 (fp64 for fp64); ties go to the expert with the lower index.
    `w_ti` is `p_ti`; with `normalise`, `p_ti` / the sum of `p_t` over the chosen experts. A token's expert outputs are summed
    in the order of their probabilities, whichever rank holds the experts.

    The balance loss of a unit u of n_u tokens is that of Switch Transformer (Fedus et al., 2021, arXiv:2101.03961, eq. 4
    to 6) for top_k experts per token; over documents it is the sequence-wise loss of DeepSeek-V3 (arXiv:2412.19437, eq. 17
    to 20): `aux_u = X sum_e f_ue P_ue`, with `f_ue = rows of u for e / (top_k n_u)` and `P_ue` the mean of p_te over u.
    The sum over units, weighted by tokens, is a sum over tokens,

        S = sum_u n_u aux_u = sum_t X sum_e f_u(t)e p_te

    The counts in f have no gradient and are summed over `routing.group`. Each rank adds the part of this rank's tokens, so
    gradients summed over ranks do not depend on the sharding. In backward S has the gradient `balance * routing.scale`,
    independent of the gradient of the output. `routing.sums[layer]` holds this rank's part of S.

    shared: the shared expert, a module (B, T, E) -> (B, T, E); required if and only if `shared_intermediate_size` is above 0.
    `Decoder.init_weights` initialises the weights, not the constructor.
    """

    def __init__(self, config: ModelConfig, layer: int, shared: nn.Module | None = None) -> None:
        super().__init__()
        if config.experts is None:
            raise SpecError(f"layer {layer} needs config.experts, which is None", hint="set experts")
        if (config.experts.shared_intermediate_size > 0) != (shared is not None):
            raise SpecError(
                f"shared_intermediate_size is {config.experts.shared_intermediate_size}, but shared is {type(shared).__name__}",
                hint="pass a shared expert of shared_intermediate_size, or None for size 0",
            )
        self.config = config.experts
        self.layer = layer
        self.gate = Gate(config.hidden_size, config.experts.num_experts)
        self.experts = Experts(config.hidden_size, config.experts.intermediate_size, config.experts.num_experts)
        self.shared_expert = shared

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """Map x (B, T, E) to (B, T, E). Padding slots give output 0 and gradient 0, whatever their values are.

        Collective over `experts.group` and, with a balance loss, over `routing.group`. Ranks without a token must also call.
        Raises SpecError: `routing` and `x` differ in (B, T).
        """
        if not x.shape[:2] == routing.live.shape == routing.unit.shape:
            raise SpecError(
                f"routing has live {tuple(routing.live.shape)} and unit {tuple(routing.unit.shape)}, but x {tuple(x.shape)}",
                hint="shard the routing of a micro-batch like its ids",
            )
        dead = ~routing.live[..., None]
        x = x.masked_fill(dead, 0.0)
        slots = routing.live.flatten().nonzero()[:, 0] if routing.slots is None else routing.slots
        # Run the router on all slots in sequence order: a parallel style can shard only this shape.
        tokens, probabilities, unit = (
            value.flatten(0, 1).index_select(0, slots) for value in (x, self.gate(x), routing.unit)
        )
        out = self._routed(tokens, probabilities, unit, routing)
        full = torch.zeros_like(x).flatten(0, 1).index_copy(0, slots, out).view_as(x)
        if self.shared_expert is None:
            return full
        shared: Tensor = self.shared_expert(x)
        return full + shared.masked_fill(dead, 0.0)

    def _routed(self, tokens: Tensor, probabilities: Tensor, unit: Tensor, routing: Routing) -> Tensor:
        """Return the expert outputs (N, E) of tokens (N, E) with probabilities (N, X) and units (N,)."""
        weights, chosen = self._choose(probabilities)
        counts = _count(unit, chosen, len(routing.unit_tokens), self.config.num_experts)
        order = chosen.flatten().argsort(stable=True)
        rows = self.experts(_take(tokens, order, self.config.top_k), counts.sum(0))
        out = _weigh(_take(rows, order.argsort(), 1).unflatten(0, weights.shape), weights).to(tokens.dtype)
        if self.config.balance:
            total = self._balance(probabilities, unit, counts, routing)
            routing.sums[self.layer] = total.detach()
            out = _Inject.apply(out, total, self.config.balance, routing.scale)  # type: ignore[no-untyped-call]
        return out

    def _choose(self, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights (N, k) and indices (N, k) of each token's experts, the most probable first."""
        # topk does not define the order of equal values; a stable sort does.
        best, chosen = probabilities.sort(dim=-1, descending=True, stable=True)
        best, chosen = best[:, : self.config.top_k], chosen[:, : self.config.top_k]
        return (best / best.sum(-1, keepdim=True) if self.config.normalise else best), chosen

    def _balance(self, probabilities: Tensor, unit: Tensor, counts: Tensor, routing: Routing) -> Tensor:
        """Return this rank's part of S, a scalar, from counts (U, X) of this rank's rows."""
        share = _sum_over(counts, routing.group).to(probabilities.dtype)
        share = share / (routing.unit_tokens.clamp_min(1) * self.config.top_k)[:, None]
        return self.config.num_experts * (share.index_select(0, unit) * probabilities).sum()


class Gate(nn.Module):
    """Router: probabilities (B, T, X) of tokens (B, T, E), in fp32 (fp64 for fp64)."""

    def __init__(self, hidden_size: int, num_experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        """Compute with the local part of a DTensor weight, unless a parallel style made `x` a DTensor too."""
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = self.weight if isinstance(x, DTensor) else _local(self.weight)
        return F.linear(x.to(wide), weight.to(wide)).softmax(-1)


class Experts(nn.Module):
    """`num_experts` SwiGLU feed-forwards, in equal contiguous parts over the ranks of `group`: an FSDP unit.

    `gate_up_proj` (X, 2 F, E) stacks each expert's gate on its up projection; `down_proj` is (X, E, F). With a `group`, dim 0
    must hold only this rank's experts, as a plain tensor or a DTensor.

    A rank sends the rows of experts on other ranks (dispatch), and returns the results of received rows (combine). With
    `n_re` rows of rank r for expert e, one forward sends exactly `E * (sum of n_re over experts of other ranks + sum of
    n_qe over other ranks q and own experts)` elements; backward sends as many (twice as many if it recomputes forward).
    With T tokens per rank and balanced routing over ep ranks, forward sends `2 T top_k E (ep - 1) / ep` elements.

    The host syncs with the device once, for the sizes to send. On one rank with `one_kernel` the host never syncs.
    """

    group: dist.ProcessGroup | None = None

    def __init__(self, hidden_size: int, intermediate_size: int, num_experts: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Map rows (R, E), sorted by expert with `counts` int64 (X,) rows each, to (R, E). Collective over `group`.

        Raises SpecError: this rank's experts times the ranks of `group` is not X.
        """
        gate_up, down = _local(self.gate_up_proj), _local(self.down_proj)
        ranks, num_local = rank_and_size(self.group)[1], len(down)
        if ranks * num_local != len(counts):
            raise SpecError(
                f"{len(counts)} experts cannot be {num_local} on each of {ranks} ranks",
                hint="choose an ep that divides num_experts, set group, and keep only this rank's experts in dim 0",
            )
        if ranks == 1:
            return _feed_forwards(rows, counts, gate_up, down)
        there = counts.view(ranks, num_local)
        here = exchange_counts(there, self.group)
        sent, received = torch.stack((there.sum(1), here.sum(1))).tolist()
        rows = exchange_rows(rows, sent, received, self.group)
        # Rows arrive by rank, then by expert. A stable sort by expert keeps the ranks in order.
        expert = torch.arange(num_local, device=rows.device).repeat(ranks)
        order = expert.repeat_interleave(here.flatten(), output_size=len(rows)).argsort(stable=True)
        out = _feed_forwards(_take(rows, order, 1), here.sum(0), gate_up, down)
        return exchange_rows(_take(out, order.argsort(), 1), received, sent, self.group)


def one_kernel(rows: Tensor, intermediate_size: int) -> bool:
    """Whether `F.grouped_mm` computes all experts in one kernel, with offsets read on the device: bf16 on CUDA, compute
    capability 8.0 or more, row sizes in multiples of 16 bytes. Otherwise a host loop computes one expert at a time."""
    return (
        rows.dtype == torch.bfloat16
        and rows.device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(rows.device) >= (8, 0)
        and rows.shape[1] % 8 == intermediate_size % 8 == 0
    )


class _Take(torch.autograd.Function):
    """Repeat each row of `x` (N, E) `copies` times and permute the N * copies rows by `order`.

    Backward sums the copies of a row in a fixed order and in wide precision, unlike the backward of `index_select`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.copies = copies
        return x.index_select(0, order // copies)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        back = grad.index_select(0, order.argsort())
        return back.unflatten(0, (len(order) // ctx.copies, ctx.copies)).sum(1), None, None


class _Inject(torch.autograd.Function):
    """Return `out` unchanged, and give the scalar `total` the gradient `balance * scale` in backward."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, total: Tensor, balance: float, scale: Tensor | float) -> Tensor:
        ctx.like, ctx.balance, ctx.scale = total.detach(), balance, scale
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return grad, torch.ones_like(ctx.like) * ctx.balance * ctx.scale, None, None


def _take(x: Tensor, order: Tensor, copies: int) -> Tensor:
    rows: Tensor = _Take.apply(x, order, copies)  # type: ignore[no-untyped-call]
    return rows


def _weigh(rows: Tensor, weights: Tensor) -> Tensor:
    """Sum rows (N, k, E) times weights (N, k) over k, in order, in the weights' dtype: (N, E)."""
    first, *others = (row * weight[:, None] for row, weight in zip(rows.unbind(1), weights.unbind(1), strict=True))
    for other in others:
        first = first + other
    return first


def _feed_forwards(rows: Tensor, counts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Apply SwiGLU to rows (R, E), sorted by expert with `counts` (X_local,) rows each."""
    if one_kernel(rows, down.shape[2]):
        ends = counts.cumsum(0, dtype=torch.int32)
        gate, up = F.grouped_mm(rows, gate_up.mT, offs=ends).chunk(2, dim=-1)
        return F.grouped_mm(F.silu(gate) * up, down.mT, offs=ends)

    def one(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, down)

    # Run experts without rows too, so that their gradient is 0 instead of None.
    return torch.cat(list(map(one, rows.split(counts.tolist()), gate_up.unbind(), down.unbind())))


def _count(unit: Tensor, chosen: Tensor, num_units: int, num_experts: int) -> Tensor:
    """Count the rows of each unit for each expert: units (N,) and experts (N, k) to int64 (U, X)."""
    pairs = (unit[:, None] * num_experts + chosen).flatten()
    counts = pairs.new_zeros(num_units * num_experts).index_add(0, pairs, torch.ones_like(pairs))
    return counts.view(num_units, num_experts)


def _sum_over(counts: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if rank_and_size(group)[1] == 1:
        return counts
    assert group is not None, "a group of several ranks"
    total = counts.to(transport_of(group).carries(counts.device), copy=True)
    dist.all_reduce(total, group=group)
    return total.to(counts.device)


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
