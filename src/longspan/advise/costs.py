"""Times of work and traffic on a machine: `Costs`, either typical figures of one GPU generation or measured.

`longspan bench calibrate` measures the costs between the ranks at hand.
"""

from bisect import bisect_left, bisect_right
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from longspan.errors import SpecError

BACKWARD = 2.5
"""Kernel time of backward / forward: five matrix products instead of two."""

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
_Count = Annotated[int, Field(gt=0, strict=True)]


class Costs(BaseModel):
    """Times of work and traffic on one machine. Bandwidths are in bytes per second and rank, latencies in seconds.

    The defaults stand for one H100 in bf16 within NVLink, and 50 GB/s to other nodes. These figures are orders of
    magnitude for ranking routes, not measurements. Raises `pydantic.ValidationError` for a value that is not a positive number.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    head_dim: _Count = 128
    itemsize: _Count = 2
    message_bandwidth: _Positive = 150e9
    message_latency: _Positive = 20e-6
    all_to_all_bandwidth: _Positive = 150e9
    all_to_all_latency: _Positive = 30e-6
    node_bandwidth: _Positive = 50e9
    """Bandwidth between ranks of different nodes."""
    tile_speed: Annotated[tuple[tuple[_Count, _Positive], ...], Field(min_length=1)] = (
        (128, 4e13), (1024, 2.5e14), (8192, 4.5e14),
    )  # fmt: skip
    """FLOP/s of forward on square tiles: tuples (rows, FLOP/s), in ascending order of rows."""
    tile_overhead: _Positive = 10e-6
    """Overhead of a kernel call in seconds, including the merge of its result."""
    source: str = "typical figures of one H100 node"

    @classmethod
    def load(cls, path: Path) -> "Costs":
        """Read a file written by `longspan bench calibrate`. Raises `SpecError` if the file cannot be read or is no record."""
        hint = "longspan bench calibrate writes such a file"
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise SpecError(f"cannot read {path}: {error.strerror}", hint=hint) from None
        try:
            costs = cls.model_validate_json(text)
        except ValidationError as error:
            wrong = [f"{'.'.join(map(str, e['loc'])) or 'the file'}: {e['msg']}" for e in error.errors()]
            raise SpecError(f"{path} holds no measured costs: {'; '.join(wrong)}", hint=hint) from None
        if missing := sorted(cls.model_fields.keys() - costs.model_fields_set):
            raise SpecError(f"{path} holds no measured costs: {', '.join(missing)} missing", hint=hint)
        return costs

    def save(self, path: Path) -> None:
        """Write the record as JSON."""
        path.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")

    def speed(self, rows: float) -> float:
        """FLOP/s on a square tile of `rows` rows: interpolated between measured sizes, constant outside their range."""
        sizes = [size for size, _ in self.tile_speed]
        at = bisect_left(sizes, rows)
        if at == 0 or at == len(sizes):
            return self.tile_speed[min(at, len(sizes) - 1)][1]
        (small, slow), (large, fast) = self.tile_speed[at - 1 : at + 1]
        return slow + (fast - slow) * (rows - small) / (large - small)

    def min_split_tokens(self, num_q: int) -> int:
        """Length in tokens from which splitting a document in two costs less time than its tokens do.

        A split costs one more tile, forward and backward, and three messages: keys and values in forward and again in
        backward, and their gradients. Forward and backward of `n` tokens cost `72 (num_q D)^2 n` FLOPs in a layer's linear
        layers (12 hidden_size^2 parameters, as in Llama) and `3.5 * 4 num_q D n^2 / 2` in its attention, for `num_q` query
        heads of `head_dim` D.
        """
        hidden_size, cut = num_q * self.head_dim, 3 * self.message_latency + 2 * self.tile_overhead
        fastest = self.tile_speed[-1][1]

        def seconds(n: int) -> float:
            return 72.0 * hidden_size**2 * n / fastest + (1 + BACKWARD) * 2.0 * hidden_size * n**2 / self.speed(n)

        return bisect_right(range(1 << 20), cut, key=seconds)
