"""Plans worked out by brute force: each row followed from rank to rank, each pair counted one by one."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from longspan.plan import Layout, Plan, RankPlan, Stage, Step, Transfer


def owners(layout) -> np.ndarray:
    """The rank of every token."""
    owner = np.full(layout.seq_len, -1)
    for rank in range(layout.ranks):
        positions = layout.positions(rank)
        owner[positions[positions >= 0]] = rank
    return owner


def needed_distances(layout, dense: np.ndarray, direction: int) -> list[list[int]]:
    """For each key the distances along `direction` of the other ranks whose queries see it, ascending."""
    owner = owners(layout)
    found = []
    for key in range(layout.seq_len):
        ranks = set(owner[np.flatnonzero(dense[:, key])].tolist()) - {int(owner[key])}
        found.append(sorted((rank - int(owner[key])) * direction % layout.ranks for rank in ranks))
    return found


def visible(tile) -> np.ndarray:
    """Which pairs of the tile are seen, `(rows, columns)`."""
    away = np.arange(tile.q0, tile.q1)[:, None] - np.arange(tile.k0, tile.k1)[None, :]
    return (away >= tile.lo) & (away <= tile.hi)


@dataclass
class Run:
    """What happened when every rank carried out its share; ranks are those that work on the same heads."""

    pairs: np.ndarray
    """How often each global (query, key) was computed."""
    home: np.ndarray
    """How often the gradient of each (query, key) has come to the key's owner when backward has ended."""
    pairs_by_rank: list[int]
    arrived: list[list[int]]
    """Keys that came to each rank in forward, in the order in which they came."""


def carry_out(plan: Plan, member: int = 0) -> Run:
    """Forward and backward of the ranks that are `member` of their group of heads, by the plan's stages alone.

    Every rank posts what its plan says, in the executor's order, and goes on when others have posted their side of it.
    """
    degrees, S = plan.degrees, plan.seq_len
    shares = [plan.rank_plan(degrees.members(group)[member]) for group in range(degrees.rows)]
    for share in shares:
        assert share.ranks == tuple(other.rank for other in shares)
    layout = plan.layout if shares[0].heads is None else plan.layout.merged(degrees.heads, degrees.adjacent)
    run = Run(np.zeros((S, S), dtype=int), np.zeros((S, S), dtype=int), [], [])
    for backward in (False, True):
        mail, ranks = Mail(), [_Rank(place, share, layout) for place, share in enumerate(shares)]
        mail.exchange([rank.carry_out(mail, backward) for rank in ranks])
        if backward:
            for rank in ranks:
                live = rank.positions >= 0
                run.home[:, rank.positions[live]] += rank.home[live].T
                assert not rank.home[~live].any(), "a dead slot has a gradient"
        else:
            for rank in ranks:
                run.pairs += rank.pairs
                run.pairs_by_rank.append(int(rank.pairs.sum()))
                run.arrived.append(rank.arrived)
    return run


class Mail:
    """Messages of all ranks. The n-th that a rank posts to another is the n-th that this one awaits from it.

    In a collective it is what the two posted in their n-th, and nobody is through before all have posted it.
    """

    def __init__(self) -> None:
        self.sent: dict[tuple, list] = defaultdict(list)
        self.awaited: dict[tuple, list] = defaultdict(list)
        self.collectives: dict[int, int] = defaultdict(int)

    def post(self, hop: "Posted", collective: bool) -> "Posted":
        turn = None
        if collective:
            turn = self.collectives[hop.rank]
            self.collectives[hop.rank] += 1
        for kind, transfer, content in hop.sends:
            channel = (hop.rank, transfer.peer, turn)
            hop.waits.append((self.awaited, channel, len(self.sent[channel])))
            self.sent[channel].append((kind, transfer.by_head, content))
        for kind, transfer, arrive in hop.receives:
            channel = (transfer.peer, hop.rank, turn)
            hop.arrivals.append((channel, len(self.awaited[channel]), arrive))
            hop.waits.append((self.sent, channel, len(self.awaited[channel])))
            self.awaited[channel].append((kind, transfer.by_head))
        hop.turn = turn
        return hop

    def through(self, hop: "Posted", ranks: int) -> bool:
        if hop.turn is not None and sum(count > hop.turn for count in self.collectives.values()) < ranks:
            return False
        return all(len(posted[channel]) > number for posted, channel, number in hop.waits)

    def deliver(self, hop: "Posted") -> None:
        for channel, number, arrive in hop.arrivals:
            kind, by_head, content = self.sent[channel][number]
            assert (kind, by_head) == self.awaited[channel][number], (
                f"{channel}: one sends what the other does not await"
            )
            arrive(content)

    def exchange(self, ranks: Sequence[Iterator["Posted"]]) -> None:
        """Let ranks go on, each up to the next hop it has to wait for, until all are done."""
        waiting = {number: next(rank, None) for number, rank in enumerate(ranks)}
        while any(hop is not None for hop in waiting.values()):
            ready = [n for n, hop in waiting.items() if hop is not None and self.through(hop, len(ranks))]
            assert ready, f"nobody can go on: {waiting}"
            for number in ready:
                self.deliver(waiting[number])
                waiting[number] = next(ranks[number], None)
        for channel in {*self.sent, *self.awaited}:
            assert len(self.sent[channel]) == len(self.awaited[channel]), f"{channel}: a message nobody awaits"
        assert len(set(self.collectives.values())) <= 1, f"other numbers of collectives: {dict(self.collectives)}"


