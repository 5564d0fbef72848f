"""Counts what eager code would launch on a device: operators that compute, views left out."""

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Launches(TorchDispatchMode):
    """By operator's name, on whatever device: meta tensors take any size. An operator counts once, whatever its kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return self.counts.total()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        infos = [returned.alias_info for returned in function._schema.returns]
        if not any(info is not None and not info.is_write for info in infos):
            self.counts[function._schema.name.removeprefix("aten::")] += 1
        return function(*args, **(kwargs or {}))


def on_meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
