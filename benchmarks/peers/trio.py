"""Three processes: two ranks whose default group has size two, and one for SDPA, which sleeps while the ranks are measured.

Some peers use the default group instead of the group passed to them. So the default group holds the two ranks only, and all
three processes share a group that is not registered with torch.distributed.
"""

import os
import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import Usage, foreign_share

BASELINE = 2
"""Number of the SDPA process; 0 and 1 are the ranks."""
RANKS = 2
_TIMEOUT = timedelta(minutes=10)


class Trio:
    """The group of three processes. All methods are collective."""

    def __init__(self, folder: Path) -> None:
        self.rank = int(os.environ["RANK"])
        self.is_baseline = self.rank == BASELINE
        self._store = dist.FileStore(str(folder / "trio"), 3)
        self._store.set_timeout(_TIMEOUT)
        self._calls = 0
        self._group = dist.ProcessGroupGloo(dist.PrefixStore("trio", self._store), self.rank, 3, _TIMEOUT)
        torch.set_num_threads((os.cpu_count() or 1) if self.is_baseline else 1)
        if not self.is_baseline:
            os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(RANKS)
            store = dist.FileStore(str(folder / "ranks"), RANKS)
            dist.init_process_group("gloo", store=store, rank=self.rank, world_size=RANKS, timeout=_TIMEOUT)

    def close(self) -> None:
        self._group.barrier().wait()
        if not self.is_baseline:
            dist.destroy_process_group()

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all three processes."""
        self._calls += 1
        self._store.set(f"{self._calls}/{self.rank}", pickle.dumps(value))
        return [pickle.loads(self._store.get(f"{self._calls}/{rank}")) for rank in range(3)]

    def from_baseline(self, x: torch.Tensor) -> torch.Tensor:
        self._group.broadcast(x, BASELINE).wait()
        return x

    def pair(self, sides: tuple[Callable | None, Callable | None], flipped: bool) -> tuple[tuple[float, float], float]:
        """Time two functions one after the other, the second first if `flipped`.

        Returns both functions' seconds in the slowest process, and the share of the cores that other programs used. Pass None
        for a function in which this process does not take part.
        """
        before, began = Usage.now(), time.perf_counter()
        seconds = torch.zeros(2, dtype=torch.float64)
        for side in (1, 0) if flipped else (0, 1):
            self._group.barrier().wait()
            run = sides[side]
            if run is not None:
                if not self.is_baseline:
                    dist.barrier()
                start = time.perf_counter()
                run()
                seconds[side] = time.perf_counter() - start
            self._group.barrier().wait()
        share = foreign_share(before, time.perf_counter() - began, lambda x: self._reduce(x, dist.ReduceOp.SUM))
        self._reduce(seconds, dist.ReduceOp.MAX)
        return (float(seconds[0]), float(seconds[1])), share

    def _reduce(self, x: torch.Tensor, op: dist.ReduceOp) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = op
        self._group.allreduce([x], options).wait()
