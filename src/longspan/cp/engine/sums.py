"""Sums over the tiles of a call: the output with its log-sum-exp, and gradients. In at least fp32, in place.

B batch, H query heads, K KV heads, T slots of this rank, D head dim
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from longspan.cp.engine.merge import accumulation_dtype, merge_, merge_sink_
from longspan.plan import Runs

Tensor = torch.Tensor
Home = Callable[[], AbstractContextManager[Any]]
"""Context that allocates memory that outlives the call: `Lane.home`."""


class Output:
    """Running output `(B, H, T, Dv)` and lse `(B, H, T)` of this rank's queries, merged in place."""

    def __init__(self, q: Tensor, v: Tensor, home: Home = nullcontext) -> None:
        self._like, self._home = q, home
        self._shape = (*q.shape[:3], v.shape[3])
        self._sum: tuple[Tensor, Tensor] | None = None
        self._begun = 0  # rows at or after this index have no result yet

    def add(self, start: int, stop: int, out: Tensor, lse: Tensor) -> None:
        """Merge the result of a tile for queries `start` to `stop`. The first result of a row is copied or adopted."""
        if self._sum is None and stop - start == self._shape[2]:
            self._sum, self._begun = (out, lse), stop
            return
        so_far, so_far_lse = self._sum = self._wide()
        rows = slice(start, stop)
        if start >= self._begun:
            so_far[:, :, rows] = out
            so_far_lse[:, :, rows] = lse
        else:
            merge_(so_far[:, :, rows], so_far_lse[:, :, rows], out, lse)
        self._begun = max(self._begun, stop)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors that hold the running sum."""
        return self._sum or ()

    def finish(self, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return out in q's dtype, and lse."""
        out, lse = self._sum if self._sum is not None and sink is None else self._wide()
        if sink is not None:
            merge_sink_(out, lse, sink)
        return out.to(self._like.dtype).contiguous(), lse.contiguous()

    def _wide(self) -> tuple[Tensor, Tensor]:
        wide = accumulation_dtype(self._like.dtype)
        if self._sum is not None and self._sum[0].dtype == wide:
            return self._sum
        with self._home():
            if self._sum is not None:
                out, lse = torch.empty_like(self._sum[0], dtype=wide), self._sum[1]
            else:
                out, lse = (self._like.new_empty(shape, dtype=wide) for shape in (self._shape, self._shape[:3]))
        if self._sum is not None:
            return out.copy_(self._sum[0]), lse
        return out.zero_(), lse.fill_(float("-inf"))


class Gradient:
    """A sum of tile gradients `(rows, B, K, D)`, in at least fp32."""

    def __init__(self, like: Tensor, rows: int, home: Home = nullcontext, adopts: bool = True) -> None:
        """Sum `rows` rows of a tensor like `like (B, K, *, D)`. `home`: context for allocating the sum. `adopts`:
        whether a first tile that covers all rows may itself become the sum, without a copy."""
        B, K, _, D = like.shape
        self._like, self._shape, self._home, self._adopts = like, (rows, B, K, D), home, adopts
        self._wide = accumulation_dtype(like.dtype)
        self._sum: Tensor | None = None

    def add(self, start: int, stop: int, part: Tensor) -> None:
        """Add `part (B, K, stop - start, D)` to rows `start` to `stop`."""
        part = part.permute(2, 0, 1, 3)
        if self._sum is None and stop - start == self._shape[0]:
            as_it_is = self._adopts and part.dtype == self._wide and part.is_contiguous()
            self._sum = part if as_it_is else self._empty().copy_(part)
        else:
            self.rows()[start:stop] += part

    def add_runs(self, runs: Runs, packed: Tensor) -> None:
        """Add the rows packed in `packed` to the rows of `runs`."""
        target = self.rows()
        for (start, stop), part in zip(runs, torch.split(packed, [b - a for a, b in runs]), strict=True):
            target[start:stop] += part

    def buffer(self, rows: int) -> Tensor:
        """Allocate `rows` uninitialised rows of the sum's dtype and shape."""
        return self._like.new_empty(rows, *self._shape[1:], dtype=self._wide)

    def rows(self) -> Tensor:
        """Return the running sum `(T, B, K, D)`."""
        if self._sum is None:
            self._sum = self._empty().zero_()
        return self._sum

    def _empty(self) -> Tensor:
        with self._home():
            return self._like.new_empty(self._shape, dtype=self._wide)

    def finish(self, partial: bool = False) -> Tensor:
        """Return `(B, K, T, D)` in the input's dtype, or in the accumulation dtype if `partial`."""
        rows = self.rows() if partial else self.rows().to(self._like.dtype)
        return rows.permute(1, 2, 0, 3)
