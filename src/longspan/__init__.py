"""Train transformers on sequences too long for one device: exact context parallelism for PyTorch.

Names load when they are first used, so that planning and the command line start without torch.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longspan.attention.attention import attention
    from longspan.attention.context import ContextParallel
    from longspan.attention.dropin import context_parallel
    from longspan.attention.staged import Projections, UpipeAttention, projected_attention
    from longspan.comm.sharding import shard, unshard
    from longspan.comm.traffic import record
    from longspan.plan import Layout, Mask, Plan, Topology, plan_attention
    from longspan.spec import LongspanError

_HOME = {
    "ContextParallel": "longspan.attention.context",
    "Layout": "longspan.plan",
    "LongspanError": "longspan.spec",
    "Mask": "longspan.plan",
    "Plan": "longspan.plan",
    "Projections": "longspan.attention.staged",
    "Topology": "longspan.plan",
    "UpipeAttention": "longspan.attention.staged",
    "attention": "longspan.attention.attention",
    "context_parallel": "longspan.attention.dropin",
    "plan_attention": "longspan.plan",
    "projected_attention": "longspan.attention.staged",
    "record": "longspan.comm.traffic",
    "shard": "longspan.comm.sharding",
    "unshard": "longspan.comm.sharding",
}

__all__ = [
    "ContextParallel",
    "Layout",
    "LongspanError",
    "Mask",
    "Plan",
    "Projections",
    "Topology",
    "UpipeAttention",
    "attention",
    "context_parallel",
    "plan_attention",
    "projected_attention",
    "record",
    "shard",
    "unshard",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'longspan' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


class _Root(ModuleType):
    """Keeps `longspan.attention` the public function: importing the folder of that name would put the module there."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Root
