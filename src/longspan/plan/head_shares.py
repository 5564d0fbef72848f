"""The exchange of heads (Ulysses): a group of ranks turns sequence shards into head shards, and back.

    4 ranks, 8 query heads, 2 KV heads                   member         0    1    2    3
    before   all heads of a quarter of the rows          query heads    01   23   45   67
    after    all rows of two query heads                 KV heads       0    0    1    1

Each member takes a contiguous range of equally many query heads, and the KV heads of this range. No other assignment
sends fewer KV heads. Proof: let an edge join a KV head to each member that needs the head. A connected component of this
graph holds equal fractions of the KV heads and of the members, so there are at most `gcd(KV heads, members)` components,
and at least `KV heads + members - gcd` edges. Contiguous ranges need exactly that many edges.
"""

from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from math import gcd

from longspan.errors import SpecError
from longspan.plan.layout import Layout

Heads = tuple[int, int]
"""A contiguous range of heads `(start, stop)`."""


@dataclass(frozen=True, slots=True)
class Place:
    """Rows `start..stop` of a member's shard become rows `first, first + step, ...` of the merged shard."""

    start: int
    stop: int
    first: int
    step: int


@dataclass(frozen=True, slots=True)
class HeadShare:
    """One member's share of an exchange of heads. Tuples have one entry per member.

    members: ranks of the CP group. member: index of this rank in `members`.
    query, kv: the heads that each member attends with.
    tokens, places: how many rows each member holds, and where these rows go in the merged shard.
    blocks: ranges (query heads, KV heads) of this member, counted from the member's first head. Within a block, every
    KV head serves the same number of query heads.
    """

    members: tuple[int, ...]
    member: int
    query: tuple[Heads, ...]
    kv: tuple[Heads, ...]
    tokens: tuple[int, ...]
    places: tuple[tuple[Place, ...], ...]
    blocks: tuple[tuple[Heads, Heads], ...]

    @property
    def num_query(self) -> int:
        """Number of query heads of this member."""
        start, stop = self.query[self.member]
        return stop - start

    @property
    def num_kv(self) -> int:
        """Number of KV heads of this member."""
        start, stop = self.kv[self.member]
        return stop - start

    @property
    def rows(self) -> int:
        """Number of rows of all members."""
        return sum(self.tokens)

    @property
    def replicates(self) -> bool:
        """Whether some KV head is on two members, so that their gradients of this head have to be summed."""
        return any(a[1] > b[0] for a, b in zip(self.kv, self.kv[1:], strict=False))

    def bytes_there(self, query: int, kv: int) -> int:
        """Bytes sent to turn sequence shards into head shards; `query` and `kv` are bytes per head and row."""
        return self.tokens[self.member] * sum(
            query * (self.query[m][1] - self.query[m][0]) + kv * (self.kv[m][1] - self.kv[m][0]) for m in self.others
        )

    def bytes_back(self, query: int, kv: int) -> int:
        """Bytes sent to turn head shards into sequence shards; `query` and `kv` are bytes per head and row."""
        return sum(self.tokens[m] for m in self.others) * (query * self.num_query + kv * self.num_kv)

    @property
    def others(self) -> list[int]:
        """All members except this one."""
        return [member for member in range(len(self.members)) if member != self.member]


