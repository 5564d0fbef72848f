"""The rows that a run would read, as a manifest with what each asks of every rank: `longspan pack`.

    documents -> rows of the loader -> layout and plan of each row alone -> counts -> manifest

Starts without torch. A row is counted as a micro-batch of its own, whatever `rows_per_batch`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from longspan.advise import Costs
from longspan.advise.choose import reckon
from longspan.data import open_store, write_manifest
from longspan.data.loader import Loader
from longspan.data.manifest import Counted, Counts, Pack, flat, read_table
from longspan.errors import SpecError
from longspan.model.model_config import ModelConfig, window_of
from longspan.plan import Layout, Mask, Plan, plan_attention
from longspan.plan.comm_dtype import ITEMSIZES
from longspan.plan.layout import slots_of
from longspan.report import PackReport
from longspan.train.axes import heads_of, slots_multiple_of
from longspan.train.run_loader import make_loader
from longspan.train.train_config import PackConfig

_HEAD_DIM = 128  # where no model says


def pack(
    config: PackConfig,
    output: Path,
    *,
    epochs: int = 1,
    tokenised: Callable[[int], None] | None = None,
    packed: Callable[[int, int], None] | None = None,
) -> PackReport:
    """Write the rows of the first `epochs` epochs to `output`, over what is there.

    `tokenised` is told the documents done, `packed` the rows done and about how many there are.

    Raises SpecError, DataError: what no rank could carry out, and what `open_store`, `Loader` and `write_manifest` raise.
    """
    if config.data.manifest is not None:
        raise SpecError(
            f"data.manifest={config.data.manifest}: rows that are packed are not packed again",
            hint="leave it out: --set data.manifest=none",
        )
    count = RowCounter.of(config)
    count([config.parallel.cp])  # what every row would be refused for, before the corpus is read
    store = open_store(config.data, tokenised)
    loader = make_loader(config, store, dp_rank=0, dp_size=1)
    write_manifest(output, _packs(loader, epochs, count, packed), store, loader.stream, epochs, count.counted)
    return report_of(output)


def report_of(path: Path) -> PackReport:
    """A manifest in numbers, to be told and drawn. Raises DataError: a file that is no manifest."""
    names = ["tokens", "padding", "pairs", "rank_tokens", "rank_pairs", "rank_blocks", "rank_bytes"]
    table, about = read_table(path, [*names, "epoch", "documents"])
    edges, documents = flat(table, "documents")
    columns = {name: table.column(name).to_numpy() for name in names if not name.startswith("rank_")}
    ranks = {name: flat(table, name)[1].reshape(table.num_rows, -1) for name in names if name.startswith("rank_")}
    cut = documents["start"] > 0
    rows = np.repeat(table.column("epoch").to_numpy(), np.diff(edges))
    return PackReport(
        name=path.name,
        epochs=about["epochs"],
        row_tokens=about["stream"]["row_tokens"],
        packing=about["stream"]["packing"],
        **{
            name: about["counted"][name] for name in ("cp", "layout", "route", "masks", "heads", "head_dim", "itemsize")
        },
        lengths=documents["stop"] - documents["start"],
        num_documents=int((~cut).sum()),
        num_cut=len(np.unique(np.stack((rows[cut], documents["document"][cut])), axis=1).T),
        **columns,
        **ranks,
    )


@dataclass(frozen=True)
class RowCounter:
    """Counts a row by its layout and plans, as the run of a configuration would make them.

    Where the ranks of a node end is not known here: a route that minds it is chosen without.
    """

    counted: Counted
    costs: Costs
    whole_below: int

    @classmethod
    def of(cls, config: PackConfig) -> "RowCounter":
        model, parallel = _model(config), config.parallel
        names = ("full",) if model is None else model.mask_names
        counted = Counted(
            cp=parallel.cp,
            layout=parallel.layout,
            route=parallel.route,
            inner=parallel.inner,
            wire_dtype=parallel.wire_dtype,
            slots_multiple_of=slots_multiple_of(config),
            masks={name: names.count(name) for name in dict.fromkeys(names)},
            heads=None if model is None else heads_of(config, model),
            head_dim=_HEAD_DIM if model is None else model.head_dim,
            itemsize=ITEMSIZES[config.dtype],
        )
        return cls(counted, *reckon(parallel.costs, parallel.layout, counted.heads, counted.head_dim, counted.itemsize))

    def __call__(self, lengths: Sequence[int]) -> Counts:
        """A row of documents of these lengths, forward and backward of all layers."""
        of, tokens = self.counted, sum(lengths)
        slots = slots_of(tokens, of.cp, of.slots_multiple_of)
        masks = [Mask.documents(lengths, window=window_of(name)) for name in of.masks]
        layers = list(of.masks.values())
        layout = Layout.named(
            of.layout, tokens, of.cp, slots, masks=masks, weights=layers, whole_below=self.whole_below
        )
        plans = [
            plan_attention(layout, mask, of.route, of.heads, of.inner, wire_dtype=of.wire_dtype, costs=self.costs)
            for mask in masks
        ]

        def of_ranks(count: Callable[[Plan, int], float]) -> list[float]:
            return [sum(n * count(plan, rank) for plan, n in zip(plans, layers, strict=True)) for rank in range(of.cp)]

        def sent(plan: Plan, rank: int) -> int:
            forward = plan.bytes(rank, "forward", of.head_dim, of.itemsize)
            return forward + plan.bytes(rank, "backward", of.head_dim, of.itemsize)

        return Counts(
            pairs=sum(n * mask.area for mask, n in zip(masks, layers, strict=True)),
            rank_tokens=layout.counts.tolist(),
            rank_pairs=of_ranks(Plan.area),
            rank_blocks=of_ranks(Plan.blocks),
            rank_bytes=[int(total) for total in of_ranks(sent)],
        )


def _packs(loader: Loader, epochs: int, count: RowCounter, packed: Callable[[int, int], None] | None) -> Iterator[Pack]:
    about = loader.rows_per_epoch * epochs
    for row, (epoch, pieces) in enumerate(loader.packs(epochs)):
        yield Pack(epoch, pieces, count([piece.stop - piece.start for piece in pieces]))
        if packed is not None:
            packed(row + 1, max(about, row + 1))


def _model(config: PackConfig) -> ModelConfig | None:
    if config.init_from is None:
        return config.model
    from longspan.model import read_config  # loads torch, which a configuration that has its model does not need

    return read_config(config.init_from)
