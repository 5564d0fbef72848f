"""The reference kernel: attention in plain math, computed for some query rows at a time. Slow.

Any floating dtype (at least fp32 inside), any band, any device, K and V dims that may differ.
"""

from collections.abc import Iterator, Sequence

import torch

from longspan.kernels.protocol import BackwardInputs
from longspan.kernels.scores import ScoreChange
from longspan.plan import Shape, Tile

Tensor = torch.Tensor

_BLOCK = 256
"""Query rows computed at a time. Limits the scores in memory to `_BLOCK x num_k` per head."""


class ReferenceKernel:
    """`softmax(q k^T * scale) v` over a band, and its derivative."""

    name = "reference"

    def refusal(self, q: Tensor, k: Tensor, v: Tensor, change: ScoreChange | None = None) -> str | None:
        return None if q.is_floating_point() else f"{q.dtype} is not a floating-point dtype"

    def split(self, tile: Tile, device: torch.device, dtype: torch.dtype, backward: bool = False) -> Sequence[Tile]:
        return (tile,)

    def joins(self, first: Shape, second: Shape, device: torch.device) -> bool:
        return False

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, shapes: Sequence[Shape], scale: float, change: ScoreChange | None = None
    ) -> tuple[Tensor, Tensor]:
        (shape,) = shapes
        keys, values = _wide(k), _wide(v)
        out = q.new_empty(*q.shape[:3], v.shape[3])
        lse = keys.new_empty(q.shape[:3])
        for rows in _blocks(shape):
            scores, _ = _scores(q[:, :, rows], keys, shape, rows, scale, change)
            lse[:, :, rows] = torch.logsumexp(scores, dim=-1).flatten(1, 2)
            weights = torch.softmax(scores, dim=-1)
            out[:, :, rows] = (weights @ values.unsqueeze(2)).flatten(1, 2).to(out.dtype)
        return out, lse

    def backward(
        self, saved: BackwardInputs, shapes: Sequence[Shape], scale: float, change: ScoreChange | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out, lse = saved
        (shape,) = shapes
        keys, values = _wide(k), _wide(v)
        num_kv = k.shape[1]
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(keys), torch.zeros_like(values)
        for rows in _blocks(shape):
            scores, derivative = _scores(q[:, :, rows], keys, shape, rows, scale, change)
            weights = torch.exp(scores - _grouped(lse[:, :, rows].to(scores.dtype), num_kv).unsqueeze(-1))
            dout_rows = _grouped(_wide(dout[:, :, rows]), num_kv)
            out_rows = _grouped(_wide(out[:, :, rows]), num_kv)
            dv += (weights.mT @ dout_rows).sum(2)
            delta = (dout_rows * out_rows).sum(-1, keepdim=True)
            dscores = weights * (dout_rows @ values.unsqueeze(2).mT - delta) * scale
            if derivative is not None:
                dscores *= derivative
            dq[:, :, rows] = (dscores @ keys.unsqueeze(2)).flatten(1, 2).to(dq.dtype)
            dk += (dscores.mT @ _grouped(_wide(q[:, :, rows]), num_kv)).sum(2)
        return dq, dk, dv


def _blocks(shape: Shape) -> Iterator[slice]:
    for start in range(0, shape.num_q, _BLOCK):
        yield slice(start, min(start + _BLOCK, shape.num_q))


def _scores(
    q: Tensor, keys: Tensor, shape: Shape, rows: slice, scale: float, change: ScoreChange | None
) -> tuple[Tensor, Tensor | None]:
    """Return (scores, derivative). Scores `(B, K, H / K, rows, num_k)` are -inf outside the band; the derivative is that of
    `ScoreChange.apply_`."""
    scores, derivative = _grouped(_wide(q), keys.shape[1]) @ keys.unsqueeze(2).mT * scale, None
    if change is not None:
        scores, derivative = change.apply_(scores, rows)
    away = torch.arange(rows.start, rows.stop, device=q.device)[:, None] - torch.arange(shape.num_k, device=q.device)
    return scores.masked_fill_((away < shape.lo) | (away > shape.hi), float("-inf")), derivative


def _grouped(x: Tensor, num_kv: int) -> Tensor:
    """`(B, H, ...)` -> `(B, K, H / K, ...)`: the query heads of each KV head."""
    return x.view(x.shape[0], num_kv, x.shape[1] // num_kv, *x.shape[2:])


def _wide(x: Tensor) -> Tensor:
    """Convert to at least fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
