"""The sizes of a run as plain records, for estimates of memory and traffic before any model or process exists."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

from longspan.advise.planner import Planner
from longspan.names import DTYPES
from longspan.plan import Layout, Plan
from longspan.topology import ModelShape, Topology


@dataclass(frozen=True)
class RunShape:
    """The sizes of a run that determine what each rank holds and sends in a step."""

    model: ModelShape
    topology: Topology
    planner: Planner
    """The planner, with the heads of the model and a layer count for every mask of the model."""
    seq_len: int
    """Most tokens in a row."""
    micro_batch_size: int
    """Rows in a micro-batch."""
    gradient_accumulation_steps: int
    dtype: str = "fp32"
    sp: bool = True
    """Sequence parallelism: norms, residuals and dropout run on 1/tp of a rank's tokens."""
    recompute: Literal["none", "block", "full"] = "none"
    dropout: bool = False
    wrapper: Literal["fsdp", "ddp"] = "fsdp"
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    defer_reduction: bool = True
    """Whether gradients are reduced once per optimizer step, rather than after each micro-batch."""
    device_type: str = "cpu"
    loss_chunk: int = 1024
    """Tokens whose logits are computed at a time."""

    @property
    def longest(self) -> tuple[int, ...]:
        """Document lengths of the micro-batch with most visible pairs, in which every row is one document of `seq_len` tokens."""
        return (self.seq_len,) * self.micro_batch_size

    @cached_property
    def longest_plans(self) -> tuple[Layout, Mapping[str, Plan]]:
        """Layout and plans of the micro-batch `longest`."""
        return self.planner.plans(self.planner.documents(self.longest))

    @property
    def itemsize(self) -> int:
        """Bytes of an activation."""
        return DTYPES[self.dtype].itemsize

    @property
    def wide_itemsize(self) -> int:
        """Bytes of an element of values kept in at least fp32: sums, norms, parameters, moments."""
        return max(4, self.itemsize)

    @property
    def heads(self) -> tuple[int, int]:
        """(query heads, KV heads) on one rank, after TP."""
        assert self.planner.heads is not None, "the planner of a run with a model has its heads"
        return self.planner.heads

    @property
    def stages(self) -> list[range]:
        """Layers of every pipeline stage, in order."""
        return stage_layers(self.model.num_layers, self.topology.pp * self.stages_per_rank)

    def stages_of(self, pp_rank: int) -> list[range]:
        """List the layers of the stages that one pipeline rank holds."""
        return self.stages[pp_rank :: self.topology.pp]


def stage_layers(num_layers: int, num_stages: int) -> list[range]:
    """Split layers into pipeline stages, in order. If the stages cannot be equal, the first stages have one more layer."""
    each, more = divmod(num_layers, num_stages)
    starts = [stage * each + min(stage, more) for stage in range(num_stages + 1)]
    return [range(*edges) for edges in pairwise(starts)]
