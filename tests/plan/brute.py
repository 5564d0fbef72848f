"""Plans worked out by brute force: each row followed from rank to rank, each pair counted one by one."""

from dataclasses import dataclass, field

import numpy as np

from longspan.plan import Plan


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
    """What happened when every rank carried out its share."""

    pairs: np.ndarray
    """How often each global (query, key) was computed."""
    pairs_by_rank: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    seen_home: np.ndarray | None = None
    """For each key how many pairs its owner has gradients of, when backward has ended."""


def carry_out(plan: Plan, direction: int) -> Run:
    """Forward and backward of all ranks, moving global key numbers and pair counts by the plan's transfers alone."""
    layout, P, S = plan.layout, plan.ranks, plan.seq_len
    shares = [plan.rank_plan(rank) for rank in range(P)]
    steps = [{step.source: step for step in share.steps} for share in shares]
    keys = [{rank: layout.positions(rank)} for rank in range(P)]
    run = Run(np.zeros((S, S), dtype=int))
    run.received = [0] * P
    for distance in range(1, P):
        for rank in range(P):
            source = (rank - direction * distance) % P
            before = (rank - direction) % P
            step, sender = steps[rank].get(source), steps[before].get(source)
            sends = sender is not None and sender.send is not None
            assert (step is not None and step.recv is not None) == sends
            if sends:
                assert (sender.send.peer, step.recv.peer) == (rank, before)
                rows = pick(keys[before][source], sender.send.runs)
                assert step.recv.runs == ((0, step.rows),)
                assert len(rows) == step.rows == sender.send.rows
                keys[rank][source] = rows
                run.received[rank] += len(rows)
            elif step is not None:
                assert step.rows == 0
                keys[rank][source] = np.zeros(0, dtype=int)
    partial = [{s: np.zeros(step.rows, dtype=int) for s, step in steps[rank].items()} for rank in range(P)]
    for rank in range(P):
        total = 0
        for source, step in steps[rank].items():
            for tile in step.tiles:
                seen = visible(tile)
                assert seen.any(axis=1).all()
                assert seen.any(axis=0).all()
                queries, columns = layout.positions(rank)[tile.q0 : tile.q1], keys[rank][source][tile.k0 : tile.k1]
                assert (queries >= 0).all()
                assert (columns >= 0).all()
                run.pairs[np.ix_(queries, columns)] += seen
                partial[rank][source][tile.k0 : tile.k1] += seen.sum(axis=0)
                total += int(seen.sum())
        run.pairs_by_rank.append(total)
    _bring_home(steps, partial, direction)
    run.seen_home = np.zeros(S, dtype=int)
    for rank in range(P):
        positions = layout.positions(rank)
        run.seen_home[positions[positions >= 0]] = partial[rank][rank][positions >= 0]
        assert not partial[rank][rank][positions < 0].any()
    return run


def _bring_home(steps, partial, direction: int) -> None:
    P = len(steps)
    for distance in range(1, P):
        for rank in range(P):
            source = (rank - direction * distance) % P
            before = (rank - direction) % P
            step, sender = steps[rank].get(source), steps[before].get(source)
            onward = sender.grad_send if sender is not None and distance > 1 else None
            arriving = step.grad_recv if step is not None else None
            assert (onward is None) == (arriving is None)
            if onward is not None:
                assert (onward.peer, arriving.peer, onward.rows) == (rank, before, arriving.rows)
                place(partial[rank][source], arriving.runs, pick(partial[before][source], onward.runs))
            homing = step.home_send if step is not None else None
            # The owner's own step at this distance has the buffer of yet another rank; only `home_recv` matters there.
            own_step = steps[source].get((source - direction * distance) % P)
            expected = own_step.home_recv if own_step is not None else None
            assert (homing is None) == (expected is None)
            if homing is not None:
                assert (homing.peer, expected.peer, homing.rows) == (source, rank, expected.rows)
                place(partial[source][source], expected.runs, pick(partial[rank][source], homing.runs))


def pick(rows: np.ndarray, runs) -> np.ndarray:
    return np.concatenate([rows[start:stop] for start, stop in runs])


def place(target: np.ndarray, runs, rows: np.ndarray) -> None:
    index = np.concatenate([np.arange(start, stop) for start, stop in runs])
    target[index] += rows
