"""What a rank keeps of activations between forward and backward, by formula. No torch.
The terms are in docs/reference/memory.md; a test holds them against the tensors that autograd saves on real ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from longspan.advise.choose import reckon
from longspan.model.chunks import loss_chunk
from longspan.model.model_config import ModelConfig
from longspan.plan import STAGED, Layout, Mask, plan_attention
from longspan.plan.comm_dtype import ITEMSIZES
from longspan.plan.layout import slots_of
from longspan.train.axes import heads_of, slots_multiple_of, stages_per_rank
from longspan.train.train_config import TrainConfig

INTEGER = 8
"""Bytes of ids, labels, positions and indices."""


@dataclass(frozen=True)
class Activations:
    """Bytes kept of one micro-batch at the longest row of the data, on the rank with most slots.

    T slots of the CP shard, R of them between layers (T / tp under sequence parallelism, else T), E width, and of this rank
    H query heads, K KV heads, F feed-forward width, V vocabulary; D head dim; `a` bytes of an activation, `w` of a wide one
    (fp32, or fp64 for fp64).
    """

    slots: int
    """T."""
    tokens: int
    """Of the slots, those that hold a token."""
    block: int
    """Kept of a block: all that backward needs, or by `recompute` its input and attention's results, or its input alone."""
    recomputed: int
    """Of the one block that is at work in backward, what is made again beside what was kept."""
    rotary: int
    """Kept once by a stage: tables of positions, and token numbers for dropout."""
    first: int
    """Kept by the embedding."""
    last: int
    """Kept by the final norm and the loss."""
    hidden: int
    """Hidden states of R slots, which is what stages send each other."""
    head: int
    """At work in the loss, and kept by nothing: a chunk of logits, and the wide gradient of the head's weight."""

    def stage(self, num_layers: int, *, first: bool, last: bool) -> int:
        """Kept of a micro-batch by a stage of so many layers."""
        ends = self.first * first + self.last * last
        return num_layers * self.block + self.rotary + ends


def activations_of(config: TrainConfig, model: ModelConfig, device_type: str = "cpu") -> Activations:
    """Of the row that `longest` makes. On CUDA RMSNorm is one kernel, which keeps its input alone, and chunks of logits are
    larger; on CPU it keeps input and result of the normalisation, wide."""
    size = _Sizes.of(config, model, device_type == "cuda")
    whole, kept = size.block(), size.kept(config.recompute)
    vocab, width, a, w = size.vocab, model.width, size.a, size.w
    chunk = min(size.slots, loss_chunk(device_type, vocab))
    narrow = a if a < w else 0
    return Activations(
        slots=size.slots,
        tokens=size.tokens,
        block=kept,
        recomputed=whole - kept,
        rotary=2 * size.slots * model.head_dim * w + (INTEGER * size.rows if config.dropout else 0),
        first=INTEGER * size.slots,
        last=size.norm(size.rows, width) + size.slots * (width * a + INTEGER + w),
        hidden=size.rows * width * a,
        head=(chunk + width) * vocab * (w + narrow) if vocab else 0,
    )


def longest(config: TrainConfig) -> tuple[int, ...]:
    """Document lengths of the longest row of a micro-batch that the data can give, with most pairs: every row one document."""
    return (config.data.row_tokens,) * config.rows_per_batch


