"""Stage 2, attention: `longspan.attention` on one rank against plain SDPA, by sequence length."""

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.device.case import Attend, Case, both
from benchmarks.device.clock import peak_mib, times
from benchmarks.device.flops import attention_flops, speed
from benchmarks.device.rows import Check, Figures, Options
from longspan import Layout, attention, plan_attention
from longspan.kernels.choice import KERNELS, choose_kernel

SLOW = ("flex", "reference")
"""Timed only if selected by name: "flex" compiles dozens of graphs, "reference" is plain math."""


def cases(options: Options) -> Iterator[Case]:
    """Yield causal cases by length, and packed documents, with the heads of Llama 3 8B. Yields lazily, to save memory."""
    device, many = torch.device(options.device), (4096, 1, 12287, 2000, 14384)
    shape: tuple[tuple[int, int], int, str, torch.device] = ((32, 8), 128, "bfloat16", device)
    rows: list[tuple[int, ...]] = [(4096,), (16384,), many, (65536,), (131072,)]
    if options.quick:
        shape, rows = ((4, 2), 32, "float32", device), [(256,), (512,), (200, 1, 311)]
    elif options.device == "cpu":
        shape, rows = ((8, 2), 64, "float32", device), [(2048,), (4096,), (1024,) * 8, (8192,)]
    for lengths in rows:
        yield Case(lengths, *shape)


def checks(options: Options) -> Iterator[Check]:
    """Yield a check of each case with each kernel; "absent" for kernels that refuse the case."""
    names = options.kernels or [name for name in KERNELS if name not in SLOW]
    for case in cases(options):
        q, k, v = (x[:, :, :1] for x in case.inputs[:3])
        for name in names:
            title = f"{name} {case}"
            if (reason := KERNELS[name].refusal(q, k, v)) is not None:
                yield Check.absent(title, reason)
            else:
                attend = one_rank(case, name)
                yield Check(title, partial(case.error, attend), partial(_measure, case, name, attend, options.quick))


def one_rank(case: Case, kernel: str = "auto") -> Attend:
    """Return longspan's attention over the unsharded sequence on one rank."""
    plan = plan_attention(Layout.zigzag(case.seq_len, 1), case.mask)
    return partial(attention, plan=plan, kernel=kernel)


def _measure(case: Case, name: str, attend: Attend, quick: bool) -> Figures:
    def forward(attend: Attend) -> None:
        with torch.no_grad():
            attend(*case.inputs[:3])

    runs = {"ours": both(attend, case.inputs), "sdpa": both(case.sdpa, case.inputs)}
    total = times(runs, case.device, quick)
    alone = times({"ours": partial(forward, attend), "sdpa": partial(forward, case.sdpa)}, case.device, quick)
    flops = attention_flops(case.mask.area, case.heads[0], case.head_dim)
    return {
        "seq_len": case.seq_len,
        "kernel": name,
        "documents": len(case.lengths),
        "forward_ms": alone["ours"],
        "both_ms": total["ours"],
        "auto_takes": choose_kernel("auto", *case.inputs[:3]).name,
        "over_sdpa": total["ours"] / total["sdpa"],
        **speed(flops, total["ours"], case.device, case.inputs[0].dtype),
        "peak_mib": peak_mib(runs["ours"], case.device),
        "sdpa_forward_ms": alone["sdpa"],
        "sdpa_both_ms": total["sdpa"],
        **{
            f"sdpa_{key}": value
            for key, value in speed(flops, total["sdpa"], case.device, case.inputs[0].dtype).items()
        },
        "sdpa_peak_mib": peak_mib(runs["sdpa"], case.device),
        "sdpa_backend": case.backend,
    }
