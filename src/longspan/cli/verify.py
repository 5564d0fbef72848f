"""`longspan verify`: compare training at CP=N with CP=1, as a table or JSON. Exits with 1 if a case fails."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from longspan.cli.exits import friendly
from longspan.cli.options import config_options, spinner
from longspan.train.monitor import json_line
from longspan.train.train_config import ParallelConfig, load_config
from longspan.verify.cut import describe_cut
from longspan.verify.judge import EXACT, Verdict
from longspan.verify.run import verify as run_verification
from longspan.verify.verify_config import VerifyConfig


@click.command()
@config_options
@click.option("--cp", multiple=True, type=int, help="Degree to compare with cp=1; repeatable. Default: from CONFIG.")
@click.option("--layout", multiple=True, help="Layout; repeatable. Default: from CONFIG.")
@click.option("--route", multiple=True, help="Route; repeatable. Default: from CONFIG.")
@click.option(
    "--comm-dtype",
    multiple=True,
    help="Communication dtype: none, bf16 or fp8; repeatable. Default: from CONFIG.",
)
@click.option(
    "--dtype",
    multiple=True,
    help="fp64, fp32, bf16 or fp16; repeatable. Default: fp32, the dtype of CONFIG and, on CPU, fp64.",
)
@click.option("--steps", default=2, show_default=True, help="Number of optimizer steps to replay.")
@click.option("--layers", type=int, help="Cut the model to this many layers, keeping every kind of mask. Default: all.")
@click.option("--tokens", type=int, help="Cut rows to this many tokens. Default: from CONFIG.")
@click.option("--quiet", is_flag=True, help="Print no progress.")
@click.option("--json", "as_json", is_flag=True, help="Print the verdicts as JSON.")
@friendly
def verify(
    config: Path,
    overrides: tuple[str, ...],
    cp: tuple[int, ...],
    layout: tuple[str, ...],
    route: tuple[str, ...],
    comm_dtype: tuple[str, ...],
    dtype: tuple[str, ...],
    steps: int,
    layers: int | None,
    tokens: int | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Replay the first steps of CONFIG at CP=1, with plain SDPA per document, and at each CP degree; compare every
    gradient.

    Exits with 1 if a loss, a gradient norm or the gradient of a parameter exceeds its tolerance, or if a token's
    position or label differs from CP=1.
    """
    run = load_config(config, overrides)
    values = {
        "cp": cp or (run.parallel.cp,),
        "layouts": layout or (run.parallel.layout,),
        "routes": route or (run.parallel.route,),
        "comm_dtypes": [None if name == "none" else name for name in comm_dtype] or (run.parallel.comm_dtype,),
        "dtypes": dtype or None,
        "steps": steps,
        "layers": layers,
        "tokens": tokens,
    }
    cases = VerifyConfig.model_validate(values)
    whole = describe_cut(run, cases)
    with spinner(quiet) as show:
        verdicts = run_verification(run, cases, show)
    failed = sum(not verdict.passed for verdict in verdicts)
    if as_json:
        cut = {name: {"verified": now, "of": before} for name, (now, before) in whole.items()}
        click.echo(json_line({"passed": not failed, "cut": cut, "cases": [asdict(verdict) for verdict in verdicts]}))
    else:
        console = Console(highlight=False, width=None if Console().is_terminal else 160)
        console.print(_table(verdicts, run.parallel))
        console.print(_summary(verdicts) + _cut(whole))
    if failed:
        raise SystemExit(1)


def _summary(verdicts: Sequence[Verdict]) -> str:
    """Count passed cases. A case with a communication dtype may differ from cp=1 within the bounds of rounding."""
    exact = [v.passed for v in verdicts if v.comm_dtype is None]
    rounded = [v.passed for v in verdicts if v.comm_dtype is not None]
    kinds = (
        (exact, "cases equal cp=1"),
        (rounded, "cases with a communication dtype are within the rounding bounds of cp=1"),
    )
    return ", ".join(f"{sum(passed)} of {len(passed)} {what}" for passed, what in kinds if passed)


def _cut(whole: Mapping[str, tuple[int, int]]) -> str:
    """Describe the cut of the model and the rows."""
    words = {"layers": "layers", "seq_len": "tokens a row"}
    parts = [f"{now:,} of {before:,} {words[name]}" for name, (now, before) in whole.items()]
    return f"; cut to {' and '.join(parts)}" if parts else ""


def _table(verdicts: Sequence[Verdict], parallel: ParallelConfig) -> Table:
    degrees = {name: getattr(parallel, name) for name in ("tp", "pp", "dp", "ep")}
    others = ", ".join(f"{name} {degree}" for name, degree in degrees.items() if (degree or 1) > 1)
    against = f"with {others} against one rank" if others else "against cp=1"
    table = Table(title=f"{against}, plain SDPA per document: relative error (tolerance)", title_justify="left")
    for name in (
        "cp",
        "layout",
        "route",
        "dtype",
        "loss",
        "loss error",
        "grad norm error",
        "worst gradient",
        "its error",
    ):
        table.add_column(name, justify="left" if name in ("layout", "route", "dtype", "worst gradient") else "right")
    table.add_column("drift by step")
    table.add_column("verdict")
    for v in verdicts:
        table.add_row(
            str(v.cp),
            v.layout,
            v.route,
            v.dtype if v.comm_dtype is None else f"{v.dtype} ({v.comm_dtype})",
            f"{v.loss:.6f}",
            f"{v.loss_error:.1e} ({v.loss_tolerance:.0e})",
            f"{v.norm_error:.1e} ({v.norm_tolerance:.0e})",
            v.worst_gradient,
            f"{v.gradient_error:.1e} ({v.gradient_tolerance:.0e})",
            "" if v.dtype in EXACT and v.comm_dtype is None else " ".join(f"{d:.0e}" for d in v.drift),
            f"[green]{'equal' if v.comm_dtype is None else 'in bounds'}[/]"
            if v.passed
            else "[bold red]DIFFERS[/]" + ("" if v.inputs_equal else ": other inputs"),
        )
    return table
