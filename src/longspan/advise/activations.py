"""Bytes of activations that a rank keeps between forward and backward, by formula. No torch.

docs/reference/memory.md lists the terms. A test compares them with the tensors that autograd saves.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from longspan.advise.run_shape import RunShape
from longspan.topology import ModelShape

INTEGER = 8
"""Bytes of ids, labels, positions and indices."""


@dataclass(frozen=True)
class Activations:
    """Bytes kept for one micro-batch at the longest row of the data, on the rank with most slots.

    Letters of the formulas: T slots of the CP shard; R rows between layers (T / tp under sequence parallelism, else T);
    E hidden size; D head dim; `a` bytes of an activation; `w` bytes of a wide one (fp32, or fp64 for fp64). On this
    rank after TP: H query heads, K KV heads, F intermediate size, V vocabulary size.
    """

    slots: int
    """T."""
    tokens: int
    """Slots that hold a token."""
    block: int
    """Kept per block: everything that backward needs. With `recompute`, the block's input (and attention's results)."""
    recomputed: int
    """Recomputed in backward in addition to `block`, for one block at a time."""
    rotary: int
    """Kept once per stage: RoPE tables, and token numbers for dropout."""
    first: int
    """Kept by the embedding."""
    last: int
    """Kept by the final norm and the loss."""
    hidden: int
    """Hidden states of R rows, as pipeline stages send them."""
    head: int
    """Held only during the loss: a chunk of logits, and the wide gradient of the head's weight."""

    def stage(self, num_layers: int, *, first: bool, last: bool) -> int:
        """Bytes kept per micro-batch by a pipeline stage of `num_layers` layers.

        The `first` stage has the embedding, and the `last` stage the head.
        """
        ends = self.first * first + self.last * last
        return num_layers * self.block + self.rotary + ends


def activations_of(run: RunShape) -> Activations:
    """Estimate the activations of the micro-batch with most pairs, `run.longest`.

    On CUDA, RMSNorm is one kernel that keeps only its input, and chunks of logits are larger. On CPU, RMSNorm keeps wide
    copies of the input and of the normalised result.
    """
    size, model = _Sizes.of(run), run.model
    whole, kept = size.block(), size.kept(run.recompute)
    vocab, hidden_size, a, w = size.vocab, model.hidden_size, size.a, size.w
    chunk = min(size.slots, run.loss_chunk)
    narrow = a if a < w else 0
    return Activations(
        slots=size.slots,
        tokens=size.tokens,
        block=kept,
        recomputed=whole - kept,
        rotary=2 * size.slots * model.head_dim * w + (INTEGER * size.rows if run.dropout else 0),
        first=INTEGER * size.slots,
        last=size.norm(size.rows, hidden_size) + size.slots * (hidden_size * a + INTEGER + w),
        hidden=size.rows * hidden_size * a,
        head=(chunk + hidden_size) * vocab * (w + narrow) if vocab else 0,
    )


