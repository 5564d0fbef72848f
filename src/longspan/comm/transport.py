"""The seam between longspan and a backend: what a group of ranks must be able to do for us.

ProcessGroup    TorchTransport: gloo, NCCL
MemoryGroup     itself: ranks as threads of one process, under NCCL's rules (`longspan.comm.in_memory`)
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

Message = tuple[int, torch.Tensor]
"""A rank of the group, and a contiguous tensor to send to it or to fill from it."""


class Work(Protocol):
    """Messages under way."""

    def wait(self) -> object:
        """Return when the messages have arrived and left; on CUDA, when the current stream waits for that."""
        ...


class Transport(ABC):
    """Carries tensors among the ranks of one group. Every method but the properties is collective where it says so."""

    @property
    @abstractmethod
    def rank(self) -> int: ...

    @property
    @abstractmethod
    def size(self) -> int: ...

    @abstractmethod
    def global_rank(self, rank: int) -> int:
        """The rank of the world that is `rank` here."""

    @abstractmethod
    def carries(self, device: torch.device) -> torch.device:
        """The device on which a tensor travels that lives on `device`: the same one wherever the backend allows."""

    def connect(self, device: torch.device) -> None:
        """Make sure that messages on `device` need no rank but their ends. Collective."""
        return

    @abstractmethod
    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Sequence[Work]:
        """Start a batch of messages. Batches of a group finish in the order in which a rank posts them."""

    @abstractmethod
    def all_to_all(
        self, incoming: torch.Tensor, outgoing: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Work:
        """Start an all-to-all of 1-D tensors, cut in pieces of `received` and `sent` elements. Collective."""

    @abstractmethod
    def all_gather(self, everyone: torch.Tensor, mine: torch.Tensor) -> None:
        """Fill `everyone`, 1-D, with the `mine` of every rank, in rank order. Collective."""


@dataclass(frozen=True)
class TorchTransport(Transport):
    """A process group of torch.distributed."""

    group: dist.ProcessGroup

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    def global_rank(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank)

    def carries(self, device: torch.device) -> torch.device:
        backends = backends_of(self.group)
        if device.type == "cpu" and "cpu" in backends:
            return device
        if backends.get("cuda", "gloo") == "gloo":  # gloo has collectives of CUDA tensors, but no messages
            return torch.device("cpu")
        return device if device.type == "cuda" else torch.device("cuda", torch.cuda.current_device())

    def connect(self, device: torch.device) -> None:
        # NCCL connects a group in its first operation, for which all ranks must be there, if none bound it to a device before.
        mine = torch.zeros(1, device=self.carries(device))
        self.all_gather(mine.new_empty(self.size), mine)

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Sequence[Work]:
        # gloo tells a peer that it may send behind whatever it has begun to send itself: receive first.
        operations = [dist.P2POp(dist.irecv, x, group=self.group, group_peer=peer) for peer, x in receives]
        operations += [dist.P2POp(dist.isend, x, group=self.group, group_peer=peer) for peer, x in sends]
        works: Sequence[Work] = dist.batch_isend_irecv(operations)
        return works

    def all_to_all(
        self, incoming: torch.Tensor, outgoing: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Work:
        work: Work | None = dist.all_to_all_single(
            incoming, outgoing, list(received), list(sent), group=self.group, async_op=True
        )
        assert work is not None, "the group holds this rank"
        return work

    def all_gather(self, everyone: torch.Tensor, mine: torch.Tensor) -> None:
        dist.all_gather_single(everyone, mine, group=self.group)


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """Type of device -> name of the backend that serves it, such as {"cpu": "gloo", "cuda": "nccl"}."""
    entries = (entry.split(":") for entry in dist.get_backend_config(group).split(","))
    return {entry[0]: entry[1] for entry in entries}


def transport_of(group: dist.ProcessGroup | Transport) -> Transport:
    """The transport of a group: a process group's, or the group itself if it is one."""
    return group if isinstance(group, Transport) else TorchTransport(group)
