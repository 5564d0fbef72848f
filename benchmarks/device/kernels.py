"""Stage 1: each kernel on each kind of tile, in each dtype, against the reference kernel in fp64 on the CPU."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F

from benchmarks.device.errors import of_limit
from benchmarks.device.rows import Check, Options
from longspan import Mask
from longspan.cp.engine.merge import merge_
from longspan.kernels.choice import KERNELS
from longspan.kernels.protocol import BackwardInputs, Launch, launches
from longspan.kernels.scores import ScoreChange
from longspan.plan import Tile
from longspan.plan.mask import Band

Tensor = torch.Tensor
HEADS, KV_HEADS, DIM, SCALE = 8, 2, 64, 0.125
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TILES: dict[str, Band] = {
    "full": (0, 300, 0, 500, None, None),
    "causal": (0, 700, 0, 700, 0, None),
    "causal, more keys than rows": (300, 700, 0, 700, 0, None),
    "causal, more rows than keys": (0, 700, 0, 300, 0, None),
    "window": (0, 900, 0, 900, 0, 127),
    "upper trapezoid": (0, 300, 0, 500, None, 60),
    "band to both sides": (0, 500, 100, 600, -90, 110),
    "one row": (4, 5, 0, 9, None, None),
}
DOCUMENTS = [130, 1, 64, 64, 300, 7]
CHANGES = {
    "soft-cap": ScoreChange(2.0),
    "soft-cap and ALiBi": ScoreChange(2.0, torch.tensor([2.0**-n for n in range(HEADS)])),
}


def checks(options: Options) -> Iterator[Check]:
    """Yield the checks of the selected kernels, by default all. `quick` omits bf16 and fp16 of the slow reference kernel."""
    for name in options.kernels or KERNELS:
        for dtype in DTYPES[2:] if options.quick and name == "reference" else DTYPES:
            yield from _of_kernel(name, dtype, torch.device(options.device))


def _of_kernel(name: str, dtype: torch.dtype, device: torch.device) -> Iterator[Check]:
    title = f"{name} {str(dtype).removeprefix('torch.')}"
    x = torch.zeros(1, 2, 8, DIM, dtype=dtype, device=device)
    if (reason := KERNELS[name].refusal(x, x, x)) is not None:
        yield Check.absent(title, reason)
        return
    ends = [sum(DOCUMENTS[:n]) for n in range(len(DOCUMENTS) + 1)]
    documents: list[Band] = [(a, b, a, b, 0, None) for a, b in pairwise(ends)]
    for kind, bands in {**{kind: [band] for kind, band in TILES.items()}, "documents": documents}.items():
        yield Check(f"{title} {kind}", partial(_error, name, bands, dtype, device))
    for kind, change in CHANGES.items():
        if (reason := KERNELS[name].refusal(x, x, x, change)) is not None:
            yield Check.absent(f"{title} {kind}", reason)
        else:
            yield Check(f"{title} {kind}", partial(_error, name, [TILES["window"]], dtype, device, change))


def _error(
    name: str, bands: Sequence[Band], dtype: torch.dtype, device: torch.device, change: ScoreChange | None = None
) -> float:
    """Return the error / limit of out, lse, dq, dk, dv that a kernel computes on the device."""
    mask = Mask.bands(max(max(band[1], band[3]) for band in bands), bands)
    tiles = [Tile(*band) for band in mask.array.tolist()]
    first, rows, keys = min(t.q0 for t in tiles), max(t.q1 for t in tiles), max(t.k1 for t in tiles)
    generator = torch.Generator().manual_seed(0)
    exact = [torch.randn(1, h, n, DIM, generator=generator).to(dtype).double()
             for h, n in ((HEADS, rows), (HEADS, rows), (KV_HEADS, keys), (KV_HEADS, keys))]  # fmt: skip
    given = [x.to(device, dtype) for x in exact]
    got, right = _by_kernel(name, tiles, given, change), _by_kernel("reference", tiles, exact, change)
    plain = _plainly(torch.from_numpy(mask.dense()[first:rows, :keys]).to(device), first, given, change)
    cut = [[x[:, :, first:] if n < 3 else x for n, x in enumerate(results)] for results in (got, right)]
    return of_limit(cut[0], plain, cut[1])


def _by_kernel(name: str, tiles: list[Tile], x: list[Tensor], change: ScoreChange | None) -> list[Tensor]:
    """Return (out, lse, dq) of all query rows, and (dk, dv) summed over the tiles."""
    kernel, (dout, q, k, v) = KERNELS[name], x
    wide = torch.promote_types(q.dtype, torch.float32)
    out, lse = torch.zeros_like(q, dtype=wide), q.new_full(q.shape[:3], -math.inf, dtype=wide)
    for launch in launches(kernel, tiles, q):
        rows = slice(launch.q0, launch.q1)
        part, part_lse = kernel.forward(
            q[:, :, rows], k[:, :, launch.k0 : launch.k1], v[:, :, launch.k0 : launch.k1], launch.shapes, SCALE,
            _at(change, launch, q.device),
        )  # fmt: skip
        merge_(out[:, :, rows], lse[:, :, rows], part, part_lse)
    grads = [torch.zeros_like(t, dtype=wide) for t in (q, k, v)]
    final = out.to(q.dtype)
    for launch in launches(kernel, tiles, q, backward=True):
        rows, keys = slice(launch.q0, launch.q1), slice(launch.k0, launch.k1)
        saved = BackwardInputs(
            dout[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], final[:, :, rows], lse[:, :, rows]
        )
        parts = kernel.backward(saved, launch.shapes, SCALE, _at(change, launch, q.device))
        for total, part, where in zip(grads, parts, (rows, keys, keys), strict=True):
            total[:, :, where] += part
    return [out, lse, *grads]


def _at(change: ScoreChange | None, launch: Launch, device: torch.device) -> ScoreChange | None:
    """Return the score change on the device, with the token indices of the call's rows and keys."""
    if change is None or change.slopes is None:
        return change
    rows, keys = (torch.arange(*ends, device=device) for ends in ((launch.q0, launch.q1), (launch.k0, launch.k1)))
    return replace(change, slopes=change.slopes.to(device), rows=rows, keys=keys)


