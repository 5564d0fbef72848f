"""`longspan plan`: count the work and traffic of each rank and list the groups of each axis, as a table or JSON. No
torch.

Also defines the options of a plan, which `longspan show` shares.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from rich.console import Console

from longspan.advise import Planner
from longspan.cli.exits import friendly
from longspan.errors import SpecError
from longspan.names import AUTO, BALANCED, COMM_DTYPES, DTYPES, LAYOUTS, ROUTES
from longspan.plan import Mask, Plan, route_of
from longspan.report import PlanReport, TopologyReport, describe, describe_topology, plan_table, topology_table
from longspan.topology import ORDER, Topology
from longspan.train.axes import run_shape
from longspan.train.train_config import load_config, model_config

F = TypeVar("F", bound=Callable[..., Any])

_SUFFIXES = {"k": 1 << 10, "m": 1 << 20}

_POSITIVE = click.IntRange(min=1)

_OPTIONS = (
    click.option("--seq-len", metavar="TOKENS", help="Global sequence length: 8192, 8k, 128k, 1M (k = 1,024)."),
    click.option("--cp", type=int, metavar="RANKS", help="Context-parallel degree."),
    click.option(
        "--layout", default="zigzag", show_default=True, help=f"Which rank holds which tokens: {', '.join(LAYOUTS)}."
    ),
    click.option(
        "--mask",
        "kind",
        type=click.Choice(["causal", "full"]),
        default="causal",
        show_default=True,
        help="Mask of each document.",
    ),
    click.option(
        "--window", metavar="TOKENS", help="Sliding window: a query sees only keys less than this many tokens away."
    ),
    click.option(
        "--documents", metavar="LENGTHS", help="Lengths of packed documents: 5000,3000,192. Their sum is --seq-len."
    ),
    click.option(
        "--prefix", metavar="TOKENS", help="Prefix-LM: the first TOKENS attend to each other; later tokens are causal."
    ),
    click.option(
        "--heads",
        metavar="Q/KV",
        help="Query heads / KV heads on one rank: 32/8. Default: count the bytes of one KV head.",
    ),
    click.option("--head-dim", type=int, default=128, show_default=True, help="Head dimension."),
    click.option(
        "--dtype", type=click.Choice(list(DTYPES)), default="bf16", show_default=True, help="Dtype of keys and values."
    ),
    click.option(
        "--slots", metavar="TOKENS", help="Local sequence length of every rank, filled up with padding slots."
    ),
    click.option(
        "--route",
        default="ring",
        show_default=True,
        help=f"How keys and values reach queries: {', '.join((*ROUTES, AUTO))}.",
    ),
    click.option(
        "--inner", type=int, metavar="RANKS", help="Inner degree of a two-level route. Default: chosen by the planner."
    ),
    click.option(
        "--comm-dtype",
        type=click.Choice(list(COMM_DTYPES)),
        help="Communication dtype of keys and values. Default: --dtype.",
    ),
    click.option(
        "--tp", type=_POSITIVE, metavar="RANKS", default=1, help="Tensor-parallel degree, already applied to --heads."
    ),
    click.option(
        "--ranks-per-node",
        type=_POSITIVE,
        metavar="RANKS",
        help="Ranks per node. A chosen inner degree keeps the exchange of heads within a node.",
    ),
    click.option(
        "--costs",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="File written by longspan bench calibrate, for --route auto and --layout balanced.",
    ),
)
_TOPOLOGY_OPTIONS = (
    click.option(
        "--world", type=_POSITIVE, metavar="RANKS", help="World size: list the groups of each axis and the nodes."
    ),
    click.option(
        "--dp", type=_POSITIVE, metavar="RANKS", help="Data-parallel degree. Default: --world / (tp x pp x cp)."
    ),
    click.option("--pp", type=_POSITIVE, metavar="RANKS", default=1, help="Pipeline-parallel degree."),
    click.option(
        "--ep", type=_POSITIVE, metavar="RANKS", default=1, help="Expert-parallel degree, within a pipeline stage."
    ),
    click.option(
        "--dp-replicate", type=_POSITIVE, metavar="NUMBER", default=1, help="HSDP: replicas of the sharded weights."
    ),
    click.option(
        "--order", metavar="AXES", default=ORDER, show_default=True, help="Order of the axes, fastest-varying first."
    ),
    click.option("--domain", type=_POSITIVE, metavar="RANKS", help="Ranks of a NUMA domain or switch within a node."),
)
_TOPOLOGY_NAMES = ("dp", "pp", "ep", "dp_replicate", "order", "domain")
_SHARED_NAMES = ("world", "cp", "tp", "ranks_per_node", "as_json")
_IN_OPTIONS = (
    ("use window=None for no window", "leave --window out for no window"),
    ("heads=(query, KV)", "--heads Q/KV"),
    ('route="ring"', "--route ring"),
    ('route="usp" with inner=', "--route usp --inner "),
    ("set inner=", "set --inner "),
    ("leave inner out", "leave --inner out"),
    ("set ranks_per_node to", "set --ranks-per-node to"),
)
"""Phrases of hints to Python callers, each with its phrase for the command line."""


def plan_options(function: F) -> F:
    """Add the options of a plan to a command. `plan_of` reads them."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def plan_of(
    *,
    seq_len: str | None,
    cp: int | None,
    layout: str,
    kind: str,
    window: str | None,
    documents: str | None,
    prefix: str | None,
    heads: str | None,
    head_dim: int,
    dtype: str,
    slots: str | None,
    route: str,
    inner: int | None,
    comm_dtype: str | None,
    tp: int,
    ranks_per_node: int | None,
    costs: Path | None,
) -> tuple[Plan, PlanReport]:
    """Return (plan, report) of the command-line options. Raises `SpecError` that names an option that does not fit."""
    if cp is None:
        raise SpecError("no context-parallel degree is given", hint="set --cp 8")
    lengths = None if documents is None else _lengths(documents)
    tokens = _seq_len(seq_len, lengths)
    _check_used(route, inner, costs, ranks_per_node, layout, heads)
    try:
        mask = _mask(tokens, kind, _tokens("window", window), lengths, _tokens("prefix", prefix))
        itemsize = DTYPES[dtype].itemsize
        planner = Planner.with_costs(
            costs, ranks=cp, layout=layout, route=route, heads=None if heads is None else _heads(heads), head_dim=head_dim,
            itemsize=itemsize, inner=inner, comm_dtype=comm_dtype, tp=tp, ranks_per_node=ranks_per_node,
        )  # fmt: skip
        made = planner.plans({"full": mask}, _tokens("slots", slots))[1]["full"]
    except SpecError as error:
        raise SpecError(error.message, error.hint and _in_options(error.hint)) from error
    return made, describe(made, head_dim, itemsize)


