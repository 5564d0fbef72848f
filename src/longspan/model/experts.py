"""A mixture of experts in the place of a layer's feed-forward: router, experts over the ranks of a group, balance loss.
Results and gradients do not depend on which rank holds which tokens, nor on which holds which experts.

Shapes: B batch, T this rank's slots, E hidden size, N this rank's live tokens, X experts, k experts of a token, F width of an
expert, U units, R rows (a row is a token on its way through one of its experts).
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
    """What a micro-batch tells its layers of experts; made once per micro-batch.

    A unit is what the balance loss is taken over: the global micro-batch, or each of its documents.
    """

    live: Tensor
    """bool (B, T): False for dead slots, which are never routed or counted."""
    unit: Tensor
    """int64 (B, T): the number of each token's unit, from 0; not looked at in dead slots."""
    unit_tokens: Tensor
    """int64 (U,): tokens of each unit in the global micro-batch."""
    group: dist.ProcessGroup | None
    """The ranks that hold the other tokens of this micro-batch; None: there are none."""
    scale: Tensor | float
    """What the gradient of the auxiliary sum is multiplied by, beside `balance`. Read in backward: a tensor may be filled
    until then."""
    sums: dict[int, Tensor] = field(default_factory=dict)
    """Layer index -> its auxiliary sum over this rank's tokens, detached, in fp32 (fp64 for fp64). Assigned and not
    added, so that a recomputed layer counts once; not filled where `balance` is 0."""
    slots: Tensor | None = None
    """int64 (N,): where `live` is True in its B T slots; None: each layer looks, and waits for the device."""


class MixtureOfExperts(nn.Module):
    """`out_t = sum_i w_ti expert_i(x_t) + shared(x_t)` over the `top_k` experts i that the router finds most probable.

    The router computes in fp32 (fp64 for fp64): `p_t = softmax(gate x_t)`; of equal probabilities the expert with the
    lower number wins. `w_ti` is `p_ti`, or with `normalise` their share of the chosen probabilities' sum. A token's
    experts are summed in the order of their probabilities, whichever rank they are on.

    The auxiliary balance loss of a unit u of n_u tokens is that of Switch Transformer (Fedus et al., 2021,
    arXiv:2101.03961, eq. 4 to 6; over documents it is the sequence-wise one of DeepSeek-V3, arXiv:2412.19437, eq. 17 to
    20), for top_k rows a token: `aux_u = X sum_e f_ue P_ue`, with `f_ue = rows of u for e / (top_k n_u)` and `P_ue` the
    mean of p_te over u. Its sum over units, weighted by their tokens, is a sum over tokens,

        S = sum_u n_u aux_u = sum_t X sum_e f_u(t)e p_te

    once the counts f, which have no gradient, are summed over `routing.group`: so each rank adds its own tokens' part,
    and gradients summed over ranks do not depend on how tokens are spread. S gets the gradient `balance * routing.scale`
    in backward, whatever the gradient of the output is; `routing.sums[layer]` keeps this rank's part.

    shared: the shared expert, a module (B, T, E) -> (B, T, E), exactly if `shared_intermediate_size` is not 0. Weights are not
    drawn here: `Decoder.init_weights` draws them.
    """

    def __init__(self, config: ModelConfig, layer: int, shared: nn.Module | None = None) -> None:
        super().__init__()
        if config.experts is None:
            raise SpecError(f"layer {layer} is to have experts, but the model's config has none", hint="set experts")
        if (config.experts.shared_intermediate_size > 0) != (shared is not None):
            raise SpecError(
                f"shared_intermediate_size is {config.experts.shared_intermediate_size}, and shared is {type(shared).__name__}",
                hint="give a shared expert of that size, or none for a size of 0",
            )
        self.config = config.experts
        self.layer = layer
        self.gate = Gate(config.hidden_size, config.experts.num_experts)
        self.experts = Experts(config.hidden_size, config.experts.intermediate_size, config.experts.num_experts)
        self.shared_expert = shared

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """x (B, T, E) -> (B, T, E). Dead slots give 0 and get no gradient, whatever they hold.

        Collective over `experts.group` and, with a balance loss, over `routing.group`: a rank without a token takes part.
        Raises `SpecError` for a routing of other slots.
        """
        if not x.shape[:2] == routing.live.shape == routing.unit.shape:
            raise SpecError(
                f"routing is of slots {tuple(routing.live.shape)} and units {tuple(routing.unit.shape)}, x is {tuple(x.shape)}",
                hint="shard the routing of a micro-batch like its ids",
            )
        dead = ~routing.live[..., None]
        x = x.masked_fill(dead, 0.0)
        slots = routing.live.flatten().nonzero()[:, 0] if routing.slots is None else routing.slots
        # The router sees the slots as they lie in the sequence, which is what a parallel style knows how to cut.
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
        """What their experts make of live tokens (N, E) of probabilities (N, X) and units (N,): (N, E)."""
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
        """Weights (N, k) and numbers (N, k) of each token's experts, the most probable first."""
        # topk leaves open which of equal values it takes.
        best, chosen = probabilities.sort(dim=-1, descending=True, stable=True)
        best, chosen = best[:, : self.config.top_k], chosen[:, : self.config.top_k]
        return (best / best.sum(-1, keepdim=True) if self.config.normalise else best), chosen

    def _balance(self, probabilities: Tensor, unit: Tensor, counts: Tensor, routing: Routing) -> Tensor:
        """This rank's part of S, a scalar; counts (U, X) are of this rank's rows."""
        share = _sum_over(counts, routing.group).to(probabilities.dtype)
        share = share / (routing.unit_tokens.clamp_min(1) * self.config.top_k)[:, None]
        return self.config.num_experts * (share.index_select(0, unit) * probabilities).sum()


