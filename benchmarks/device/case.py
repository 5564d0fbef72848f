"""Attention of an unsharded sequence: inputs, the fp64 result at sampled rows, and plain SDPA.

At 131,072 tokens the full fp64 result is too expensive. So the output's gradient is 0 except at sampled query rows: one per
equal part of the sequence, and the last row. In fp64, out and dq are computed at these rows, and dk and dv depend only on
these rows.
Timing uses a gradient at all rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from benchmarks.device.errors import of_limit
from longspan import Mask

Tensor = torch.Tensor
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
DRAWN = 64


@dataclass(frozen=True, eq=False)
class Case:
    """Causal documents of `lengths`, numbers of query and KV heads, and a torch dtype by name."""

    lengths: tuple[int, ...]
    heads: tuple[int, int]
    head_dim: int
    dtype: str
    device: torch.device

    @property
    def seq_len(self) -> int:
        return sum(self.lengths)

    @cached_property
    def mask(self) -> Mask:
        return Mask.documents(list(self.lengths))

    def __str__(self) -> str:
        kind = "causal" if len(self.lengths) == 1 else f"{len(self.lengths)} documents"
        return f"{kind} {self.seq_len:,} {self.dtype} H{self.heads[0]}/{self.heads[1]} D{self.head_dim}"

    @cached_property
    def inputs(self) -> list[Tensor]:
        """q, k, v and the gradient of out, `(1, H or K, S, D)`, the same on every rank."""
        generator = torch.Generator(self.device).manual_seed(0)
        num_q, num_kv = self.heads
        sizes = [(1, n, self.seq_len, self.head_dim) for n in (num_q, num_kv, num_kv, num_q)]
        made = (torch.randn(size, generator=generator, device=self.device) for size in sizes)
        return [x.to(getattr(torch, self.dtype)) for x in made]

    @cached_property
    def rows(self) -> Tensor:
        """The sampled rows, ascending."""
        generator = torch.Generator().manual_seed(1)
        stretch = max(1, self.seq_len // DRAWN)
        starts = torch.arange(0, self.seq_len, stretch)
        drawn = starts + torch.randint(stretch, starts.shape, generator=generator)
        return torch.cat((drawn, torch.tensor([self.seq_len - 1]))).clamp_max(self.seq_len - 1).unique()

    @property
    def dout(self) -> Tensor:
        """The gradient of out at the sampled rows, 0 elsewhere."""
        given = torch.zeros_like(self.inputs[3])
        given[:, :, self.rows] = self.inputs[3][:, :, self.rows]
        return given

    def error(self, attend: Attend) -> float:
        """Return the error / limit of `attend`."""
        return self.error_of(both(attend, [*self.inputs[:3], self.dout])())

    def error_of(self, whole: Sequence[Tensor]) -> float:
        """Return the error / limit of out, dq, dk, dv computed from q, k, v and `dout`."""
        return of_limit(self._drawn(whole), self._plain, self._right)

    def _drawn(self, whole: Sequence[Tensor]) -> list[Tensor]:
        out, dq, dk, dv = whole
        return [out[:, :, self.rows], dq[:, :, self.rows], dk, dv]

    def sdpa(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Run plain SDPA in each document."""
        parts = zip(*(x.split(self.lengths, dim=2) for x in (q, k, v)), strict=True)
        outs = [F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True) for q, k, v in parts]
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)

    @property
    def backend(self) -> str:
        """Name of the kernel that SDPA chooses for these tensors."""
        q, k, v, _ = (x[:, :, : self.lengths[0]] for x in self.inputs)
        return SDPBackend(torch._fused_sdp_choice(q, k, v, None, 0.0, True, enable_gqa=True)).name

    @cached_property
    def _plain(self) -> list[Tensor]:
        return self._drawn(both(self.sdpa, [*self.inputs[:3], self.dout])())

    @cached_property
    def _right(self) -> list[Tensor]:
        """Results by plain math in fp64 on the device, one KV head at a time."""
        seen = self._seen().to(self.device)
        drawn = (self.inputs[0][:, :, self.rows], self.inputs[3][:, :, self.rows])
        group = self.heads[0] // self.heads[1]
        by_head = []
        for head in range(self.heads[1]):
            q, dout = (x[:, head * group : (head + 1) * group].double() for x in drawn)
            k, v = (x[:, head : head + 1].double() for x in self.inputs[1:3])
            leaves = [x.requires_grad_() for x in (q, k, v)]
            scores = (q @ k.mT * self.head_dim**-0.5).masked_fill(~seen, float("-inf"))
            out = torch.softmax(scores, -1) @ v
            by_head.append([out.detach(), *torch.autograd.grad(out, leaves, dout)])
        return [torch.cat(parts, 1) for parts in zip(*by_head, strict=True)]

    def _seen(self) -> Tensor:
        """Return the mask of the sampled rows, bool `(rows, S)`."""
        document = torch.arange(len(self.lengths)).repeat_interleave(torch.tensor(self.lengths))
        return (document[self.rows, None] == document) & (self.rows[:, None] >= torch.arange(self.seq_len))


def both(attend: Attend, inputs: Sequence[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    """Return a function that runs forward and backward and returns out, dq, dk, dv."""
    *qkv, dout = inputs

    def run() -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in qkv]
        out = attend(*leaves)
        return (out.detach(), *torch.autograd.grad(out, leaves, dout))

    return run
