"""Changes of scores before softmax, besides scaling.

    soft-cap c    s -> c tanh(s / c)                 Gemma 2 (arXiv:2408.00118)
    ALiBi m       s -> s - m |i - j|, m by head      Press et al. (arXiv:2108.12409); i, j on the global token axis

If both are set, the soft-cap applies first, as in flash-attention.
"""

from dataclasses import dataclass, replace

import torch

Tensor = torch.Tensor


@dataclass(frozen=True)
class ScoreChange:
    """Soft-cap, and ALiBi `slopes (H,)` of the given query heads. ALiBi also needs `rows (num_q,)` and `keys (num_k,)`: the
    global token positions of a tile's rows and keys, int64."""

    softcap: float | None = None
    slopes: Tensor | None = None
    rows: Tensor | None = None
    keys: Tensor | None = None

    @classmethod
    def of(cls, softcap: float | None, slopes: Tensor | None) -> "ScoreChange | None":
        """Return the change, or None if both are None."""
        return None if softcap is None and slopes is None else cls(softcap, slopes)

    def of_heads(self, heads: slice) -> "ScoreChange":
        """Return the change for some of the query heads."""
        return self if self.slopes is None else replace(self, slopes=self.slopes[heads])

    def apply_(self, scores: Tensor, rows: slice) -> tuple[Tensor, Tensor | None]:
        """Change the scores `(B, K, H / K, num_q, num_k)` of some rows of the tile in place.

        Returns (changed scores, d changed / d original). The derivative has the shape of the scores, or is None if it
        is 1 everywhere.
        """
        derivative = None
        if self.softcap is not None:
            scores.div_(self.softcap).tanh_()
            derivative = 1 - scores.square()
            scores.mul_(self.softcap)
        if self.slopes is not None:
            assert self.rows is not None, "a tile has places on the token axis"
            assert self.keys is not None, "a tile has places on the token axis"
            away = (self.rows[rows, None] - self.keys).abs().to(scores.dtype)
            scores -= self.slopes.to(scores.dtype).view(1, scores.shape[1], -1, 1, 1) * away
        return scores, derivative
