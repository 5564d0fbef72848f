"""CUDA on a CPU: what runs behind `device.type == "cuda"`, and keeps count.

with stand_in() as ledger:
    x = torch.randn(4, 4, device="cuda")
    (x @ x).sum().item()
ledger.launches, ledger.syncs, ledger.copies, ledger.allocations

Elements are computed by this machine, in the order of the program. Two streams that touch the same memory in no order of their
own raise `RaceError`. A launch is an operator of aten that writes something. What a GPU has and this has not:

- Backward runs in the thread that calls it and on its current stream, not in the device's thread on the stream of forward.
- Torch's C++ takes a `CudaTensor` for one of the CPU: "cuda" is unknown to autocast, and to sharding propagation of DTensor (tp).
- Compiled code and graphs are not seen. A kernel's inner buffers are no allocations.
- NCCL's order of posting is not looked at (`nccl.py`). Each thread has one GPU.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from tests.cuda import nccl, runtime
from tests.cuda.ledger import Ledger
from tests.cuda.memory import RaceError
from tests.cuda.nccl import NcclError
from tests.cuda.streams import here
from tests.cuda.tensor import CudaTensor, Mode

__all__ = ["CudaTensor", "Ledger", "NcclError", "RaceError", "stand_in"]

_lock = threading.Lock()
_users = 0
_patched = ExitStack()


@contextmanager
def stand_in() -> Iterator[Ledger]:
    """Give this thread a GPU for the time of the block, and count what it does there. Blocks may be nested."""
    ledger, device = Ledger(), here()
    if not device.ledgers:
        device.settle()
    with _installed(), Mode():
        device.ledgers.append(ledger)
        try:
            yield ledger
        finally:
            device.ledgers[:] = [other for other in device.ledgers if other is not ledger]


@contextmanager
def _installed() -> Iterator[None]:
    """Have torch's own entrances replaced for as long as a thread is inside."""
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            for target, name, value in (*runtime.patches(), *nccl.patches()):
                _patched.enter_context(patch.object(target, name, value, create=not hasattr(target, name)))
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                _patched.close()
