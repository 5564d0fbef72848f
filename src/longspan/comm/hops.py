"""Hops: a batch of messages in flight while the caller computes, each by itself or all in one all-to-all.

A pair of ranks matches messages in the order they were posted, so both sides build their batches from the same plan.
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
        """Start all messages. The tensors must stay untouched until `Flight.wait`.

        `collective`, any tensor of the messages' type and device, makes one all-to-all of them; then every rank of the group
        posts one, with messages or without.
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
        """Post one all-to-all; also where pieces have yet to be copied when it is done, and what must live until then."""
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
    """Messages under way; holds on to their tensors."""

    works: Sequence[Work] = ()
    peers: Sequence[int] = ()
    start: Any = None
    num_bytes: int = 0
    landed: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    kept: Any = None

    def wait(self, call: Call) -> None:
        """Return when everything has arrived and left; on NCCL, once the current stream waits for that.

        Raises `CommError` naming the peers if one of them is gone. That is gloo: under NCCL a wait returns at once, and torch's
        watchdog ends the process when the communicator's timeout is over.
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
                    # A backend may answer for the whole batch with one work.
                    one_each = len(self.works) == len(self.peers)
                    raise _lost(self.peers[index : index + 1] if one_each else self.peers, error) from error
        call.flew(self.start)
        call.bytes_received += self.num_bytes
        for place, piece in self.landed:
            place.copy_(piece)
        self.works, self.landed, self.kept = (), [], None


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Contiguous tensors that lie one after the other in one storage, as one flat view of it; None if they do not."""
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
        hint="look at the log of that rank: it most likely ended first, or had nothing to differentiate in backward",
    )