class Gate(nn.Module):
    """The router: probabilities (B, T, X) of tokens (B, T, E), in fp32 (fp64 for fp64)."""

    def __init__(self, hidden_size: int, num_experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        """A weight that is a DTensor counts as this rank's own, unless a parallel style made `x` one too."""
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = self.weight if isinstance(x, DTensor) else _local(self.weight)
        return F.linear(x.to(wide), weight.to(wide)).softmax(-1)


class Experts(nn.Module):
    """`num_experts` SwiGLU feed-forwards, in equal contiguous parts over the ranks of `group`: the unit to shard.

    `gate_up_proj` (X, 2 F, E) holds each expert's gate above its up projection, `down_proj` (X, E, F). Whoever sets
    `group` leaves of dim 0 this rank's part alone, as a plain tensor or a DTensor.

    A rank sends the rows of experts that it does not hold (dispatch), and the results of the rows that came (combine): in
    one forward, with `n_re` rows of rank r for expert e, exactly `E * (sum of n_re over experts of other ranks + sum of
    n_qe over other ranks q and own experts)` elements, and as many again in backward (twice, if it recomputes forward).
    Where the router spreads the rows of T tokens a rank evenly over ep ranks that is `2 T top_k E (ep - 1) / ep`.

    The host waits for the device once, for the sizes of what is sent; with one rank never, where `one_kernel` holds.
    """

    group: dist.ProcessGroup | None = None

    def __init__(self, hidden_size: int, intermediate_size: int, num_experts: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows (R, E) in the order of their experts, counts (X,) int64 of them for each -> (R, E). Collective over `group`."""
        gate_up, down = _local(self.gate_up_proj), _local(self.down_proj)
        ranks, num_local = rank_and_size(self.group)[1], len(down)
        if ranks * num_local != len(counts):
            raise SpecError(
                f"{len(counts)} experts are not {num_local} on each of {ranks} ranks",
                hint="ep divides the number of experts; set group, and leave this rank's part of dim 0 alone",
            )
        if ranks == 1:
            return _feed_forwards(rows, counts, gate_up, down)
        there = counts.view(ranks, num_local)
        here = exchange_counts(there, self.group)
        sent, received = torch.stack((there.sum(1), here.sum(1))).tolist()
        rows = exchange_rows(rows, sent, received, self.group)
        # By rank, and of each rank by expert: sorted by expert alone, a stable sort keeps the ranks in order.
        expert = torch.arange(num_local, device=rows.device).repeat(ranks)
        order = expert.repeat_interleave(here.flatten(), output_size=len(rows)).argsort(stable=True)
        out = _feed_forwards(_take(rows, order, 1), here.sum(0), gate_up, down)
        return exchange_rows(_take(out, order.argsort(), 1), received, sent, self.group)


def one_kernel(rows: Tensor, intermediate_size: int) -> bool:
    """Whether torch's grouped product computes all experts in one kernel, offsets read on the device: bf16 on CUDA, compute
    capability 8.0 or more, rows of 16 bytes' multiples. Elsewhere it loops over experts itself, on the host."""
    return (
        rows.dtype == torch.bfloat16
        and rows.device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(rows.device) >= (8, 0)
        and rows.shape[1] % 8 == intermediate_size % 8 == 0
    )


class _Take(torch.autograd.Function):
    """Rows of `x` (N, E), each `copies` times, in the order of a permutation of the N * copies copies.

    Backward sums the copies of a row in their own order, in wide precision: `index_select` would add them up in any.
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
    """`out`, unchanged; in backward `total`, a scalar that it does not depend on, gets the gradient `balance * scale`."""

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
    """(N, k, E) and (N, k) -> (N, E), summed over k one by one, in the weights' dtype."""
    first, *others = (row * weight[:, None] for row, weight in zip(rows.unbind(1), weights.unbind(1), strict=True))
    for other in others:
        first = first + other
    return first


def _feed_forwards(rows: Tensor, counts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """SwiGLU of rows (R, E) in the order of their experts, of which `counts` (X_local,) has the numbers."""
    if one_kernel(rows, down.shape[2]):
        ends = counts.cumsum(0, dtype=torch.int32)
        gate, up = F.grouped_mm(rows, gate_up.mT, offs=ends).chunk(2, dim=-1)
        return F.grouped_mm(F.silu(gate) * up, down.mT, offs=ends)

    def one(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, down)

    # An expert without a row takes part: its gradient is then 0, and not missing.
    return torch.cat(list(map(one, rows.split(counts.tolist()), gate_up.unbind(), down.unbind())))


def _count(unit: Tensor, chosen: Tensor, num_units: int, num_experts: int) -> Tensor:
    """Rows of each unit for each expert: (N,) and (N, k) -> int64 (U, X)."""
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