def _plainly(seen: Tensor, first: int, x: list[Tensor], change: ScoreChange | None) -> list[Tensor]:
    """Return the same from query row `first` on, by SDPA in the same dtype with repeated KV heads. Plain math gives the lse,
    and the result for changed scores, which SDPA does not support."""
    dout, q, k, v = x[0][:, :, first:], x[1][:, :, first:], *x[2:]
    rows, keys = torch.arange(first, first + q.shape[2], device=q.device), torch.arange(k.shape[2], device=q.device)
    group = HEADS // KV_HEADS
    leaves = [t.detach().requires_grad_() for t in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))]
    scores = _changed(leaves[0] @ leaves[1].mT * SCALE, rows[:, None] - keys, change).masked_fill(~seen, -math.inf)
    if change is None:
        out = F.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], attn_mask=seen, scale=SCALE)
    else:
        out = torch.softmax(scores, -1) @ leaves[2]
    dq, *of_keys = torch.autograd.grad(out, leaves, dout)
    wide = torch.promote_types(q.dtype, torch.float32)
    lse = scores.detach().to(wide).logsumexp(-1)
    return [out.detach(), lse, dq, *(grad.unflatten(1, (KV_HEADS, group)).sum(2) for grad in of_keys)]


def _changed(scores: Tensor, away: Tensor, change: ScoreChange | None) -> Tensor:
    if change is None:
        return scores
    if change.softcap is not None:
        scores = change.softcap * torch.tanh(scores / change.softcap)
    if change.slopes is not None:
        scores = scores - (change.slopes.to(scores.device)[:, None, None] * away.abs()).to(scores.dtype)
    return scores
