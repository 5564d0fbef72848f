"""Write the rows of a loader as a manifest, with the work and traffic of every rank: `longspan pack`.

    documents -> rows of the loader -> layout and plans of each row -> counts -> manifest

Runs without torch. Each row is counted as a separate micro-batch, whatever `micro_batch_size` is.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from longspan.advise import Planner
from longspan.data.loader import Loader
from longspan.data.manifest import Counted, Counts, Pack, flat, read_table, write_manifest
from longspan.data.store import TokenStore
from longspan.plan import PHASES, Plan
from longspan.report import PackReport


def pack(
    loader: Loader,
    store: TokenStore,
    planner: Planner,
    output: Path,
    *,
    epochs: int = 1,
    packed: Callable[[int, int], None] | None = None,
) -> PackReport:
    """Write the rows of the first `epochs` epochs of `loader` to `output`, replacing an older file.

    `planner` makes the layout and plans that a row is counted by. `packed(done, total)` is called after each row; `total` is
    approximate.

    Raises SpecError, DataError: see `Planner.plans`, `Loader` and `write_manifest`.
    """
    count = RowCounter(planner)
    write_manifest(output, _packs(loader, epochs, count, packed), store, loader.stream, epochs, count.counted)
    return report_of(output)


def report_of(path: Path) -> PackReport:
    """Summarise a manifest for printing and drawing. Raises DataError: not a manifest."""
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
        seq_len=about["stream"]["seq_len"],
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
    """Count the work and traffic of a row, by the layout and plans that `planner` makes for this row."""

    planner: Planner

    @property
    def counted(self) -> Counted:
        """The setup that the counts refer to."""
        p = self.planner
        return Counted(
            cp=p.ranks, layout=p.layout, route=p.route, inner=p.inner, ranks_per_node=p.ranks_per_node,
            comm_dtype=p.comm_dtype, pad_to_multiple_of=p.pad_to_multiple_of, masks=dict(p.mask_layers), heads=p.heads,
            head_dim=p.costs.head_dim, itemsize=p.costs.itemsize,
        )  # fmt: skip

    def __call__(self, lengths: Sequence[int]) -> Counts:
        """Count a row of documents of `lengths`, over all layers, forward and backward."""
        layers, costs = self.planner.mask_layers, self.planner.costs
        masks = self.planner.documents(lengths)
        layout, plans = self.planner.plans(masks)

        def of_ranks(count: Callable[[Plan, int], float]) -> list[float]:
            ranks = range(self.planner.ranks)
            return [sum(layers[name] * count(plan, rank) for name, plan in plans.items()) for rank in ranks]

        def sent(plan: Plan, rank: int) -> int:
            return sum(plan.bytes(rank, phase, costs.head_dim, costs.itemsize) for phase in PHASES)

        return Counts(
            pairs=sum(layers[name] * mask.area for name, mask in masks.items()),
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
