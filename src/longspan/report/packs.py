"""A manifest in numbers: one frozen record for the summary, the text and the figure.

Document lengths are binned by powers of two. A bar is the bin's share of the documents:

    up to     1k  ████
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
    """A bin of the length histogram: the documents of more than `most / 2` and at most `most` tokens.

    `documents`, `tokens` and `pairs` are the bin's shares (0 to 1) of all documents, tokens and causal pairs.
    """

    most: int
    documents: float
    tokens: float
    pairs: float


@dataclass(frozen=True, eq=False)
class PackReport:
    """The columns of a manifest of R training rows on `cp` ranks, with the manifest's names and units.

    `lengths` is int64 (P,): the tokens of each of P pieces (uncut documents, and the parts of cut documents). `tokens`,
    `padding` and `pairs` are int64 (R,). `rank_tokens`, `rank_pairs`, `rank_blocks` and `rank_bytes` are int64 (R, cp).
    """

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
        """`tokens / seq_len` of each row: float64 (R,)."""
        return self.tokens / self.seq_len

    @cached_property
    def imbalance(self) -> Array:
        """`max / mean` of the ranks' pairs in each row: float64 (R,). 1.0 is balanced."""
        mean = self.rank_pairs.mean(axis=1)
        return np.divide(self.rank_pairs.max(axis=1), mean, out=np.ones(len(mean)), where=mean > 0)

    @property
    def num_layers(self) -> int:
        return sum(self.masks.values())

    @cached_property
    def bins(self) -> list[Bin]:
        """All bins in ascending order of length, including empty bins."""
        power = np.ceil(np.log2(self.lengths)).astype(np.int64)
        weights = (np.ones(len(power)), self.lengths, self.lengths * (self.lengths + 1) // 2)
        first, sums = int(power.min()), [np.bincount(power - power.min(), weight) for weight in weights]
        shares = np.stack([of / of.sum() for of in sums], axis=1)
        return [Bin(1 << (first + i), *share) for i, share in enumerate(shares.tolist())]

    def summary(self) -> dict[str, Any]:
        """Summarise the manifest for JSON. Bytes and pairs have the units of the manifest's columns."""
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
    """Describe rows, epochs, sequence length and packing in one line."""
    rows, epochs = f"{len(report.tokens):,} row{'s' * (len(report.tokens) != 1)}", f"{report.epochs} epochs"
    of = f" of {epochs}" if report.epochs > 1 else ""
    return f"{rows}{of}, up to {short_tokens(report.seq_len)} tokens each, packing {report.packing}"


def pack_lines(report: PackReport) -> Iterator[tuple[str, str]]:
    """Format the summary as lines of (name, value)."""
    totals = report.summary()
    cut = f", {totals['documents_cut']:,} of them cut: {totals['pieces']:,} pieces" if totals["documents_cut"] else ""
    yield "rows", f"{totals['packs']:,}" + f" of {totals['epochs']} epochs" * (totals["epochs"] > 1)
    yield "documents", f"{totals['documents']:,}{cut}"
    yield "tokens", f"{totals['tokens']:,}"
    yield "fill", f"mean {totals['fill_mean']:.4f}, worst {totals['fill_worst']:.4f} of {report.seq_len:,}"
    yield "pairs", f"{short_count(totals['pairs'])} {_layers(report)}, forward"
    yield (
        "imbalance",
        (
            f"mean {totals['imbalance_mean']:.3f}, worst {totals['imbalance_worst']:.3f} x mean pairs: "
            f"{report.layout} layout, {_ranks(report)}"
        ),
    )
    yield (
        "sent",
        f"{short_bytes(totals['bytes'])} {_layers(report)}, {_heads(report)}, forward and backward: {report.route} route",
    )


def pack_note(report: PackReport) -> str:
    """Describe what the counts by rank refer to: layout, route, ranks, layers and heads."""
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
