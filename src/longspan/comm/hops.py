"""Point-to-point hops: a batch of sends and receives in flight while the caller computes.

A pair of ranks matches messages in the order they were posted, so both sides build their batches from the same plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from longspan.comm.traffic import Call
from longspan.spec import CommError


@dataclass
class Hop:
    """Messages to post together: contiguous tensors to send, and tensors to fill. Peers are ranks of the group."""

    sends: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    receives: list[tuple[int, torch.Tensor]] = field(default_factory=list)

    def post(self, group: dist.ProcessGroup | None, call: Call) -> "Flight":
        """Start all messages. The tensors must stay untouched until `Flight.wait`."""
        if not self.sends and not self.receives:
            return Flight([], self)
        assert group is not None, "a plan of one rank has no messages"
        operations = [dist.P2POp(dist.isend, tensor, group=group, group_peer=peer) for peer, tensor in self.sends]
        operations += [dist.P2POp(dist.irecv, tensor, group=group, group_peer=peer) for peer, tensor in self.receives]
        call.bytes_sent += sum(tensor.nbytes for _, tensor in self.sends)
        call.messages_sent += len(self.sends)
        try:
            return Flight(dist.batch_isend_irecv(operations), self)
        except RuntimeError as error:
            raise _lost([peer for peer, _ in (*self.sends, *self.receives)], error) from error


@dataclass
class Flight:
    """Messages under way; holds on to their tensors."""

    works: Sequence[dist.Work]
    hop: Hop

    def wait(self, call: Call) -> None:
        """Return when everything has arrived and left. Raises `CommError` naming the peers if one of them is gone."""
        if not self.works:
            return
        peers = [peer for peer, _ in (*self.hop.sends, *self.hop.receives)]
        with call.spend("waiting"):
            for index, work in enumerate(self.works):
                try:
                    work.wait()
                except RuntimeError as error:
                    # A backend may answer for the whole batch with one work.
                    raise _lost([peers[index]] if len(self.works) == len(peers) else peers, error) from error
        call.bytes_received += sum(tensor.nbytes for _, tensor in self.hop.receives)
        self.works, self.hop = [], Hop()


def _lost(peers: Sequence[int], error: RuntimeError) -> CommError:
    return CommError(
        f"a hop with rank {', '.join(map(str, sorted(set(peers))))} of the context-parallel group failed: "
        f"{str(error).splitlines()[0]}",
        hint="look at the log of that rank: it most likely ended first",
    )
