"""Show reports as a table, as Markdown, and as a figure."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness import Spread
from benchmarks.peers.measure import Report, Result
from longspan.report.palette import rank_colors

COLUMNS = ("", "layout", "time / SDPA (quartiles)", "/ fastest peer", "pairs", "error", "peak MiB", "MiB sent")
MARKS = ("<!-- begin: python -m benchmarks.peers -->", "<!-- end -->")
_CUT = 2.0
"""Maximum height of the figure's bars, so that bars near 1 are distinguishable. Labels show the values."""
_INK = "#1f2933"


def as_table(reports: list[Report]) -> None:
    """Print tables to stdout, 180 columns wide if it is not a terminal."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=180)
    for report in reports:
        table = Table(*COLUMNS, title=f"{report.case}\n{_reference(report)}", title_justify="left")
        for result, cells in _rows(report):
            table.add_row(*cells, style="bold" if result and result.is_ours else None)
        console.print(table)
        for result in _untimed(report):
            console.print(f"  {_label(result)}: {verdict(result)}", highlight=False)
        console.print()


def as_markdown(reports: list[Report]) -> str:
    """Return a section for each input, then the functions called and their stand-ins."""
    lines: list[str] = []
    for report in reports:
        lines += [f"### {report.case}", "", _reference(report), "", _markdown_row(COLUMNS)]
        lines.append(_markdown_row(["---"] * 2 + ["---:"] * (len(COLUMNS) - 2)))
        for result, cells in _rows(report):
            lines.append(_markdown_row([f"**{c}**" if result and result.is_ours and c else c for c in cells]))
        untimed = _untimed(report)
        if untimed:
            lines += ["", "Not timed:", *(f"- {_label(result)}: {verdict(result)}" for result in untimed)]
        lines.append("")
    lines += ["### What was called", "", _markdown_row(("", "function", "on CPU")), _markdown_row(["---"] * 3)]
    called = {result.name: result for report in reports for result in report.results if not result.is_ours}
    for result in called.values():
        lines.append(_markdown_row((_label(result), f"`{result.source}`", result.stand_in or result.note)))
    return "\n".join(lines) + "\n"


def write_markdown(text: str, path: Path) -> None:
    """Replace the text between the two marks, or the complete file if it has no marks."""
    page = path.read_text() if path.exists() else ""
    if MARKS[0] in page and MARKS[1] in page:
        before, after = page.split(MARKS[0])[0], page.split(MARKS[1])[-1]
        text = f"{before}{MARKS[0]}\n\n{text}\n{MARKS[1]}{after}"
    path.write_text(text)


def draw(reports: list[Report], path: Path) -> None:
    """Draw a panel for each input, with a bar for each contender's time / SDPA's, and whiskers from quartile to quartile."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawn = [_timed(report) + [r for r in _untimed(report) if r.status in ("wrong", "failed")] for report in reports]
    columns = min(2, len(reports))
    rows = -(-len(reports) // columns)
    most = max(len(results) for results in drawn)
    figure, axes = plt.subplots(rows, columns, figsize=(6.6 * columns, (most * 0.25 + 1.0) * rows), squeeze=False)
    for ax, report, results in zip(axes.flat, reports, drawn, strict=False):
        _panel(ax, report, results, most)
    for ax in list(axes.flat)[len(reports) :]:
        ax.set_axis_off()
    figure.suptitle(
        "forward + backward, cp=2 over one process of SDPA: median, quartiles; less is better",
        fontsize=11 if columns > 1 else 8,
    )
    figure.tight_layout(rect=(0, 0, 1, 0.99))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _panel(ax: Any, report: Report, results: list[Result], rows: int) -> None:
    blue, orange, *_ = (f"#{r:02x}{g:02x}{b:02x}" for r, g, b in rank_colors(8))
    for place, result in enumerate(results):
        spread = result.ratio
        if spread is None or not spread.repeats:
            ax.text(
                0.02, place, "wrong, not timed" if result.status == "wrong" else "does not run", va="center", fontsize=8
            )
            continue
        ax.barh(place, min(spread.median, _CUT), height=0.66, color=blue if result.is_ours else orange)
        ax.plot([min(spread.low, _CUT), min(spread.high, _CUT)], [place] * 2, color=_INK, marker="|", linewidth=1.2)
        ax.text(_CUT * 1.01, place, f"{spread.median:.2f}", va="center", fontsize=8)
    ax.axvline(1, color=_INK, linewidth=1, linestyle=(0, (4, 3)), zorder=3)
    ax.set_xlim(0, _CUT)
    ax.set_ylim(rows - 0.4, -0.6)
    ax.set_yticks(range(len(results)), [result.name for result in results])
    for label, result in zip(ax.get_yticklabels(), results, strict=True):
        label.set_fontweight("bold" if result.is_ours else "normal")
    ax.set_title(f"{report.case.name}, S={report.case.seq_len:,}", loc="left", fontsize=10)
    ax.tick_params(axis="y", length=0)
    ax.tick_params(labelsize=8)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)


def _rows(report: Report) -> Iterator[tuple[Result | None, list[str]]]:
    yield None, ["SDPA, one process", "", "1", "", "", "", f"{report.sdpa_peak / 2**20:.1f}", "0"]
    for result in _timed(report):
        rival = report.against_rival.get(result.name)
        if result.ratio is None or result.error is None or result.peak is None or result.sent is None:
            continue
        against = _quartiles(rival) if rival else "fastest" if result.name == report.rival else ""
        pairs = f"{result.ratio.repeats}" + (f" of {result.ratio.repeats + result.dropped}" if result.dropped else "")
        memory = (f"{result.peak / 2**20:.1f}", f"{result.sent / 2**20:.1f}")
        yield (
            result,
            [_label(result), result.layout, _quartiles(result.ratio), against, pairs, f"{result.error:.0e}", *memory],
        )


def _timed(report: Report) -> list[Result]:
    """Return the timed contenders, fastest first."""
    timed = [result for result in report.results if result.ratio and result.ratio.repeats]
    return sorted(timed, key=lambda result: result.ratio.median if result.ratio else 0.0)


def _untimed(report: Report) -> list[Result]:
    return [result for result in report.results if not result.ratio or not result.ratio.repeats]


def verdict(result: Result) -> str:
    match result.status:
        case "wrong":
            return f"WRONG: {result.note}"
        case "failed":
            return f"does not run: {result.note}"
        case "refused":
            return f"not possible: {result.note}"
    return "no pair was kept: other programs used the cores"


def _label(result: Result) -> str:
    return f"{result.name} ({result.version})" if result.version else result.name


def _reference(report: Report) -> str:
    """Describe the baseline, its time, and causal SDPA's time scaled by the share of visible pairs."""
    case = report.case
    how = {"causal": "", "window": " with a boolean mask", "packed": f" on each of {len(case.lengths)} documents"}[
        case.kind
    ]
    text = f"SDPA{how}, two threads: {report.sdpa_seconds.median:.3f} s"
    if case.kind == "causal":
        return text
    if case.kind == "packed":
        text += f"; documents of {', '.join(map(str, case.lengths))} tokens"
    best = [r.seconds.median for r in _timed(report) if r.is_ours and r.seconds]
    ours = f" (longspan's best: {min(best):.3f} s)" if best else ""
    return f"{text}; causal SDPA's time by the share of pairs that this mask sees: {report.ideal_seconds:.3f} s{ours}"


def _quartiles(spread: Spread) -> str:
    return f"{spread.median:.2f} ({spread.low:.2f} to {spread.high:.2f})"


def _markdown_row(cells: Any) -> str:
    return "| " + " | ".join(cells) + " |"
