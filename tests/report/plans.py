"""Plans that the tests of report/ share, and the rank of every pair worked out from the dense mask."""

import numpy as np

from longspan.names import ROUTES
from longspan.plan import Layout, Mask, Plan, plan_attention

MASKS = {
    "causal": Mask.causal(24),
    "full": Mask.full(24),
    "window": Mask.causal(24, window=5),
    "two-sided window": Mask.documents([24], causal=False, window=4),
    "documents": Mask.documents([7, 1, 12, 4]),
    "full documents": Mask.documents([9, 15], causal=False),
    "prefix": Mask.prefix(24, 6),
    "shared prefix": Mask.shared_prefix(6, [5, 0, 9, 4]),
    "bands with blind queries": Mask.bands(24, [(3, 9, 0, 20, 2, 7), (12, 24, 10, 14, None, None)]),
}


LEVELS = {name: kind.heads for name, kind in ROUTES.items()}
"""At which level each route exchanges heads."""


def make(
    layout: str,
    mask: Mask,
    ranks: int,
    slots: int | None = None,
    heads: tuple[int, int] | None = None,
    route: str = "ring",
    comm_dtype: str | None = None,
) -> Plan:
    """Routes of two levels have an inner degree of 2."""
    inner = 2 if LEVELS[route] in ("inner", "outer") else None
    shards = Layout.named(layout, mask.seq_len, ranks, slots)
    return plan_attention(shards, mask, route, heads, inner, comm_dtype=comm_dtype)


def groups(plan: Plan) -> list[list[int]]:
    """Ranks that compute the same pairs, by the names of the routes alone."""
    ranks = list(range(plan.ranks))
    match LEVELS[plan.route]:
        case "none":
            return [[rank] for rank in ranks]
        case "all":
            return [ranks]
        case "inner":
            return [ranks[first : first + 2] for first in ranks[::2]]
        case "outer":
            return [ranks[first::2] for first in range(2)]


def owners(layout: Layout) -> np.ndarray:
    """The rank that holds each token."""
    owner = np.full(layout.seq_len, -1)
    for rank in range(layout.ranks):
        positions = layout.positions(rank)
        owner[positions[positions >= 0]] = rank
    return owner
