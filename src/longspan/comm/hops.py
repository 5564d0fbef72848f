"""Hops: a batch of messages in flight while the caller computes, point-to-point or in one all-to-all.

A pair of ranks matches messages in posting order, so both sides build their batches from the same plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from longspan.comm.groups import RankGroup
from longspan.comm.traffic import Call
from longspan.comm.transport import Message, Transport, Work, transport_of
from longspan.errors import CommError


@dataclass
class Hop:
    """Messages to post together."""

    sends: list[Message] = field(default_factory=list)
    receives: list[Message] = field(default_factory=list)

    def post(self, group: RankGroup | None, call: Call, collective: torch.Tensor | None = None) -> "Flight":
        """Start all messages. The tensors must not be used until `Flight.wait`.

        With `collective`, any tensor of the messages' dtype and device, the messages travel in one all-to-all. Every rank
        of the group must then post an all-to-all, even without messages. If a peer is gone, raises a `CommError` that
        names the peers.
        """
        if not self.sends and not self.receives and collective is None:
            return Flight()
        assert group is not None, "a plan of one rank has no messages"
        transport = transport_of(group)
        call.bytes_sent += sum(tensor.nbytes for _, tensor in self.sends)
        call.messages_sent += len(self.sends)
        peers = [peer for peer, _ in (*self.receives, *self.sends)]
        start = call.clock.now()
        landed: list[tuple[torch.Tensor, torch.Tensor]] = []
        try:
            if collective is not None:
                call.collectives += 1
                works, landed, kept = self._all_to_all(transport, collective)
            else:
                works, kept = transport.post(self.sends, self.receives), (self.sends, self.receives)
        except CommError:
            raise
        except RuntimeError as error:
            raise _lost(peers, error) from error
        return Flight(works, peers, start, sum(x.nbytes for _, x in self.receives), landed, kept)

    def _all_to_all(
        self, transport: Transport, like: torch.Tensor
    ) -> tuple[Sequence[Work], list[tuple[Any, Any]], Any]:
        """Post one all-to-all. Returns (works, copies (to, from) to make on arrival, tensors to keep alive until then)."""
        sends, receives = (sorted(messages, key=lambda message: message[0]) for messages in (self.sends, self.receives))
        outgoing = joined([x for _, x in sends])
        if outgoing is None:
            outgoing = torch.cat([x.reshape(-1) for _, x in sends]) if sends else like.new_empty(0)
        incoming = joined([x for _, x in receives])
        landed: list[tuple[Any, Any]] = []
        if incoming is None:
            sizes = [x.numel() for _, x in receives]
            incoming = like.new_empty(sum(sizes))
            pieces = torch.split(incoming, sizes) if receives else ()
            landed = [(x, piece.view(x.shape)) for (_, x), piece in zip(receives, pieces, strict=True)]
        work = transport.all_to_all(incoming, outgoing, _sizes(receives, transport.size), _sizes(sends, transport.size))
        return [work], landed, (outgoing, incoming)


@dataclass
class Flight:
    """Messages in flight. Keeps the messages' tensors alive."""

    works: Sequence[Work] = ()
    peers: Sequence[int] = ()
    start: Any = None
    num_bytes: int = 0
    landed: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    kept: Any = None

    def wait(self, call: Call) -> None:
        """Block until all messages have been sent and received. On NCCL, make only the current stream wait.

        If a peer is gone: on gloo, raises a `CommError` that names the peers; on NCCL, torch's watchdog ends the process
        at the communicator's timeout.
        """
        if not self.works:
            return
        with call.spend("waiting"):
            for index, work in enumerate(self.works):
                try:
                    work.wait()
                except CommError:
                    raise
                except RuntimeError as error:
                    # Some backends return a single work for all messages.
                    one_each = len(self.works) == len(self.peers)
                    raise _lost(self.peers[index : index + 1] if one_each else self.peers, error) from error
        call.flew(self.start)
        call.bytes_received += self.num_bytes
        for place, piece in self.landed:
            place.copy_(piece)
        self.works, self.landed, self.kept = (), [], None


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return a flat view of contiguous tensors that are adjacent in one storage, or None for other tensors."""
    if not tensors:
        return None
    first, end = tensors[0], tensors[0].storage_offset()
    for x in tensors:
        if x.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() or x.storage_offset() != end:
            return None
        end += x.numel()
    return torch.as_strided(first, (end - first.storage_offset(),), (1,), first.storage_offset())


def _sizes(messages: Sequence[Message], ranks: int) -> list[int]:
    sizes = [0] * ranks
    for peer, x in messages:
        sizes[peer] += x.numel()
    return sizes


def _lost(peers: Sequence[int], error: RuntimeError) -> CommError:
    return CommError(
        f"a hop with rank {', '.join(map(str, sorted(set(peers))))} of the context-parallel group failed: "
        f"{str(error).splitlines()[0]}",
        hint="look at the log of that rank: it most likely ended first, or its loss did not depend on attention",
    )