def _topology_options(function: F) -> F:
    for option in reversed(_TOPOLOGY_OPTIONS):
        function = option(function)
    return function


@click.command()
@click.argument("config", required=False, type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="a.b=value", help="Override a value of CONFIG; repeatable.")
@plan_options
@_topology_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON with stable, documented keys.")
@friendly
def plan(config: Path | None, overrides: tuple[str, ...], as_json: bool, world: int | None, **options: Any) -> None:
    """Count tokens, visible pairs, KV rows and bytes of each rank, forward and backward.

    With CONFIG, a TOML file of longspan train, count the plan of each mask of the model over the longest micro-batch.
    With --world, list the groups of axes dp, tp, pp, cp and ep and their nodes. Add --seq-len to count a plan too.
    """
    if config is not None:
        _refuse_given([*options, "world"], "with CONFIG", "set values of the file by --set a.b=value")
        _show_run(config, overrides, as_json)
        return
    if overrides:
        raise SpecError(
            "--set has no effect without CONFIG", hint="give the TOML file CONFIG whose values --set overrides"
        )
    axes = {name: options.pop(name) for name in _TOPOLOGY_NAMES}
    planned = world is None or options["seq_len"] is not None or options["documents"] is not None
    if world is None:
        _refuse_given(_TOPOLOGY_NAMES, "without --world", "set --world to the ranks of the run")
    elif not planned:
        others = [name for name in options if name not in _SHARED_NAMES]
        _refuse_given(others, "without --seq-len", "set --seq-len 8k, or --documents, to plan a sequence over cp")
    topology = None if world is None else _topology_of(world, axes, options)
    report = plan_of(**options)[1] if planned else None
    if as_json:
        click.echo(_to_json(topology, report))
        return
    console = Console(highlight=False)
    if topology:
        console.print(topology_table(topology), *([""] if report else []))
    if report:
        console.print(plan_table(report))


