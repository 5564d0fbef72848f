"""AdamW, its schedule, the global gradient norm, and loss scaling for fp16."""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from longspan.train.config import OptimConfig

Tensor = torch.Tensor


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over all parameters; weight decay on matrices only."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """The rate of step 0, 1, ...: linear up over `warmup_steps`, then half a cosine down to `min_lr_ratio * lr`."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * (1 + math.cos(math.pi * min(done, 1.0))) / 2)


@dataclass
class LossScale:
    """Dynamic loss scaling: halve after a step whose gradients overflow, double after `patience` that did not.

    Our own and not `torch.amp.GradScaler`, whose check for overflow looks at each rank's shard alone.
    """

    value: float = 1.0
    good_steps: int = 0
    patience: int = 1000

    @classmethod
    def of_dtype(cls, dtype: str, ranks: int = 1) -> "LossScale":
        """2^16 for fp16; 1, for good, for every other type.

        Where a wrapper averages over `ranks`, losses are multiplied by their number first: the scale begins that much
        lower, at a power of two, so that activations meet gradients of the same size at every degree.
        """
        return cls(value=2.0 ** (16 - (ranks - 1).bit_length())) if dtype == "fp16" else cls(patience=0)

    def update(self, finite: bool) -> None:
        """Take notice of a step."""
        if not self.patience:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.value /= 2
        elif self.good_steps == self.patience:
            self.value, self.good_steps = self.value * 2, 0


def update(
    model: nn.Module, optimizer: torch.optim.Optimizer, scale: LossScale, rate: float, clip_norm: float | None
) -> float:
    """Unscale and clip the gradients and step at that learning rate; returns their global norm before clipping.

    The norm is over all shards. If it is not finite the step is skipped, and the loss scale learns of it.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    total = torch.nn.utils.get_total_norm(gradients)
    norm = float(total.full_tensor() if isinstance(total, DTensor) else total) / scale.value
    finite = math.isfinite(norm)
    if finite:
        factor = (1.0 if clip_norm is None else min(1.0, clip_norm / (norm + 1e-6))) / scale.value
        if factor != 1.0:
            torch._foreach_mul_([g.to_local() if isinstance(g, DTensor) else g for g in gradients], factor)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    scale.update(finite)
    return norm
