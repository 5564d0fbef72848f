"""A short check of all that runs on one device: each kernel on each kind of tile, and attention on one rank, by plain math.

    python -m benchmarks.device [--device cuda] [--kernel flex]

Prints a line for each check and ends with an error if one fails. Nothing is timed but the last line.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import click
import torch

from longspan import Layout, Mask, attention, plan_attention, record
from longspan.attention.kernel import KERNELS, Launch, launches
from longspan.attention.merge import merge_
from longspan.attention.scores import ScoreChange
from longspan.plan import Tile

HEADS, KV_HEADS, DIM, SCALE = 8, 2, 64, 0.125
TILES = {
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
LIMIT = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 1e-4}
"""Of the greatest difference from fp64, over the tensor's greatest value."""


@click.command(help=__doc__)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--kernel", "kernels", type=click.Choice(list(KERNELS)), multiple=True, help="These alone.")
def main(device: str, kernels: tuple[str, ...]) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise click.ClickException("there is no GPU here: --device cpu checks the kernels that a CPU has")
    found = list(_checks(torch.device(device), kernels))
    click.echo(f"{sum(found)} of {len(found)} checks hold")
    sys.exit(not found or not all(found))


def _checks(device: torch.device, kernels: tuple[str, ...] = ()) -> Iterator[bool]:
    """`kernels` alone, or all and attention by what "auto" takes."""
    torch.manual_seed(0)
    for name in kernels or KERNELS:
        yield from _of_kernel(name, device)
    if not kernels:
        yield from _of_attention(device)


def _of_kernel(name: str, device: torch.device) -> Iterator[bool]:
    ends = [sum(DOCUMENTS[:n]) for n in range(len(DOCUMENTS) + 1)]
    work = {kind: [band] for kind, band in TILES.items()} | {
        "documents": [(a, b, a, b, 0, None) for a, b in pairwise(ends)]
    }
    for dtype in LIMIT:
        x = torch.zeros(1, 2, 8, DIM, dtype=dtype, device=device)
        if (reason := KERNELS[name].refusal(x, x, x)) is not None:
            click.echo(f"{name} {_short(dtype)}: not here: {reason}")
            continue
        for kind, bands in work.items():
            yield _told(f"{name} {_short(dtype)} {kind}", lambda b=bands, d=dtype: _tile(name, b, d, device))
        for kind, change in CHANGES.items():
            if KERNELS[name].refusal(x, x, x, change) is None:
                check = lambda c=change, d=dtype: _tile(name, work["window"], d, device, c)  # noqa: E731
                yield _told(f"{name} {_short(dtype)} {kind}", check)


def _of_attention(device: torch.device) -> Iterator[bool]:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    for kind, mask in (
        ("causal", Mask.causal(1000)),
        ("documents, window 90", Mask.documents([600, 399, 1], window=90)),
    ):
        yield _told(f"attention {_short(dtype)} {kind}", lambda m=mask: _attention(m, dtype, device))
    yield _told(f"attention {_short(dtype)} compiled", lambda: _compiled(dtype, device))


def _told(name: str, check: Callable[[], float]) -> bool:
    """Run one check: the greatest error over what it may be."""
    try:
        error = check()
    except Exception as problem:  # a check that raises has failed, and the others go on
        click.echo(f"FAILS  {name}: {type(problem).__name__}: {str(problem).splitlines()[0]}")
        return False
    click.echo(f"{'holds' if error <= 1 else 'FAILS'}  {name}: {error:.2f} of the limit")
    return error <= 1


def _tile(
    name: str, bands: list[tuple], dtype: torch.dtype, device: torch.device, change: ScoreChange | None = None
) -> float:
    """Tiles by a kernel on the device, against the reference kernel in fp64 on the CPU."""
    tiles = [Tile(*Mask.bands(max(b[1], b[3]), [b]).array[0].tolist()) for b in bands]
    rows, keys = max(t.q1 for t in tiles), max(t.k1 for t in tiles)
    exact = [torch.randn(1, h, n, DIM, dtype=torch.float64).to(dtype).double() for h, n in
             ((HEADS, rows), (HEADS, rows), (KV_HEADS, keys), (KV_HEADS, keys))]  # fmt: skip
    return max(_errors(name, tiles, exact, dtype, device, change)) / LIMIT[dtype]


