"""The exchange of heads (Ulysses) in a group: members turn all heads of some rows into all rows of some heads, and back.

    B batch, H query heads (K KV heads), T slots of this rank, R slots of all members, D head dim

    (B, H, T, D)  -- there -->  (B, H of this member, R, D), rows in sequence order  -- back -->  (B, H, T, D)

All tensors of one dtype travel in one all-to-all. A member's own rows and heads are copied locally.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from longspan.comm.hops import Flight, Hop
from longspan.comm.traffic import Call
from longspan.cp.engine.merge import accumulation_dtype
from longspan.cp.engine.row_transport import Group, in_one_piece
from longspan.cp.engine.wire import WIRES
from longspan.kernels.protocol import BackwardInputs, Kernel
from longspan.kernels.scores import ScoreChange
from longspan.plan import HeadShare, Place, RankPlan, Shape, Tile

Tensor = torch.Tensor
Parts = list[list[list[Tensor]]]
"""Pieces `(B, heads, rows, D)` for each member and tensor: `parts[member][tensor]`."""


@dataclass(frozen=True)
class HeadExchange:
    """One member's side of the exchange in one attention call. `slots` is T, `rows` is R."""

    share: HeadShare
    slots: int
    rows: int
    group: Group
    meter: Call

    @classmethod
    def of(cls, work: RankPlan, group: Group, meter: Call) -> "HeadExchange | None":
        """Return None if the plan exchanges no heads."""
        if work.heads is None:
            return None
        meter.head_shares = len(work.heads.members)
        return cls(work.heads, work.slots, work.rows, group, meter)

    def gather(
        self, q: Tensor, k: Tensor, v: Tensor, comm_dtype: str | None, again: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (q, k, v) of all rows; k and v are rounded to `comm_dtype`. `again`: `rows_received` already counts these rows,
        from an exchange of other heads."""
        wire = WIRES[comm_dtype]
        together, *rounded = self.there([q, wire.encode(k), wire.encode(v)])
        if not again:
            self.meter.rows_received += self.share.rows - self.share.tokens[self.share.member]
        return together, wire.decode(rounded[0], k), wire.decode(rounded[1], v)

    def there(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """`(B, all query or KV heads, T, D)` of this rank's slots -> `(B, this member's heads, R, D)`."""
        share = self.share
        live = share.tokens[share.member]
        leaving = [[[x[:, slice(*self._runs(x.shape[1])[m]), :live]] for x in tensors] for m in self._all]
        sizes = [(x.shape[0], self._size(x.shape[1]), x.shape[3]) for x in tensors]
        shapes = [[(B, heads, share.tokens[m], D) for B, heads, D in sizes] for m in self._all]
        arrived = self._travel(tensors, leaving, shapes)
        results = []
        for n, (x, (B, heads, D)) in enumerate(zip(tensors, sizes, strict=True)):
            result = x.new_empty(B, heads, self.rows, D)
            for member in self._all:
                (part,) = arrived[member][n]
                for place in share.places[member]:
                    _at(result, place).copy_(part[:, :, place.start : place.stop])
            results.append(result)
        return results

    def back(self, query: Sequence[Tensor], kv: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """`(B, this member's heads, R, D)` -> `(B, all heads, T, D)` in `dtype`, `query` tensors before `kv`.

        Padding slots hold 0. Replicated KV heads are summed over their members, in member order.
        """
        share, tensors = self.share, [*query, *kv]
        live = share.tokens[share.member]
        heads = [share.query] * len(query) + [share.kv] * len(kv)
        leaving = [[[_at(x, place) for place in share.places[m]] for x in tensors] for m in self._all]
        shapes = [
            [(x.shape[0], runs[m][1] - runs[m][0], live, x.shape[3]) for x, runs in zip(tensors, heads, strict=True)]
            for m in self._all
        ]
        arrived = self._travel(tensors, leaving, shapes)
        results = []
        for n, (x, runs) in enumerate(zip(tensors, heads, strict=True)):
            summed = share.replicates and runs is share.kv
            wide = accumulation_dtype(dtype) if summed else dtype
            result = x.new_zeros(x.shape[0], runs[-1][1], self.slots, x.shape[3], dtype=wide)
            for member in self._all:
                row = 0
                for part in arrived[member][n]:
                    target = result[:, slice(*runs[member]), row : row + part.shape[2]]
                    row += part.shape[2]
                    if summed:
                        target += part
                    else:
                        target.copy_(part)
            results.append(result.to(dtype))
        return results

    def own_heads(self, sink: Tensor | None) -> Tensor | None:
        """Sink logits of this member's query heads."""
        return None if sink is None else sink[slice(*self.share.query[self.share.member])]

    def own_change(self, change: ScoreChange | None) -> ScoreChange | None:
        """Score change of this member's query heads."""
        return change and change.of_heads(slice(*self.share.query[self.share.member]))

    def all_heads(self, dsink: Tensor) -> Tensor:
        """Gradient of the sink for all heads: this member's values, zeros elsewhere."""
        full = dsink.new_zeros(self.share.query[-1][1])
        full[slice(*self.share.query[self.share.member])] = dsink
        return full

    @property
    def _all(self) -> range:
        return range(len(self.share.members))

    def _runs(self, heads: int) -> tuple[tuple[int, int], ...]:
        return self.share.query if heads == self.share.query[-1][1] else self.share.kv

    def _size(self, heads: int) -> int:
        start, stop = self._runs(heads)[self.share.member]
        return stop - start

    def _travel(self, tensors: Sequence[Tensor], leaving: Parts, shapes: Sequence[Sequence[Sequence[int]]]) -> Parts:
        """Send each other member its pieces and receive pieces of `shapes[member][tensor]`. This member's own
        pieces are returned unchanged. The pieces of one tensor are concatenated along the rows."""
        share, own = self.share, self.share.member
        arrived: Parts = [list(pieces) for pieces in leaving]
        flights: list[Flight] = []
        others = [m for m in self._all if m != own]
        for dtype in dict.fromkeys(x.dtype for x in tensors) if others else ():
            pairs = [(m, n) for m in others for n, x in enumerate(tensors) if x.dtype == dtype]
            outgoing = [_rows_together(leaving[m][n], shapes[own][n]) for m, n in pairs]
            going = in_one_piece(tensors[0], outgoing, dtype)
            coming = in_one_piece(tensors[0], [shapes[m][n] for m, n in pairs], dtype)
            hop = Hop()
            for (member, n), out, into in zip(pairs, going, coming, strict=True):
                if leaving[member][n]:
                    torch.cat(leaving[member][n], dim=2, out=out)
                arrived[member][n] = [into]
                hop.sends.append((share.members[member], out))
                hop.receives.append((share.members[member], into))
            flights.append(hop.post(self.group, self.meter, collective=going[0]))
        for flight in flights:
            flight.wait(self.meter)
        return arrived


@dataclass(frozen=True)
class GroupedKernel:
    """A kernel for KV heads that serve unequal numbers of query heads: one call for each block of equal numbers."""

    kernel: Kernel
    blocks: tuple[tuple[tuple[int, int], tuple[int, int]], ...]

    @classmethod
    def of(cls, kernel: Kernel, share: HeadShare) -> "Kernel":
        """Return `kernel` itself if all KV heads serve equally many query heads."""
        return kernel if len(share.blocks) == 1 else cls(kernel, share.blocks)

    @property
    def name(self) -> str:
        return self.kernel.name

    def refusal(self, q: Tensor, k: Tensor, v: Tensor, change: ScoreChange | None = None) -> str | None:
        return self.kernel.refusal(q, k, v, change)

    def split(self, tile: Tile, device: torch.device, dtype: torch.dtype, backward: bool = False) -> Sequence[Tile]:
        return self.kernel.split(tile, device, dtype, backward)

    def joins(self, first: Shape, second: Shape, device: torch.device) -> bool:
        return self.kernel.joins(first, second, device)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, shapes: Sequence[Shape], scale: float, change: ScoreChange | None = None
    ) -> tuple[Tensor, Tensor]:
        parts = [
            self.kernel.forward(q[:, query], k[:, kv], v[:, kv], shapes, scale, change and change.of_heads(query))
            for query, kv in self._slices
        ]
        out, lse = (torch.cat(tensors, dim=1) for tensors in zip(*parts, strict=True))
        return out, lse

    def backward(
        self, saved: BackwardInputs, shapes: Sequence[Shape], scale: float, change: ScoreChange | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        parts = [
            self.kernel.backward(saved.of_heads(query, kv), shapes, scale, change and change.of_heads(query))
            for query, kv in self._slices
        ]
        dq, dk, dv = (torch.cat(tensors, dim=1) for tensors in zip(*parts, strict=True))
        return dq, dk, dv

    @property
    def _slices(self) -> list[tuple[slice, slice]]:
        return [(slice(*query), slice(*kv)) for query, kv in self.blocks]


def _at(x: Tensor, place: Place) -> Tensor:
    """Return the rows of `x (B, heads, R, D)` at `place`, as a view."""
    rows = place.stop - place.start
    return x[:, :, place.first : place.first + place.step * (rows - 1) + 1 : place.step]


def _rows_together(pieces: Sequence[Tensor], like: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the pieces concatenated along rows; if there are no pieces, batch, heads and dim are as in `like`."""
    B, heads, _, D = pieces[0].shape if pieces else like
    return B, heads, sum(piece.shape[2] for piece in pieces), D