def share_heads(
    heads: tuple[int, int], layout: Layout, places: tuple[tuple[Place, ...], ...], members: tuple[int, ...], rank: int
) -> HeadShare:
    """Make the share of `rank` in an exchange among `members`; `places` holds `places_of` for each member."""
    num_q, num_kv = heads
    degree, group = len(members), num_q // num_kv
    size = num_q // degree
    query = tuple((size * m, size * (m + 1)) for m in range(degree))
    kv = tuple((start // group, (stop - 1) // group + 1) for start, stop in query)
    member = members.index(rank)
    return HeadShare(
        members,
        member,
        query,
        kv,
        tuple(int(layout.counts[m]) for m in members),
        places,
        _blocks(query[member], kv[member], group),
    )


@dataclass(frozen=True)
class HeadStage:
    """One stage of Untied Ulysses: some heads of every member. `query` and `kv` are the layer's head numbers.

    `share` numbers the stage's heads from 0. `new_kv`: whether the KV heads differ from those of the stage before; if so,
    they have to be projected and exchanged.
    """

    query: tuple[int, ...]
    kv: tuple[int, ...]
    new_kv: bool
    share: HeadShare


def head_stages(whole: HeadShare, heads_per_stage: int | None) -> tuple[HeadStage, ...]:
    """Cut an exchange of all heads into stages of `heads_per_stage` query heads, equally many per member.

    Default: the least valid number. Every KV head is exchanged once: from each stage to the next, either all members
    keep their KV heads or all members change KV heads. Raises `SpecError` if `heads_per_stage` does not allow this.
    """
    degree, size, group = len(whole.members), whole.num_query, whole.query[-1][1] // whole.kv[-1][1]
    fits = [n for n in range(1, size + 1) if size % n == 0 and _shares_kv(whole, n, group)]
    heads_per_stage = fits[0] * degree if heads_per_stage is None else heads_per_stage
    per_member = heads_per_stage // degree
    if heads_per_stage % degree or per_member not in fits:
        raise SpecError(
            f"heads_per_stage={heads_per_stage} does not fit {whole.query[-1][1]} query heads ({whole.kv[-1][1]} KV heads) on "
            f"{degree} ranks: a stage takes equally many heads of each rank, and from one stage to the next all ranks keep "
            "their KV heads or all ranks change them",
            hint=f"use {', '.join(str(n * degree) for n in fits)}",
        )
    stages: list[HeadStage] = []
    for runs, kv in _stage_runs(whole, per_member, group):
        heads = tuple(sorted({head for run in kv for head in range(*run)}))
        share = replace(
            whole,
            query=tuple((m * per_member, (m + 1) * per_member) for m in range(degree)),
            kv=tuple((heads.index(start), heads.index(stop - 1) + 1) for start, stop in kv),
            blocks=_blocks(runs[whole.member], kv[whole.member], group),
        )
        queries = tuple(head for run in runs for head in range(*run))
        stages.append(HeadStage(queries, heads, not stages or stages[-1].kv != heads, share))
    return tuple(stages)


def _stage_runs(whole: HeadShare, per_member: int, group: int) -> list[tuple[list[Heads], list[Heads]]]:
    """List for each stage the query heads of every member, and the KV heads of every member."""
    stages = []
    for first in range(0, whole.num_query, per_member):
        runs = [(start + first, start + first + per_member) for start, _ in whole.query]
        stages.append((runs, [(start // group, (stop - 1) // group + 1) for start, stop in runs]))
    return stages


def _shares_kv(whole: HeadShare, per_member: int, group: int) -> bool:
    """Whether from each stage to the next either all members keep their KV heads or all members change KV heads."""
    kv = [runs for _, runs in _stage_runs(whole, per_member, group)]
    return all(
        before == after or all(a[1] <= b[0] for a, b in zip(before, after, strict=True))
        for before, after in pairwise(kv)
    )


def check_head_degree(
    degree: int, heads: tuple[int, int] | None, route: str, tp: int, level: str = "", ranks: int | None = None
) -> None:
    """Raise `SpecError` unless `degree` divides the query heads of `heads`, which are counted after `tp`.

    For a two-level route, `level` ("inner" or "outer") is the level of `degree`, and `ranks` the CP degree.
    """
    if heads is None:
        raise SpecError(f"route {route!r} exchanges heads, but heads is not given", hint="set heads=(query, KV)")
    num_q = heads[0]
    if num_q % degree == 0:
        return
    # Name tensor parallelism as the cause if the degree divides the heads before tp.
    blame = f" ({num_q * tp} before tp={tp})" if tp > 1 and num_q * tp % degree == 0 else ""
    what, shared = f"{level} ulysses".strip(), gcd(num_q, degree)
    if ranks is None:
        ways = [f"use a {what} degree of {_any_of(_divisors(num_q))}"]
    else:
        inner = [n if level == "inner" else ranks // n for n in _divisors(gcd(num_q, ranks))]
        ways = [f"set inner={_any_of(sorted(inner))}"]
    if blame:
        ways.append("lower tp")
    if ranks is None and shared > 1:
        ways.append(f'keep {degree} ranks by route="usp" with inner={shared} (ulysses inside, ring outside)')
    raise SpecError(
        f"{what} degree {degree} does not divide {num_q} query heads{blame} ({heads[1]} KV heads)",
        hint=f'{"; ".join(ways)}; or route="ring"',
    )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _any_of(numbers: list[int]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last


def places_of(layout: Layout, merged: Layout, rank: int) -> tuple[Place, ...]:
    """List the places of a rank's spans in the shard of `merged` that holds them."""
    places, row = [], 0
    for _, start, stop in layout.spans[layout.spans[:, 0] == rank].tolist():
        slot, first = merged.find(start)
        rows = -((start - stop) // layout.step)
        places.append(Place(row, row + rows, slot + (start - first) // merged.step, layout.step // merged.step))
        row += rows
    return tuple(places)


def _blocks(query: Heads, kv: Heads, group: int) -> tuple[tuple[Heads, Heads], ...]:
    """Cut a member's heads into ranges in which all KV heads serve equally many query heads: usually 1 range, at most 3."""
    served = [(c, min(query[1], (c + 1) * group) - max(query[0], c * group)) for c in range(*kv)]
    blocks, q, k = [], 0, 0
    for count, run in groupby(served, key=lambda pair: pair[1]):
        num = len(list(run))
        blocks.append(((q, q + num * count), (k, k + num)))
        q, k = q + num * count, k + num
    return tuple(blocks)
