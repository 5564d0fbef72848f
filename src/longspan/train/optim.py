"""AdamW, the learning-rate schedule, the global gradient norm, and loss scaling for fp16."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from longspan.train.train_config import OptimConfig

Tensor = torch.Tensor


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """Make AdamW over all parameters, with weight decay on matrices only.

    Each device mesh has separate parameter groups, because a foreach kernel cannot mix DTensors of different meshes.
    """
    groups: dict[tuple[bool, DeviceMesh | None], list[Tensor]] = {}
    for p in (p for p in model.parameters() if p.requires_grad):
        mesh = p.device_mesh if isinstance(p, DTensor) else None
        groups.setdefault((p.ndim >= 2, mesh), []).append(p)
    return torch.optim.AdamW(
        [{"params": params, "weight_decay": config.weight_decay * decays} for (decays, _), params in groups.items()],
        lr=config.lr, betas=config.betas, eps=config.eps,
    )  # fmt: skip


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """Learning rate of `step`, counted from 0: linear warm-up, then cosine decay to `min_lr_ratio * lr`."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * (1 + math.cos(math.pi * min(done, 1.0))) / 2)


@dataclass
class LossScale:
    """Dynamic loss scaling: halve the scale after an overflow, double it after `patience` consecutive finite steps.

    Replaces `torch.amp.GradScaler`, which checks overflow only on each rank's own shard. `patience` 0 keeps the scale
    fixed.
    """

    value: float = 1.0
    good_steps: int = 0
    patience: int = 1000

    @classmethod
    def of_dtype(cls, dtype: str) -> "LossScale":
        """Initial scale of a dtype: 2^16 for fp16, a fixed 1 otherwise."""
        return cls(value=2.0**16) if dtype == "fp16" else cls(patience=0)

    def update(self, finite: bool) -> None:
        """Adjust the scale after a step whose gradients were `finite` or not."""
        if not self.patience:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.value /= 2
        elif self.good_steps == self.patience:
            self.value, self.good_steps = self.value * 2, 0


def update(
    optimizers: Sequence[torch.optim.Optimizer],
    owned: Iterable[Tensor],
    scale: LossScale,
    rate: float,
    clip_norm: float | None,
    group: dist.ProcessGroup | None = None,
) -> float:
    """Unscale and clip the gradients, step at learning rate `rate`, and return the global norm before clipping.

    `owned` are the parameters whose shards this rank adds to the norm. Over all ranks of `group`, each element is counted
    exactly once.
    If the norm is not finite, the step is skipped and the loss scale is lowered. Collective over `group`.
    """
    device = next(p.device for optimizer in optimizers for g in optimizer.param_groups for p in g["params"])
    norm = global_norm((p.grad for p in owned if p.grad is not None), group, device) / scale.value
    finite = math.isfinite(norm)
    if finite:
        factor = (1.0 if clip_norm is None else min(1.0, clip_norm / (norm + 1e-6))) / scale.value
        for optimizer in optimizers:
            parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            if factor != 1.0 and parameters:
                torch._foreach_mul_([_local(p.grad) for p in parameters], factor)
            for settings in optimizer.param_groups:
                settings["lr"] = rate
            optimizer.step()
    scale.update(finite)
    return norm


def global_norm(
    tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None, device: torch.device | None = None
) -> float:
    """Return the 2-norm of all tensors on all ranks of `group`. A DTensor adds its local shard. Collective."""
    here = [_local(tensor) for tensor in tensors]
    norms = torch.stack(torch._foreach_norm(here)) if here else torch.zeros(0, device=device)
    total = norms.double().square().sum()  # widen before squaring, to avoid overflow
    if group is not None:
        dist.all_reduce(total, group=group)
    return math.sqrt(float(total))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
