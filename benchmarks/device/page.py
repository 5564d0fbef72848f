"""Write the record as one HTML page without external files, with the speed of attention by length as an SVG chart."""

import math
from collections import defaultdict
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.device.record import Record, Stage
from benchmarks.device.rows import Row, told
from benchmarks.device.stage import STAGES
from longspan.report.palette import rank_colors

Point = tuple[float, float]
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 300, 56, 150, 16, 40
WORDS = {"holds": "holds", "fails": "FAILS", "absent": "not here", "late": "NOT REACHED"}
PLACE = ("seq_len", "documents", "kernel")
"""Figures that place a point in the chart; the row's name also contains these figures."""
UNITS = {"mib": "MiB", "tflops": "TFLOP/s", "sdpa": "SDPA"}
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1f2933; background: #fff }
body { max-width: 92rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin: 2.2rem 0 .4rem }
p { margin: .4rem 0; max-width: 60rem } .soft { color: #5b6b7b }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: .85rem; margin: .6rem 0 }
th, td { text-align: left; padding: .2rem .9rem .2rem 0; border-bottom: 1px solid #e4e9ee; vertical-align: top }
td:first-child { white-space: nowrap }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
.holds { color: #1b7a4b } .fails, .late { color: #b42318; font-weight: 600 } .absent { color: #5b6b7b }
svg text { font: 12px system-ui, sans-serif; fill: #1f2933 }
"""


def write_page(record: Record, path: Path) -> None:
    """Write the page, which needs no other file."""
    path.write_text(page(record), encoding="utf-8")


def page(record: Record) -> str:
    """Return the page as HTML text."""
    title = f"longspan on {', '.join(dict.fromkeys(record.environment['devices']))}"
    parts = [f"<h1>{escape(title)}</h1>", _summary(record), _environment(record.environment)]
    parts += [_stage(number, stage) for number, stage in record.stages.items()]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    return f'<!doctype html>\n<html lang="en">\n<head>{head}<style>{STYLE}</style></head>\n<body>\n' + "\n".join(parts) + (
        "\n</body>\n</html>\n"
    )  # fmt: skip


def _summary(record: Record) -> str:
    counts = {status: sum(row.status == status for row in record.rows) for status in WORDS}
    words = ", ".join(
        f'<span class="{status if counts[status] else "absent"}">{counts[status]} {word}</span>'
        for status, word in (("holds", "hold"), ("fails", "fail"), ("absent", "not here"), ("late", "not reached"))
    )
    missing = [str(number) for number in STAGES if number not in record.stages]
    rest = f" Not run yet: stage {', '.join(missing)}." if missing else ""
    quick = " Taken with --quick: sizes are small, and times are meaningless." if record.environment["quick"] else ""
    failing = "".join(f"<li>stage {row.stage}, {escape(row.name)}: {escape(row.reason)}</li>" for row in record.rows
                      if row.status == "fails")  # fmt: skip
    return f"<p>{len(record.rows)} checks: {words}.{rest}{quick}</p>" + (f"<ul>{failing}</ul>" if failing else "")


def _environment(environment: dict[str, Any]) -> str:
    cells = [f"{name} {', '.join(map(str, value)) if isinstance(value, list) else value}"
             for name, value in environment.items() if name not in ("device", "quick")]  # fmt: skip
    return f'<p class="soft">{escape("; ".join(cells))}</p>'


def _stage(number: int, stage: Stage) -> str:
    """Format checks as one table per set of figure names, with lists below."""
    by_names: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in stage.rows:
        names = tuple(n for n, value in row.figures.items() if n not in PLACE and not isinstance(value, list))
        by_names[names].append(row)
    parts = [f"<h2>Stage {number}: {escape(STAGES[number][0])}</h2>",
             f'<p class="soft">{stage.seconds:.0f} s, taken {escape(stage.taken)}</p>']  # fmt: skip
    lines = speeds(stage)
    if lines:
        parts.append("<p>Attention, forward and backward, in TFLOP/s by sequence length: 4 FLOPs forward and "
                     "10 backward per visible pair, head and dim.</p>" + chart(lines))  # fmt: skip
    parts += [_table(names, rows) for names, rows in sorted(by_names.items(), key=lambda item: -len(item[0]))]
    parts += [_list(row.name, name, value) for row in stage.rows for name, value in row.figures.items()
              if isinstance(value, list)]  # fmt: skip
    return "\n".join(parts)


def _table(names: tuple[str, ...], rows: list[Row]) -> str:
    reasons = any(row.reason for row in rows)
    heads = ["<th>check</th><th></th>", '<th class="number">error / limit</th>']
    heads += [f'<th class="number">{escape(_head(name))}</th>' for name in names]
    heads += ["<th>why</th>"] if reasons else []
    lines = []
    for row in rows:
        cells = [f'<td>{escape(row.name)}</td><td class="{row.status}">{WORDS[row.status]}</td>']
        cells.append(f'<td class="number">{"" if row.error is None else f"{row.error:.2f}"}</td>')
        cells += [f'<td class="number">{escape(told(row.figures[name]))}</td>' for name in names]
        cells += [f"<td>{escape(row.reason)}</td>"] if reasons else []
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="wide"><table><tr>{"".join(heads)}</tr>{"".join(lines)}</table></div>'


def _head(name: str) -> str:
    return " ".join(UNITS.get(word, word) for word in name.split("_"))


def _list(of: str, name: str, entries: list[dict[str, Any]]) -> str:
    heads = "".join(f"<th>{escape(key)}</th>" for key in entries[0]) if entries else ""
    lines = "".join(
        f"<tr>{''.join(f'<td>{escape(told(value))}</td>' for value in entry.values())}</tr>" for entry in entries
    )
    return f"<p>{escape(of)}: {escape(name)}</p>" + f'<div class="wide"><table><tr>{heads}</tr>{lines}</table></div>'


def speeds(stage: Stage) -> dict[str, list[Point]]:
    """Return TFLOP/s by length of one causal sequence, for each kernel and for SDPA (the best of its runs)."""
    lines: dict[str, dict[float, float]] = defaultdict(dict)
    for f in (row.figures for row in stage.rows if row.figures.get("documents") == 1):
        lines[f"longspan, {f['kernel']}"][f["seq_len"]] = f["tflops"]
        best = lines[f"SDPA, {f['sdpa_backend'].lower().replace('_', ' ')}"]
        best[f["seq_len"]] = max(f["sdpa_tflops"], best.get(f["seq_len"], 0.0))
    return {name: sorted(points.items()) for name, points in lines.items()}


def chart(lines: dict[str, list[Point]]) -> str:
    """Draw lines over a logarithmic axis of tokens, from 0 up, each labelled at its end."""
    tokens = sorted({x for points in lines.values() for x, _ in points})
    top = _round_up(max(y for points in lines.values() for _, y in points))
    low, high = math.log2(tokens[0]), math.log2(tokens[-1])

    def at(point: Point) -> Point:
        along = (math.log2(point[0]) - low) / (high - low) if high > low else 0.5
        return LEFT + along * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - point[1] / top * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" aria-label="TFLOP/s by tokens">']
    for tick in range(5):
        y = at((tokens[0], top * tick / 4))[1]
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#e4e9ee"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{top * tick / 4:.3g}</text>')
    for x in tokens:
        parts.append(f'<text x="{at((x, 0))[0]:.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{x:,}</text>')
    names = _apart({name: at(points[-1])[1] for name, points in lines.items()})
    for (name, points), (r, g, b) in zip(lines.items(), rank_colors(8), strict=False):
        color, places = f"rgb({r},{g},{b})", [at(point) for point in points]
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{drawn}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>' for x, y in places]
        parts.append(f'<text x="{places[-1][0] + 10:.1f}" y="{names[name] + 4:.1f}">{escape(name)}</text>')
    return "".join(parts) + "</svg>"


def _apart(heights: dict[str, float], least: float = 15) -> dict[str, float]:
    """Move heights down until labels do not overlap."""
    placed: dict[str, float] = {}
    for name, y in sorted(heights.items(), key=lambda item: item[1]):
        placed[name] = max(y, max(placed.values()) + least) if placed else y
    return placed


def _round_up(value: float) -> float:
    """Round up to 1, 2, 4, 6 or 8 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 6, 8, 10) if value <= step * power)
