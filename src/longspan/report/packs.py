"""A manifest in numbers: one frozen record that the summary, the text and the figure all read.

Lengths are binned by powers of two, so that a bin of long documents and one of short ones are as wide:

    up to     1k  ████          of the documents
              2k  ████████
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from longspan.report.words import short_bytes, short_count, short_tokens

Array = np.ndarray


class Bin(NamedTuple):
    """Documents of more than half of `most` tokens, and of `most` at most: their share of all, of the tokens, and of the
    pairs without a window."""

    most: int
    documents: float
    tokens: float
    pairs: float


@dataclass(frozen=True, eq=False)
class PackReport:
    """R rows on `cp` ranks. `lengths` int64 (P,) are those of all pieces of documents; `tokens`, `padding`, `pairs`
    int64 (R,); `rank_tokens` and so on (R, cp). The manifest's columns have the same names and units."""

    name: str
    epochs: int
    seq_len: int
    packing: str
    cp: int
    layout: str
    route: str
    masks: dict[str, int]
    heads: tuple[int, int] | None
    head_dim: int
    itemsize: int
    lengths: Array
    num_documents: int
    num_cut: int
    tokens: Array
    padding: Array
    pairs: Array
    rank_tokens: Array
    rank_pairs: Array
    rank_blocks: Array
    rank_bytes: Array

    @property
    def fill(self) -> Array:
        """Of each row: its tokens over those it has room for."""
        return self.tokens / self.seq_len

    @cached_property
    def imbalance(self) -> Array:
        """Of each row: the most pairs of a rank over the mean, 1.0 is even."""
        mean = self.rank_pairs.mean(axis=1)
        return np.divide(self.rank_pairs.max(axis=1), mean, out=np.ones(len(mean)), where=mean > 0)

    @property
    def num_layers(self) -> int:
        return sum(self.masks.values())

    @cached_property
    def bins(self) -> list[Bin]:
        """From the shortest to the longest documents, empty bins between them included."""
        power = np.ceil(np.log2(self.lengths)).astype(np.int64)
        weights = (np.ones(len(power)), self.lengths, self.lengths * (self.lengths + 1) // 2)
        first, sums = int(power.min()), [np.bincount(power - power.min(), weight) for weight in weights]
        shares = np.stack([of / of.sum() for of in sums], axis=1)
        return [Bin(1 << (first + i), *share) for i, share in enumerate(shares.tolist())]

    def summary(self) -> dict[str, Any]:
        """The whole in a few numbers, which JSON can hold. Bytes, pairs: as the columns of the manifest."""
        return {
            "packs": len(self.tokens),
            "epochs": self.epochs,
            "documents": self.num_documents,
            "documents_cut": self.num_cut,
            "pieces": len(self.lengths),
            "tokens": int(self.tokens.sum()),
            "padding": int(self.padding.sum()),
            "fill_mean": float(self.fill.mean()),
            "fill_worst": float(self.fill.min()),
            "pairs": int(self.pairs.sum()),
            "cp": self.cp,
            "layout": self.layout,
            "route": self.route,
            "imbalance_mean": float(self.imbalance.mean()),
            "imbalance_worst": float(self.imbalance.max()),
            "bytes": int(self.rank_bytes.sum()),
        }


def pack_headline(report: PackReport) -> str:
    """What was packed."""
    rows, epochs = f"{len(report.tokens):,} row{'s' * (len(report.tokens) != 1)}", f"{report.epochs} epochs"
    of = f" of {epochs}" if report.epochs > 1 else ""
    return f"{rows}{of}, up to {short_tokens(report.seq_len)} tokens each, packing {report.packing}"


def pack_lines(report: PackReport) -> Iterator[tuple[str, str]]:
    """The summary in words: what, and how much."""
    told = report.summary()
    cut = f", {told['documents_cut']:,} of them cut: {told['pieces']:,} pieces" if told["documents_cut"] else ""
    yield "rows", f"{told['packs']:,}" + f" of {told['epochs']} epochs" * (told["epochs"] > 1)
    yield "documents", f"{told['documents']:,}{cut}"
    yield "tokens", f"{told['tokens']:,}"
    yield "fill", f"mean {told['fill_mean']:.4f}, worst {told['fill_worst']:.4f} of {report.seq_len:,}"
    yield "pairs", f"{short_count(told['pairs'])} {_layers(report)}, forward"
    yield (
        "imbalance",
        (
            f"mean {told['imbalance_mean']:.3f}, worst {told['imbalance_worst']:.3f} x mean pairs: "
            f"{report.layout} layout, {_ranks(report)}"
        ),
    )
    yield (
        "sent",
        f"{short_bytes(told['bytes'])} {_layers(report)}, {_heads(report)}, forward and backward: {report.route} route",
    )


def pack_note(report: PackReport) -> str:
    """What the counts of ranks are of."""
    return f"{report.layout} layout, {report.route} route, {_ranks(report)}; {_layers(report)}, {_heads(report)}"


def _ranks(report: PackReport) -> str:
    return f"{report.cp} rank{'s' * (report.cp != 1)}"


def _layers(report: PackReport) -> str:
    masks = ", ".join(f"{number} {name}" for name, number in report.masks.items()) if len(report.masks) > 1 else ""
    return f"in {report.num_layers} layer{'s' * (report.num_layers != 1)}" + (f" ({masks})" if masks else "")


def _heads(report: PackReport) -> str:
    if report.heads is None:
        return f"one KV head of {report.head_dim} at {report.itemsize} bytes an element"
    return f"{report.heads[0]} query and {report.heads[1]} KV heads of {report.head_dim} at {report.itemsize} bytes an element"
