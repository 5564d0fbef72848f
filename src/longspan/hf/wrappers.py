"""The model within its wrappers, and over how many ranks a wrapper averages gradients."""

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from longspan.comm.groups import RankGroup
from longspan.cp.context import ContextParallel
from longspan.errors import SpecError


def unwrapped(model: nn.Module) -> Any:
    """Return the model of transformers within wrappers that hold it as `module`, such as DDP, or compiled."""
    while True:
        inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
        if not isinstance(inner, nn.Module) or hasattr(model, "config"):
            return model
        model = inner


def averaging_ranks(model: nn.Module, cp: ContextParallel) -> float:
    """Return the number by which DDP or FSDP2 divides the sum of gradients; 1 without a wrapper.

    Raises `SpecError` if the wrapper leaves out ranks of the CP group, whose gradients would be lost.
    """
    divisors = {_checked(divisor, ranks, cp.group) for divisor, ranks in _wrappers(model)}
    if len(divisors) > 1:
        raise SpecError(
            f"parts of the model average gradients over different numbers of ranks: {sorted(divisors)}",
            hint="wrap all parts over the same ranks, or set one divisor by set_gradient_divide_factor",
        )
    return divisors.pop() if divisors else 1


def _wrappers(model: nn.Module) -> "list[tuple[float, list[int]]]":
    """Return (divisor, global ranks) of each wrapper within the model."""
    found: list[tuple[float, list[int]]] = []
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            ranks = dist.get_process_group_ranks(module.process_group)
            found.append((len(ranks), ranks))
        elif isinstance(module, FullyShardedDataParallel):
            raise SpecError("the model is wrapped by FullyShardedDataParallel", hint="use FSDP2: fully_shard(model)")
        elif isinstance(module, FSDPModule):
            # Private in torch: there is no public way to read the divisor.
            for group in module._get_fsdp_state()._fsdp_param_groups:
                sharded = [p for p in (held.sharded_param for held in group.fsdp_params) if isinstance(p, DTensor)]
                ranks = sharded[0].device_mesh.mesh.flatten().tolist()
                found.append((group.gradient_divide_factor or len(ranks), ranks))
    return found


def _checked(divisor: float, ranks: list[int], group: RankGroup | None) -> float:
    if isinstance(group, dist.ProcessGroup):
        missing = sorted(set(dist.get_process_group_ranks(group)) - set(ranks))
        if missing:
            raise SpecError(
                f"the model's wrapper sums gradients over ranks {ranks}, without ranks {missing} of the CP group",
                hint="wrap the model over all ranks that hold tokens: the flattened mesh of dp and cp",
            )
    return divisor
