"""What ranks post and wait for, written down by running each alone, and whether such scripts can be carried out together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from longspan.comm.matching import Batch, Communicator, Part
from longspan.comm.transport import Transport
from longspan.cp.engine.executor import Share, run_backward, run_forward
from longspan.errors import CommError
from longspan.plan import Plan


class Entry(NamedTuple):
    """A batch that is posted on a communicator, or waited for."""

    kind: str
    communicator: str
    batch: Batch


@dataclass(eq=False)
class Recorder(Transport):
    """A group of which one rank runs alone: posts and waits go into a script, and nothing moves."""

    rank: int = 0
    size: int = 1
    script: list[Entry] = field(default_factory=list)

    def global_rank(self, rank: int) -> int:
        return rank

    def carries(self, device: torch.device) -> torch.device:
        return device

    def post(self, sends, receives) -> Sequence["Written"]:
        return [self.write("cp", Batch(self.rank, _parts(sends), _parts(receives)))]

    def all_to_all(self, incoming, outgoing, received, sent) -> "Written":
        sends, receives = enumerate(torch.split(outgoing, list(sent))), enumerate(torch.split(incoming, list(received)))
        return self.write("cp", Batch(self.rank, _parts(sends), _parts(receives), "all-to-all"))

    def all_gather(self, everyone, mine) -> None:
        everyone.view(self.size, -1)[:] = mine

    def write(self, communicator: str, batch: Batch) -> "Written":
        self.script.append(Entry("post", communicator, batch))
        return Written(self, communicator, batch)


class Written(NamedTuple):
    recorder: Recorder
    communicator: str
    batch: Batch

    def wait(self) -> None:
        self.recorder.script.append(Entry("wait", self.communicator, self.batch))


def _parts(messages) -> list[Part]:
    return [Part(peer, x.numel(), str(x.dtype), x.nbytes) for peer, x in messages]


def play(scripts: Sequence[Sequence[Entry]], *, one_queue: bool = False, buffered: int = 0) -> str:
    """Carry out the scripts of all ranks under NCCL's rules; empty, or who waits for whom at the end.

    one_queue: a device runs what was posted on any communicator one after the other, the hardest order there is.
    """
    communicators: dict[str, Communicator] = {}
    places, moved = [0] * len(scripts), True
    while moved:
        moved = False
        for rank, script in enumerate(scripts):
            while places[rank] < len(script):
                kind, name, batch = script[places[rank]]
                if kind == "post":
                    key = "" if one_queue else name
                    communicators.setdefault(key, Communicator(len(scripts), buffered)).post(batch)
                elif not batch.done:
                    break
                places[rank], moved = places[rank] + 1, True
    stuck = [rank for rank, script in enumerate(scripts) if places[rank] < len(script)]
    return "; ".join(
        f"rank {rank} waits for {peers}: {name} {lacks}"
        for name, communicator in communicators.items()
        for rank in stuck
        for lacks, peers in [communicator.waits_for(rank)]
        if peers
    ) or ("" if not stuck else f"ranks {stuck} wait for nothing that was posted")


class NoKernel:
    """Computes nothing."""

    name = "none"

    def refusal(self, q, k, v, change=None):
        return None

    def split(self, tile, device, dtype, backward=False):
        return (tile,)

    def joins(self, first, second, device):
        return True

    def forward(self, q, k, v, shapes, scale, change=None):
        return q.new_zeros(*q.shape[:3], v.shape[3]), q.new_zeros(q.shape[:3])

    def backward(self, saved, shapes, scale, change=None):
        return torch.zeros_like(saved.q), torch.zeros_like(saved.k), torch.zeros_like(saved.v)


class Layer:
    """Attention of one layer on one rank, by the executor itself; `forward` again is what recomputation does."""

    def __init__(
        self, plan: Plan, group: Any, rank: int, kernel: str, heads: tuple[int, int], device: str = "cpu"
    ) -> None:
        self.share = Share.of(plan, rank, group, kernel)
        T = plan.layout.num_slots(rank)
        self.qkv = [torch.zeros(1, n, T, 2, device=device) for n in (heads[0], heads[1], heads[1])]

    def forward(self) -> None:
        out, self.lse, together = run_forward(self.share, *self.qkv, None, 1.0)
        self.kept, self.like = together or (*self.qkv, out), out

    def backward(self) -> None:
        run_backward(self.share, torch.zeros_like(self.like), *self.kept, self.lse, None, 1.0)


def scripts_of(plan: Plan, heads: tuple[int, int], program: Callable[[Recorder, Layer], None]) -> list[list[Entry]]:
    """The scripts of all ranks that run `program` with a layer of that plan; kernel "none" must be known."""
    recorders = [Recorder(rank, plan.ranks) for rank in range(plan.ranks)]
    for recorder in recorders:
        program(recorder, Layer(plan, recorder, recorder.rank, "none", heads))
    return [recorder.script for recorder in recorders]


def try_play(scripts: Sequence[Sequence[Entry]], **options: Any) -> str:
    """`play`, with the text of the error where ends of a message do not fit."""
    try:
        return play(scripts, **options)
    except CommError as error:
        return str(error)
