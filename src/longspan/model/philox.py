"""Counter-based random numbers: a number depends only on its index, not on earlier draws or on the rank.
Weights and dropout masks are therefore the same however a tensor or a sequence is sharded.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw, 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3) maps a
counter of four 32-bit words and a key of two words to four random words.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from longspan.errors import SpecError
from longspan.model.chunks import chunk_elements

Word = Tensor | int
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
MASK = 2**32 - 1


def normal(
    shape: Sequence[int],
    region: Sequence[slice],
    *,
    seed: int,
    name: str,
    std: float,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the values in `region` of a tensor of `shape` drawn from normal(0, std).

    region: for each dim a slice with start and stop in the global tensor. An element depends only on `seed`, `name` and
    its flat index in the global tensor (below 2**63), so any split into regions gives the same numbers. Numbers are computed
    in fp64 by the transform of Box and Muller (1958) and rounded to `dtype` at the end; none exceeds 6.8 std.
    For the size of temporaries see `chunk_elements`. Raises SpecError: a region outside the shape.
    """
    bounds = _bounds(shape, region)
    sizes = [stop - start for start, stop in bounds]
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    # A run is a contiguous range of elements: the trailing dims that are taken in full, and the dim before these.
    dim = max((d for d in range(1, len(shape)) if sizes[d] != shape[d]), default=0)
    outer, length = sizes[:dim], math.prod(sizes[dim:])
    base = sum(start * stride for (start, _), stride in zip(bounds, strides, strict=True))
    out = torch.empty(math.prod(outer), length, dtype=dtype, device=device)
    key = _key(seed, name)
    for runs, part in _pieces(math.prod(outer), length, chunk_elements(out.device.type)):
        run = torch.arange(runs.start, runs.stop, device=out.device)
        first = torch.full_like(run, base + part.start)
        for size, stride in zip(reversed(outer), reversed(strides[:dim]), strict=True):
            first += run % size * stride
            run //= size
        out[runs, part] = _normals(first, part.stop - part.start, key) * std
    return out.view(sizes)


def keep(tokens: Tensor, hidden_size: int, p: float, *, seed: int, site: int) -> Tensor:
    """Return which elements survive dropout: bool (*tokens.shape, hidden_size), True with probability 1 - p.

    tokens: global token numbers, int64, not negative. An element depends only on `seed` (below 2**64), `site` (below
    2**32; one for each dropout module), its token's number and its feature index. p is rounded to steps of 2**-32. Temporaries
    take about 18 bytes per element. Raises SpecError: p outside [0, 1), or seed or site out of range.
    """
    check_keep(p, seed, site)
    blocks = torch.arange(-(-hidden_size // 4), device=tokens.device)
    low, high = (tokens & MASK).unsqueeze(-1), (tokens >> 32).unsqueeze(-1)
    words = philox(blocks, low, high, site, key=(seed & MASK, seed >> 32))
    threshold = round(p * 2**32)
    return torch.stack([word >= threshold for word in words], -1).flatten(-2)[..., :hidden_size]


def check_keep(p: float, seed: int, site: int) -> None:
    """Raise SpecError if `p`, `seed` or `site` is out of range for `keep`."""
    if not 0 <= p < 1:
        raise SpecError(
            f"dropout {p} is outside [0, 1)", hint="p is the probability of dropping an element; p=0 turns dropout off"
        )
    if not 0 <= seed < 2**64 or not 0 <= site < 2**32:
        raise SpecError(f"seed {seed} must be in [0, 2**64) and site {site} in [0, 2**32)")


def philox(
    c0: Tensor, c1: Word, c2: Tensor, c3: Word, *, key: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four random words for each counter (c0, c1, c2, c3). Words are in [0, 2**32); tensors of words are int64.

    Uses integer operations that every device has: torch 2.13 has no CPU kernel of `aten::_philox_uniform` and similar.
    """
    k0, k1 = key
    for _ in range(ROUNDS):
        # A product of two words takes 64 bits and may wrap into the sign bit. An arithmetic shift copies that bit; `_mix`
        # masks the copies. c1 and c3 keep their high bits until they are mixed into c0 and c2.
        left, right = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = _mix(right, c1, k0), right, _mix(left, c3, k1), left
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK, (k1 + KEY_STEPS[1]) & MASK
    return c0, c1 & MASK, c2, c3 & MASK  # type: ignore[return-value]


def _mix(product: Tensor, word: Word, key: int) -> Tensor:
    return ((product >> 32) ^ word ^ key) & MASK


def _normals(first: Tensor, width: int, key: tuple[int, int]) -> Tensor:
    """Return standard normal numbers (rows, width) in fp64, for flat indices that count up from `first` (rows,)."""
    shift = (first & 3)[:, None]
    # Maximum of 4-word counters that a row covers: a row may start at a counter's last word.
    blocks = (first >> 2)[:, None] + torch.arange((width + 6) // 4, device=first.device)
    # In (0, 1), without the ends: log(0) does not occur.
    u = [(word + 0.5) * 2.0**-32 for word in map(Tensor.double, philox(blocks & MASK, 0, blocks >> 32, 0, key=key))]
    radius = [x.log().mul_(-2).sqrt_() for x in (u[0], u[2])]
    angle = [x * (2 * math.pi) for x in (u[1], u[3])]
    pairs = [r * turn(a) for r, a in zip(radius, angle, strict=True) for turn in (torch.cos, torch.sin)]
    return torch.stack(pairs, -1).flatten(1).gather(1, shift + torch.arange(width, device=first.device))


def _key(seed: int, name: str) -> tuple[int, int]:
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def _pieces(num_runs: int, length: int, size: int) -> Iterator[tuple[slice, slice]]:
    """Split (num_runs, length) into pieces of about `size` elements."""
    width = min(length, size)
    height = max(1, size // (width + 6))
    for row in range(0, num_runs, height):
        for column in range(0, length, max(1, width)):
            yield slice(row, min(row + height, num_runs)), slice(column, min(column + width, length))


def _bounds(shape: Sequence[int], region: Sequence[slice]) -> list[tuple[int, int]]:
    bounds = [(part.start, part.stop) for part in region if part.step in (None, 1)]
    if len(bounds) != len(shape) or not all(0 <= a <= b <= size for (a, b), size in zip(bounds, shape, strict=True)):
        raise SpecError(
            f"region {tuple(region)} does not lie in a tensor of shape {tuple(shape)}",
            hint="for each dim give slice(start, stop) with 0 <= start <= stop <= size",
        )
    return bounds