def _errors(
    name: str, tiles: list[Tile], exact: list[torch.Tensor], dtype: torch.dtype, device: torch.device,
    change: ScoreChange | None,
) -> Iterator[float]:  # fmt: skip
    right = _run("reference", tiles, exact, change)
    got = _run(name, tiles, [x.to(device, dtype) for x in exact], change)
    for a, b in zip(got, right, strict=True):
        yield (
            (a.double().cpu() - b).abs().max() / b.abs().max().clamp_min(1e-2)
        ).item()  # one key alone has no gradient


def _run(name: str, tiles: list[Tile], x: list[torch.Tensor], change: ScoreChange | None) -> list[torch.Tensor]:
    """out, lse of all tiles, and dq, dk, dv summed."""
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
        parts = kernel.backward(
            dout[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], final[:, :, rows], lse[:, :, rows],
            launch.shapes, SCALE, _at(change, launch, q.device),
        )  # fmt: skip
        for total, part, where in zip(grads, parts, (rows, keys, keys), strict=True):
            total[:, :, where] += part
    return [out, lse.masked_fill(lse == -math.inf, 0.0), *grads]


def _at(change: ScoreChange | None, launch: Launch, device: torch.device) -> ScoreChange | None:
    """The change on the device, and where the rows and keys of a call are on the token axis."""
    if change is None or change.slopes is None:
        return change
    rows, keys = (torch.arange(*ends, device=device) for ends in ((launch.q0, launch.q1), (launch.k0, launch.k1)))
    return replace(change, slopes=change.slopes.to(device), rows=rows, keys=keys)


def _attention(mask: Mask, dtype: torch.dtype, device: torch.device) -> float:
    """The public call on one rank, forward and backward, beside the same in fp64 on the CPU."""
    exact = [torch.randn(1, h, mask.seq_len, DIM).to(dtype).double() for h in (HEADS, HEADS, KV_HEADS, KV_HEADS)]
    plan = plan_attention(Layout.zigzag(mask.seq_len, 1), mask)
    results = []
    for given in (exact, [x.to(device, dtype) for x in exact]):
        dout, *qkv = given
        qkv = [x.requires_grad_() for x in qkv]
        with record() as calls:
            out = attention(*qkv, plan=plan)
            out.backward(dout)
        assert [call.pairs for call in calls] == [mask.area] * 2
        assert all(call.seconds_kernels >= 0 for call in calls)
        results.append([out.detach().double().cpu(), *(x.grad.double().cpu() for x in qkv)])
    return max(((a - b).abs().max() / b.abs().max()).item() for b, a in zip(*results, strict=True)) / LIMIT[dtype]


def _compiled(dtype: torch.dtype, device: torch.device) -> float:
    """Attention inside compiled code beside the same run eagerly; and how long one call takes."""
    from longspan import ContextParallel

    mask = Mask.causal(4096)
    q, k, v = (torch.randn(1, h, 4096, DIM, dtype=dtype, device=device) for h in (HEADS, KV_HEADS, KV_HEADS))
    with ContextParallel(None).sequence(mask) as sequence:

        def block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return sequence.attention(q * 2, k, v).relu()

        eager, compiled = block(q, k, v), torch.compile(block, fullgraph=True, dynamic=False)
        error = (compiled(q, k, v) - eager).abs().max() / eager.abs().max()
        began = time.perf_counter()
        compiled(q, k, v).sum().item()
    click.echo(f"       one call at 4,096 tokens: {1e3 * (time.perf_counter() - began):.2f} ms")
    return error.item() / LIMIT[dtype]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    main()