def in_flight(config: TrainConfig, pp_rank: int) -> list[list[int]]:
    """Micro-batches that each stage of a rank keeps after each forward of a step, by the schedule; without a pipeline 1.

    warm-up  F F F   then  F B  F B ...   then  B B B        one forward more than the warm-up is kept

    Of pp ranks and v stages a rank, rank p warms up with pp - 1 - p forwards (1f1b, Narayanan et al., 2021,
    arXiv:2104.04473), with (v - 1) pp + 2 (pp - 1 - p) (interleaved) or (v - 1) pp + pp - 1 - p (zero-bubble, ZB1P of Qi et al.,
    2023, arXiv:2401.10241). Zero-bubble takes the weights' gradients p backwards later, and keeps until then.
    """
    pp, micros = config.parallel.pp, config.accumulation
    if pp == 1:
        return [[1]]
    stages, schedule = stages_per_rank(config), config.parallel.schedule
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
    """What the terms of a block are made of: see `Activations` for the letters."""

    config: TrainConfig
    model: ModelConfig
    fused: bool
    slots: int
    tokens: int
    exchanged: tuple[int, int, int] | None
    """Where heads are exchanged: rows, query heads and KV heads that attention works on here."""

    @classmethod
    def of(cls, config: TrainConfig, model: ModelConfig, fused: bool) -> "_Sizes":
        parallel, lengths = config.parallel, longest(config)
        total, heads = sum(lengths), heads_of(config, model)
        windows = model.windows or (None,) * model.num_layers
        masks = {window: Mask.documents(lengths, window=window) for window in windows}
        itemsize = ITEMSIZES[config.dtype]
        costs, whole_below = reckon(parallel.costs, parallel.layout, heads, model.head_dim, itemsize)
        layout = Layout.named(
            parallel.layout, total, parallel.cp, slots_of(total, parallel.cp, slots_multiple_of(config)),
            masks=list(masks.values()), weights=[windows.count(window) for window in masks], whole_below=whole_below,
        )  # fmt: skip
        plan = plan_attention(
            layout, masks[windows[0]], parallel.route, heads, parallel.inner, tp=parallel.tp, costs=costs
        )
        rank = int(layout.counts.argmax())
        share = None if plan.degrees.heads == 1 else plan.rank_plan(rank).heads
        exchanged = None if share is None else (share.rows, share.num_query, share.num_kv)
        return cls(config, model, fused, layout.num_slots(rank), int(layout.counts[rank]), exchanged)

    @property
    def tp(self) -> int:
        return self.config.parallel.tp

    @property
    def rows(self) -> int:
        return -(-self.slots // self.tp) if self.config.parallel.sp else self.slots

    @property
    def a(self) -> int:
        return ITEMSIZES[self.config.dtype]

    @property
    def w(self) -> int:
        return max(4, self.a)

    @property
    def vocab(self) -> int:
        return self.model.vocab_size // self.tp

    @property
    def heads(self) -> tuple[int, int]:
        return heads_of(self.config, self.model)

    @property
    def staged(self) -> bool:
        return self.config.parallel.route == STAGED

    def norm(self, rows: int, width: int) -> int:
        """Kept by an RMSNorm over `rows` of `width`, its result apart."""
        return rows * (width * self.a + self.w) if self.fused else rows * (2 * width + 1) * self.w

    def kept(self, recompute: str) -> int:
        """Of a block."""
        if recompute == "none":
            return self.block()
        entry = self.rows * self.model.width * self.a
        return entry if recompute == "full" else entry + self.results()

    def block(self) -> int:
        """All that backward of a block needs."""
        T, E = self.slots, self.model.width
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
        """q, k, v, out and lse of the rows and heads that attention works on here."""
        rows, query, kv = self.exchanged or (self.slots, *self.heads)
        return rows * (2 * (query + kv) * self.model.head_dim * self.a + query * self.w)

    def results(self) -> int:
        """Of attention, what is not computed again: out and lse, and q, k, v, out of exchanged heads."""
        out = self.slots * self.heads[0] * self.model.head_dim * self.a
        return out + (self.attended() if self.exchanged else self.slots * self.heads[0] * self.w)

    def dense(self) -> int:
        """The gathered result of the second norm; gate, its silu, up, and their product."""
        assert self.model.ffn_width is not None, "the configuration has one of ffn_width and experts"
        return self.slots * self.a * (self.model.width + 4 * self.model.ffn_width // self.tp)

    def experts(self) -> int:
        """Router, rows of tokens on their way through experts (spread evenly), their sum, and the shared expert."""
        experts = self.model.experts
        assert experts is not None, "the configuration has one of ffn_width and experts"
        R, E, a, w, top_k = self.rows, self.model.width, self.a, self.w, experts.top_k
        router = R * (E * w + (2 + bool(experts.balance)) * experts.num_experts * w + (top_k + 1) * w)
        sorting = 2 * top_k * (self.config.parallel.ep > 1)  # rows that came, by expert and back
        indices = R * (1 + INTEGER * (experts.num_experts + 2 * top_k + sorting + 1))
        routed = R * top_k * a * (E + 4 * experts.ffn_width) + R * (top_k + 1) * E * a
        shared = 0
        if experts.shared_ffn_width:
            # Without TP its input is the router's, unless that was made wide.
            own = self.slots * E if self.tp > 1 or a < w else 0
            shared = a * (own + self.slots * 4 * experts.shared_ffn_width // self.tp)
        return router + indices + routed + shared


def peak_in_flight(history: Sequence[Sequence[int]], kept: Sequence[int]) -> tuple[int, int]:
    """The most bytes that stages keep at once, and of how many micro-batches, if stage i keeps `kept[i]` of each."""
    return max((sum(n * size for n, size in zip(now, kept, strict=True)), sum(now)) for now in history)
