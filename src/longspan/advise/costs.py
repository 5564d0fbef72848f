"""What work and traffic cost on a machine: `Costs`, typical figures of one GPU generation or measured ones.

`longspan bench calibrate` measures the costs between the ranks at hand.
"""

import json
import math
from bisect import bisect_left, bisect_right
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from longspan.errors import SpecError

BACKWARD = 2.5
"""Kernel time of backward over that of forward (five matrix products instead of two)."""


@dataclass(frozen=True)
class Costs:
    """What work and traffic cost here. Bandwidths in bytes per second and rank, latencies in seconds.

    The figures given here stand for one H100 in bf16 within NVLink, 50 GB/s to other nodes: orders of magnitude, to rank
    routes with, and no measurement of ours.
    """

    head_dim: int = 128
    itemsize: int = 2
    message_bandwidth: float = 150e9
    message_latency: float = 20e-6
    all_to_all_bandwidth: float = 150e9
    all_to_all_latency: float = 30e-6
    node_bandwidth: float = 50e9
    """Of anything that crosses nodes."""
    tile_speed: tuple[tuple[int, float], ...] = ((128, 4e13), (1024, 2.5e14), (8192, 4.5e14))
    """FLOP/s of forward on a square tile of so many rows, ascending."""
    tile_overhead: float = 10e-6
    """Seconds a kernel call takes beside its work, merging included."""
    source: str = "typical figures of one H100 node"

    def __post_init__(self) -> None:
        numbers = {name: value for name, value in vars(self).items() if name not in ("tile_speed", "source")}
        for rows, speed in self.tile_speed:
            numbers |= {"tile_speed rows": rows, f"tile_speed at {rows} rows": speed}
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise SpecError(
                    f"{name}={value!r} is not a positive number", hint="measure with longspan bench calibrate"
                )
        if not self.tile_speed:
            raise SpecError("tile_speed is empty", hint="measure with longspan bench calibrate")

    @classmethod
    def load(cls, path: Path) -> "Costs":
        """What `longspan bench calibrate` wrote. Raises `SpecError` if the file is not such a record."""
        hint = "longspan bench calibrate writes one"
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise SpecError(f"cannot read {path}: {error.strerror}", hint=hint) from None
        except ValueError as error:
            raise SpecError(f"{path} holds no measured costs: {error}", hint=hint) from None
        names = {field.name for field in fields(cls)}
        found = values.keys() if isinstance(values, dict) else set()
        if odd := sorted(names ^ found):
            missing, unknown = [n for n in odd if n in names], [n for n in odd if n not in names]
            parts = [
                f"{word} {', '.join(which)}"
                for word, which in (("without", missing), ("with unknown", unknown))
                if which
            ]
            raise SpecError(f"{path} holds no measured costs: a record {', '.join(parts)}", hint=hint)
        speeds = values["tile_speed"]
        if not isinstance(speeds, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in speeds):
            raise SpecError(f"{path} holds no measured costs: tile_speed is not a list of [rows, FLOP/s]", hint=hint)
        try:
            return cls(**{**values, "tile_speed": tuple((rows, speed) for rows, speed in speeds)})
        except SpecError as error:
            raise SpecError(f"{path} holds no measured costs: {error.message}", hint=hint) from None

    def save(self, path: Path) -> None:
        """Write the record as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    def speed(self, rows: float) -> float:
        """FLOP/s on a tile of so many rows: between two sizes in proportion, beyond the ends as there."""
        sizes = [size for size, _ in self.tile_speed]
        at = bisect_left(sizes, rows)
        if at == 0 or at == len(sizes):
            return self.tile_speed[min(at, len(sizes) - 1)][1]
        (small, slow), (large, fast) = self.tile_speed[at - 1 : at + 1]
        return slow + (fast - slow) * (rows - small) / (large - small)

    def min_split_tokens(self, num_q: int) -> int:
        """Documents of fewer tokens stay whole: cutting one in two costs more time than its tokens take.

        A cut costs three messages (keys and values there, again in backward, gradients home) and a tile more, forward and
        backward. `n` tokens take a layer `72 (num_q D)^2 n` FLOPs in its other matrices (12 hidden_size^2
        parameters, as in Llama)
        and `3.5 * 4 num_q D n^2 / 2` in attention, forward and backward; for `num_q` query heads of `head_dim` D.
        """
        hidden_size, cut = num_q * self.head_dim, 3 * self.message_latency + 2 * self.tile_overhead
        fastest = self.tile_speed[-1][1]

        def seconds(n: int) -> float:
            return 72.0 * hidden_size**2 * n / fastest + (1 + BACKWARD) * 2.0 * hidden_size * n**2 / self.speed(n)

        return bisect_right(range(1 << 20), cut, key=seconds)
