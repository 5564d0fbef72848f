"""Text for plans and numbers, shared by tables, titles and drawings.

Units of tokens and bytes are powers of two (8k = 8,192), units of pairs powers of ten.
"""

from longspan.report.plan_report import PlanReport

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def headline(report: PlanReport) -> str:
    """Name layout, mask, route and communication dtype."""
    inner = "" if report.inner is None else f" (inner {report.inner})"
    comm = "" if report.comm_dtype is None else f", {report.comm_dtype} in flight"
    return f"{report.layout} layout, {report.mask}, {report.route} route{inner}{comm}"


def summary(report: PlanReport) -> str:
    """Summarise size, imbalance and traffic in one line."""
    ranks, tokens = f"rank{'s' * (report.ranks != 1)}", f"token{'s' * (report.seq_len != 1)}"
    return f"{report.ranks} {ranks}, {report.seq_len:,} {tokens}, imbalance {report.imbalance:.3f}, {traffic(report)}"


def traffic(report: PlanReport) -> str:
    """Format `bytes_forward / plain_ring_bytes`. A plain ring sends every shard to every rank in the inputs' dtype."""
    return f"sent forward: {report.bytes_relative:.2f} of a plain ring" if report.bytes_forward else "nothing sent"


def bytes_note(report: PlanReport) -> str:
    """Explain which bytes a report counts."""
    heads = f"{report.heads[1]} KV heads" if report.heads else "one KV head"
    if report.heads and report.head_degree > 1:
        heads = f"{report.heads[0]} query and {heads}"
    comm = "" if report.comm_dtype is None else f", keys and values as {report.comm_dtype}"
    return f"Bytes sent per batch row, for {heads} of {report.head_dim} at {report.itemsize} bytes an element{comm}."


def exchange_note(report: PlanReport) -> str:
    """Explain what an area counts if heads are exchanged. Returns an empty string otherwise."""
    if report.head_degree == 1:
        return ""
    return f"The {report.head_degree} ranks of a group compute the same pairs, each for 1/{report.head_degree} of the heads."


def in_full(amount: float) -> str:
    """Format a number without a unit: an int as `1,234`, a float as `1,234.5`."""
    return f"{amount:,}" if isinstance(amount, int) else f"{amount:,.1f}"


def short_count(number: float) -> str:
    """Format a count with at most three digits and a letter: `33.6M` for 33,562,624."""
    return _scaled(number, 1000, ("", "k", "M", "G", "T", "P"))


def short_bytes(number: float, space: str = " ") -> str:
    """Format bytes: `12.0 MiB`."""
    return _scaled(number, 1024, tuple(space + unit for unit in _BYTE_UNITS))


def byte_unit(most: int) -> tuple[int, str]:
    """Choose the unit for numbers up to `most` bytes. Returns (bytes per unit, name)."""
    power = max(0, (most.bit_length() - 1) // 10)
    return 1 << (10 * power), _BYTE_UNITS[power]


def short_tokens(number: int) -> str:
    """Format tokens: `8k` for 8,192, `1M` for 1,048,576. A number that is no exact multiple of a unit is given in full."""
    for size, letter in ((1 << 20, "M"), (1 << 10, "k")):
        if number and number % size == 0:
            return f"{number // size}{letter}"
    return f"{number:,}"


def _scaled(number: float, base: int, units: tuple[str, ...]) -> str:
    value, unit = float(number), 0
    while value >= base * 0.9995 and unit < len(units) - 1:
        value, unit = value / base, unit + 1
    digits = 0 if (unit == 0 and value == int(value)) or value >= 99.95 else 1
    return f"{value:.{digits}f}{units[unit]}"