def _show_run(config: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Print the plans of a run's longest micro-batch."""
    run_config = load_config(config, overrides)
    run = run_shape(run_config, model_config(run_config))
    reports = {name: describe(plan, run.model.head_dim, run.itemsize) for name, plan in run.longest_plans[1].items()}
    if as_json:
        plans = [{"layers": run.planner.mask_layers[name], **asdict(report)} for name, report in reports.items()]
        click.echo(json.dumps({"plans": plans}, indent=2))
        return
    console = Console(highlight=False)
    for name, report in reports.items():
        number = run.planner.mask_layers[name]
        console.print(f"{number} layer{'s' * (number > 1)} of mask {name}:", style="bold")
        console.print(plan_table(report))


def _topology_of(world: int, axes: dict[str, Any], options: dict[str, Any]) -> TopologyReport:
    """Return the report of the topology. Sets `ranks_per_node` in `options` to the ranks of a CP group on a node, or None."""
    domain, ranks_per_node = axes.pop("domain"), options["ranks_per_node"]
    options["cp"] = 1 if options["cp"] is None else options["cp"]
    try:
        topology = Topology.of(world, cp=options["cp"], tp=options["tp"], **axes)
        report = describe_topology(topology, ranks_per_node, domain)
    except SpecError as error:
        raise SpecError(error.message, error.hint and _in_options(error.hint)) from error
    chosen = _chooses(options["route"], options["inner"])
    options["ranks_per_node"] = report.nodes.together("cp") if ranks_per_node is not None and chosen else None
    return report


def _to_json(topology: TopologyReport | None, report: PlanReport | None) -> str:
    if topology is None:
        assert report is not None, "the options select neither a topology nor a plan"
        return report.to_json()
    return topology.to_json(**({} if report is None else {"plan": asdict(report)}))


def _refuse_given(names: Sequence[str], where: str, hint: str) -> None:
    """Raise `SpecError` for options on the command line that have no effect `where`, such as "without --world"."""
    context = click.get_current_context()
    given = [name for name in names if context.get_parameter_source(name) == ParameterSource.COMMANDLINE]
    if given:
        words = ", ".join(option.opts[0] for option in context.command.params if option.name in given)
        have = "has" if len(given) == 1 else "have"
        raise SpecError(f"{words} {have} no effect {where}", hint=f"{hint}; or leave {words} out")


def parse_tokens(text: str, option: str) -> int:
    """Parse a number of tokens, such as `8192`, `8k`, `128K` or `1M` (k = 1,024)."""
    size = _SUFFIXES.get(text[-1:].lower(), 1)
    digits = text.strip() if size == 1 else text[:-1].strip()
    if not (digits.isascii() and digits.isdigit()):
        raise SpecError(f"--{option} {text!r} is not a number of tokens", hint="write it as 8192, 8k or 1M (k = 1,024)")
    return int(digits) * size


def _check_used(
    route: str, inner: int | None, costs: Path | None, ranks_per_node: int | None, layout: str, heads: str | None
) -> None:
    """Raise `SpecError` for an option that neither the route nor the layout uses."""
    if costs is not None and route != AUTO and (layout != BALANCED or heads is None):
        raise SpecError(
            f"--costs has no effect on --route {route} and --layout {layout}{' without --heads' if layout == BALANCED else ''}",
            hint=f"set --route {AUTO}, or --layout {BALANCED} with --heads; or remove --costs",
        )
    if ranks_per_node is None or _chooses(route, inner):
        return
    given = f"--route {route}" if inner is None else f"--route {route} --inner {inner}"
    raise SpecError(
        f"--ranks-per-node has no effect on {given}: the inner degree is not chosen", hint="remove --ranks-per-node"
    )


def _chooses(route: str, inner: int | None) -> bool:
    """Whether the planner chooses the inner degree."""
    return route == AUTO or (route_of(route).heads == "inner" and inner is None)


def _in_options(hint: str) -> str:
    for python, option in _IN_OPTIONS:
        hint = hint.replace(python, option)
    return hint


def _tokens(option: str, text: str | None) -> int | None:
    return None if text is None else parse_tokens(text, option)


def _lengths(text: str) -> list[int]:
    return [parse_tokens(part.strip(), "documents") for part in text.split(",")]


def _seq_len(text: str | None, lengths: Sequence[int] | None) -> int:
    if text is None:
        if lengths is None:
            raise SpecError("no sequence length is given", hint="set --seq-len 8k, or --documents")
        return sum(lengths)
    tokens = parse_tokens(text, "seq-len")
    if lengths is not None and sum(lengths) != tokens:
        raise SpecError(
            f"the {len(lengths)} lengths of --documents sum to {sum(lengths):,} tokens, but --seq-len is {tokens:,}",
            hint="make the lengths sum to --seq-len, or remove --seq-len",
        )
    return tokens


def _mask(seq_len: int, kind: str, window: int | None, lengths: Sequence[int] | None, prefix: int | None) -> Mask:
    if prefix is None:
        return Mask.documents([seq_len] if lengths is None else lengths, causal=kind == "causal", window=window)
    others = {"--documents": lengths is not None, "--window": window is not None, "--mask full": kind == "full"}
    if clash := [option for option, given in others.items() if given]:
        raise SpecError(f"--prefix does not combine with {' or '.join(clash)}", hint=f"remove {' and '.join(clash)}")
    return Mask.prefix(seq_len, prefix)


def _heads(text: str) -> tuple[int, int]:
    parts = text.split("/")
    if len(parts) != 2 or not all(part.isascii() and part.isdigit() for part in parts):
        raise SpecError(
            f"--heads {text!r} is not of the form query heads/KV heads", hint="write it as 32/8, or 8/8 without GQA"
        )
    return int(parts[0]), int(parts[1])
