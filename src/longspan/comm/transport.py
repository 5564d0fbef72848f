"""The interface between longspan and a communication backend.

ProcessGroup    TorchTransport: gloo, NCCL
MemoryGroup     is a Transport: ranks as threads of one process, under NCCL's rules (`longspan.comm.in_memory`)
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

Message = tuple[int, torch.Tensor]
"""(peer rank in the group, contiguous tensor to send or to receive into)."""


class Work(Protocol):
    """Messages in flight."""

    def wait(self) -> object:
        """Block until the messages have been sent and received. On CUDA, make only the current stream wait."""
        ...


class Transport(ABC):
    """Sends tensors among the ranks of one group. `post` is not collective."""

    @property
    @abstractmethod
    def rank(self) -> int: ...

    @property
    @abstractmethod
    def size(self) -> int: ...

    @abstractmethod
    def global_rank(self, rank: int) -> int:
        """Return the global rank of `rank` of this group."""

    @abstractmethod
    def carries(self, device: torch.device) -> torch.device:
        """Return the device from which a tensor on `device` is sent: `device` itself if the backend supports it."""

    def connect(self, device: torch.device) -> None:
        """Connect all ranks, so that later messages on `device` involve only sender and receiver. Collective."""
        return

    @abstractmethod
    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Sequence[Work]:
        """Start a batch of messages. A rank's batches finish in posting order."""

    @abstractmethod
    def all_to_all(
        self, incoming: torch.Tensor, outgoing: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Work:
        """Start an all-to-all of 1-D tensors, split by rank into `received` and `sent` elements. Collective."""

    @abstractmethod
    def all_gather(self, everyone: torch.Tensor, mine: torch.Tensor) -> None:
        """All-gather the 1-D `mine` of every rank into the 1-D `everyone`, in rank order. Collective."""


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
        if backends.get("cuda", "gloo") == "gloo":  # gloo has collectives for CUDA tensors, but no send and recv
            return torch.device("cpu")
        return device if device.type == "cuda" else torch.device("cuda", torch.cuda.current_device())

    def connect(self, device: torch.device) -> None:
        # Without device_id, NCCL connects a group in the first operation, so all ranks must take part in that operation.
        mine = torch.zeros(1, device=self.carries(device))
        self.all_gather(mine.new_empty(self.size), mine)

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Sequence[Work]:
        # Receive first: gloo announces a receive to the peer only after all sends begun before.
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
    """Return the backend of each device type, such as {"cpu": "gloo", "cuda": "nccl"}."""
    entries = (entry.split(":") for entry in dist.get_backend_config(group).split(","))
    return {entry[0]: entry[1] for entry in entries}


def transport_of(group: dist.ProcessGroup | Transport) -> Transport:
    """Return the transport of a process group, or the group itself if it is a transport."""
    return group if isinstance(group, Transport) else TorchTransport(group)