def in_flight(run: RunShape, pp_rank: int) -> list[list[int]]:
    """Count the micro-batches that each stage of a rank keeps, after each forward of a step. Without a pipeline, 1.

    warm-up  F F F   then  F B  F B ...   then  B B B        at most the warm-up and one more forward are kept

    Forwards in the warm-up of rank p of pp ranks, with v stages per rank:

    1f1b          pp - 1 - p                      Narayanan et al., 2021, arXiv:2104.04473
    interleaved   (v - 1) pp + 2 (pp - 1 - p)     ibid.
    zero-bubble   (v - 1) pp + pp - 1 - p         ZB1P of Qi et al., 2023, arXiv:2401.10241

    Zero-bubble delays the weights' gradients by p backwards, and keeps the activations until then.
    """
    pp, micros = run.topology.pp, run.gradient_accumulation_steps
    if pp == 1:
        return [[1]]
    stages, schedule = run.stages_per_rank, run.schedule
    together = micros // max(1, micros // pp)
    warm_up = (stages - 1) * together + (2 if schedule == "interleaved" else 1) * (pp - 1 - pp_rank)
    late = pp_rank if schedule == "zero-bubble" else 0
    total, kept, history = stages * micros, [0] * stages, []
    for index in range(total):
        kept[index // together % stages] += 1
        history.append(list(kept))
        freed = index - warm_up - late
        if freed >= 0:
            kept[stages - 1 - freed // together % stages] -= 1
    return history


@dataclass(frozen=True)
class _Sizes:
    """The sizes from which the terms of a block are computed. `Activations` explains the letters."""

    run: RunShape
    slots: int
    tokens: int
    exchanged: tuple[int, int, int] | None
    """(rows, query heads, KV heads) of attention on this rank after the exchange of heads. None without an exchange."""
    staged: bool
    """Whether attention runs on a few heads at a time (upipe) and keeps only the layer's input."""

    @classmethod
    def of(cls, run: RunShape) -> "_Sizes":
        layout, plans = run.longest_plans
        plan = next(iter(plans.values()))  # the mask of the first layer
        rank = int(layout.counts.argmax())
        share = None if plan.degrees.heads == 1 else plan.rank_plan(rank).heads
        exchanged = None if share is None else (share.rows, share.num_query, share.num_kv)
        return cls(run, layout.num_slots(rank), int(layout.counts[rank]), exchanged, plan.staged)

    @property
    def model(self) -> ModelShape:
        return self.run.model

    @property
    def tp(self) -> int:
        return self.run.topology.tp

    @property
    def rows(self) -> int:
        return -(-self.slots // self.tp) if self.run.sp else self.slots

    @property
    def a(self) -> int:
        return self.run.itemsize

    @property
    def w(self) -> int:
        return self.run.wide_itemsize

    @property
    def vocab(self) -> int:
        return self.model.vocab_size // self.tp

    @property
    def heads(self) -> tuple[int, int]:
        return self.run.heads

    def norm(self, rows: int, hidden_size: int) -> int:
        """Kept by an RMSNorm over `rows` rows of `hidden_size`, without its result."""
        return (
            rows * (hidden_size * self.a + self.w)
            if self.run.device_type == "cuda"
            else rows * (2 * hidden_size + 1) * self.w
        )

    def kept(self, recompute: str) -> int:
        """Kept per block with this `recompute`."""
        if recompute == "none":
            return self.block()
        entry = self.rows * self.model.hidden_size * self.a
        return entry if recompute == "full" else entry + self.results()

    def block(self) -> int:
        """Everything that backward of a block needs."""
        T, E = self.slots, self.model.hidden_size
        projected = T * E * self.a  # the gathered result of the first norm
        attention = (
            0 if self.staged else self.qk_norms() + self.attended() + T * self.heads[0] * self.model.head_dim * self.a
        )
        return (
            2 * self.norm(self.rows, E)
            + projected
            + attention
            + (self.experts() if self.model.experts else self.dense())
        )

    def qk_norms(self) -> int:
        return self.norm(self.slots * sum(self.heads), self.model.head_dim) if self.model.qk_norm else 0

    def attended(self) -> int:
        """Bytes of q, k, v, out and lse, for the rows and heads of attention on this rank."""
        rows, query, kv = self.exchanged or (self.slots, *self.heads)
        return rows * (2 * (query + kv) * self.model.head_dim * self.a + query * self.w)

    def results(self) -> int:
        """Attention's results, which recompute "block" keeps: out and lse, and q, k, v, out of exchanged heads."""
        out = self.slots * self.heads[0] * self.model.head_dim * self.a
        return out + (self.attended() if self.exchanged else self.slots * self.heads[0] * self.w)

    def dense(self) -> int:
        """A dense MLP: the gathered result of the second norm, then gate, silu(gate), up, and their product."""
        return self.slots * self.a * (self.model.hidden_size + 4 * self.model.intermediate_size // self.tp)

    def experts(self) -> int:
        """An MoE layer with evenly loaded experts: router, routed rows, their sum, and the shared expert."""
        experts = self.model.experts
        assert experts is not None, "the configuration has one of intermediate_size and experts"
        R, E, a, w, top_k = self.rows, self.model.hidden_size, self.a, self.w, experts.top_k
        router = R * (E * w + (2 + experts.balance) * experts.num_experts * w + (top_k + 1) * w)
        sorting = 2 * top_k * (self.run.topology.ep > 1)  # received rows: sorted by expert, and back
        indices = R * (1 + INTEGER * (experts.num_experts + 2 * top_k + sorting + 1))
        routed = R * top_k * a * (E + 4 * experts.intermediate_size) + R * (top_k + 1) * E * a
        shared = 0
        if experts.shared_intermediate_size:
            # Without TP the input is shared with the router, unless the router's copy is wide.
            own = self.slots * E if self.tp > 1 or a < w else 0
            shared = a * (own + self.slots * 4 * experts.shared_intermediate_size // self.tp)
        return router + indices + routed + shared


def peak_in_flight(history: Sequence[Sequence[int]], kept: Sequence[int]) -> tuple[int, int]:
    """Return (most bytes that the stages keep at once, micro-batches in flight at that time).

    `history` is the result of `in_flight`. Stage i keeps `kept[i]` bytes per micro-batch.
    """
    return max((sum(n * size for n, size in zip(now, kept, strict=True)), sum(now)) for now in history)