@dataclass
class Posted:
    """A hop: `(kind, transfer, rows)` that leave, and `(kind, transfer, what to do with rows)` that arrive."""

    rank: int
    sends: list[tuple[str, Transfer, np.ndarray]] = field(default_factory=list)
    receives: list[tuple[str, Transfer, Callable[[np.ndarray], None]]] = field(default_factory=list)
    waits: list[tuple] = field(default_factory=list)
    arrivals: list[tuple] = field(default_factory=list)
    turn: int | None = None


class _Rank:
    """One rank: numbers of keys in place of their rows, and in place of their gradients how often each query is in them."""

    def __init__(self, rank: int, share: RankPlan, layout: Layout) -> None:
        self.rank, self.share, self.positions = rank, share, layout.positions(rank)
        S = layout.seq_len
        self.pairs, self.arrived = np.zeros((S, S), dtype=int), []
        self.home = np.zeros((len(self.positions), S), dtype=int)

    def carry_out(self, mail: Mail, backward: bool) -> Iterator[Posted]:
        """Yields every hop that must be through before this rank goes on."""
        stages, collective = self.share.stages, self.share.means == "collective"
        own, partial = stages[0].steps[0], [self.home]
        assert (own.source, own.rows, own.recv) == (self.rank, len(self.positions), None)
        buffers, onward, homeward = [self.positions], Posted(self.rank), Posted(self.rank)
        for number, (stage, following) in enumerate(zip(stages, [*stages[1:], None], strict=True)):
            hop, arriving = Posted(self.rank), {}
            leaving = buffers[0] if self.share.relays else self.positions
            hop.sends = [("rows", t, pick(leaving, t.runs)) for t in stage.sends]
            for index, step in enumerate(following.steps if following else ()):
                arriving[index] = np.zeros(0, dtype=int)
                if step.recv:
                    hop.receives.append(("rows", step.recv, self._into(arriving, index, step)))
                else:
                    assert step.rows == 0, "a buffer that nobody fills"
            mail.post(hop, collective and following is not None)
            if not backward:
                for step, keys in zip(stage.steps, buffers, strict=True):
                    self._compute(step, keys, self.pairs)
            elif number == 0:
                partial = self._make_room(onward, following)
                mail.post(onward, False)
            else:
                yield onward
                for step, keys, gradients in zip(stage.steps, buffers, partial, strict=True):
                    self._compute(step, keys, gradients=gradients)
                yield homeward
                onward, homeward = Posted(self.rank), Posted(self.rank)
                for step, gradients in zip(stage.steps, partial, strict=True):
                    for posted, kind, t in ((onward, "onward", step.grad_send), (homeward, "home", step.home_send)):
                        if t:
                            posted.sends.append((kind, t, pick(gradients, t.runs)))
                partial = self._make_room(onward, following)
                mail.post(onward, collective and following is not None)
                for t in stage.home_recvs:
                    homeward.receives.append(("home", t, add_to(self.home, t)))
                mail.post(homeward, collective)
            yield hop
            buffers = [arriving[index] for index in sorted(arriving)]
        if backward:
            yield onward
            self._compute(own, self.positions, gradients=self.home)
            yield homeward

    def _into(self, buffers, index: int, step: Step) -> Callable[[np.ndarray], None]:
        def arrive(keys: np.ndarray) -> None:
            assert step.recv.runs == ((0, step.rows),)
            assert len(keys) == step.rows == step.recv.rows > 0
            buffers[index] = keys
            self.arrived += keys.tolist()

        return arrive

    def _make_room(self, onward: Posted, following: Stage | None) -> list[np.ndarray]:
        room = []
        for step in following.steps if following else ():
            room.append(np.zeros((step.rows, self.home.shape[1]), dtype=int))
            if step.grad_recv:
                onward.receives.append(("onward", step.grad_recv, add_to(room[-1], step.grad_recv)))
        return room

    def _compute(self, step: Step, keys: np.ndarray, pairs=None, gradients=None) -> None:
        for tile in step.tiles:
            seen = visible(tile)
            assert seen.any(axis=1).all(), "a query of a tile sees nothing"
            assert seen.any(axis=0).all(), "a key of a tile is not seen"
            queries, columns = self.positions[tile.q0 : tile.q1], keys[tile.k0 : tile.k1]
            assert (queries >= 0).all(), "a dead slot is a query"
            assert (columns >= 0).all(), "a dead slot is a key"
            if pairs is not None:
                pairs[np.ix_(queries, columns)] += seen
            else:
                gradients[tile.k0 : tile.k1, queries] += seen.T


def check_transfers(plan: Plan) -> None:
    """Runs ascend and never touch; nobody sends to itself."""
    for rank in range(plan.ranks):
        share = plan.rank_plan(rank)
        here = share.ranks.index(rank)
        for stage in share.stages:
            transfers = [*stage.sends, *stage.home_recvs]
            transfers += [
                t for step in stage.steps for t in (step.recv, step.grad_recv, step.grad_send, step.home_send)
            ]
            for transfer in transfers:
                if transfer is not None:
                    runs = np.array(transfer.runs)
                    assert transfer.peer != here
                    assert (runs[:, 0] < runs[:, 1]).all()
                    assert (runs[1:, 0] > runs[:-1, 1]).all()


def pick(rows: np.ndarray, runs) -> np.ndarray:
    return np.concatenate([rows[start:stop] for start, stop in runs])


def add_to(target: np.ndarray, transfer: Transfer) -> Callable[[np.ndarray], None]:
    """Adds rows that arrive to those of the transfer's runs."""

    def arrive(rows: np.ndarray) -> None:
        index = np.concatenate([np.arange(start, stop) for start, stop in transfer.runs])
        assert len(rows) == transfer.rows
        target[index] += rows

    return arrive
