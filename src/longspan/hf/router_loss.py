"""The load-balancing loss of mixtures of experts, exact over all ranks' tokens.

The loss is `E * sum over experts of (fraction of tokens sent to it) * (its mean router probability)`, a product of two
means over all tokens: the mean of the ranks' own losses is another number. With the fraction counted over all ranks the
loss is linear in the probabilities, so that the ranks' shares sum to it, and each rank's gradient is complete.
"""

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from longspan.comm.gather import stack
from longspan.hf.interface import open_sequence
from longspan.names import ROUTER_LOSS

if TYPE_CHECKING:
    from longspan.hf.model_sequence import Sequence

Tensor = torch.Tensor


def share_router_losses(model: nn.Module) -> None:
    """Let the model files of `model` compute this loss over the open sequence, where there is one."""
    for name in {type(module).__module__ for module in model.modules()}:
        file = sys.modules[name]
        plain = vars(file).get(ROUTER_LOSS)
        if plain is not None and not hasattr(plain, "on_one_rank"):
            setattr(file, ROUTER_LOSS, _shared(plain))


def _shared(plain: Any) -> Any:
    def load_balancing_loss(
        gate_logits: Any, num_experts: int | None = None, top_k: int = 2, attention_mask: Tensor | None = None
    ) -> Any:
        sequence = open_sequence()
        if sequence is None or not isinstance(gate_logits, tuple):
            return plain(gate_logits, num_experts, top_k, attention_mask)
        return _router_loss(gate_logits, top_k, sequence)

    load_balancing_loss.on_one_rank = plain  # type: ignore[attr-defined]
    return load_balancing_loss


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _router_loss(gate_logits: tuple[Tensor, ...], top_k: int, sequence: "Sequence") -> Tensor:
    """Return this rank's share of the loss of router logits (T, E), one tensor a layer."""
    real = sequence.inputs["attention_mask"].reshape(-1, 1).float()
    experts = gate_logits[0].shape[-1]
    chosen, probability = real.new_zeros(experts), real.new_zeros(experts)
    for logits in gate_logits:
        weights = logits.to(real.device).softmax(-1)
        _, picked = weights.topk(top_k, dim=-1)
        chosen = chosen + real.new_zeros(weights.shape).scatter_(1, picked, 1.0).mul(real).sum(0)
        probability = probability + (weights.float() * real).sum(0)
    counts = torch.cat([chosen, real.sum().view(1) * len(gate_logits)])
    *totals, rows = stack(counts, sequence.shards.cp.group).sum(0).split([experts, 1])
    return (totals[0] / rows * probability / rows).sum() * experts
