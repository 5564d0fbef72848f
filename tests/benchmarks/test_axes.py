"""`benchmarks.axes`: the table it prints, and that the shapes behind the formulas are those of the model."""

import json
from math import prod

import pytest
import torch
from benchmarks.axes import EXPERTS, PROPORTIONS, main, make_config, step_shape
from click.testing import CliRunner

from longspan.model import Decoder, ModelConfig

pytestmark = pytest.mark.usefixtures("warm")


def test_the_table_and_the_record(tmp_path):
    """A block of width 128 has 128 x (128 + 32 + 32 + 128 + 3 x 448 + 2) elements, the root 2 x 512 x 128 + 128; a rank sends its
    half of the blocks twice and of the root once, and of their gradients once."""
    half, root = 4 * 128 * 1666 // 2, (2 * 512 * 128 + 128) // 2
    arguments = ["--tp", "1", "--cp", "1", "--dp", "2", "--gradient-accumulation-steps", "1", "--seq-len", "32"]
    result = CliRunner().invoke(main, [*arguments, "--json", str(tmp_path / "axes.json")], catch_exceptions=False)
    assert result.exit_code == 0
    found = json.loads((tmp_path / "axes.json").read_text())["traffic"]
    assert {(row["axis"], row["kind"]): (row["calls"], row["elements"], row["bytes"]) for row in found} == {
        ("dp", "all-reduce"): (3, 4, 32),
        ("shard", "all-gather"): (9, 2 * half + root, 4 * (2 * half + root)),
        ("shard", "reduce-scatter"): (5, half + root, 4 * (half + root)),
    }
    assert [row["formula"] for row in found] == [row["elements"] for row in found]
    words = [line.split() for line in result.output.splitlines()]
    assert [
        "shard",
        "reduce-scatter",
        "5",
        f"{half + root:,.1f}",
        f"{half + root:,.1f}",
        f"{4 * (half + root):,}",
    ] in words


@pytest.mark.parametrize(
    "changes", [{}, {"tie_embeddings": True}, {"qk_norm": True}, {"experts": EXPERTS, "intermediate_size": None}]
)
def test_shapes_are_those_of_the_model(changes):
    model = PROPORTIONS | changes
    config = make_config(32, 1, {"ep": 1}).model_copy(update={"model": ModelConfig.model_validate(model)})
    shape = step_shape(config, 0, [32])
    with torch.device("meta"):
        decoder = Decoder(ModelConfig.model_validate(model))
    counted = sum(prod(each) for unit in (*shape.units, *shape.expert_units) for each in unit)
    assert counted == sum(parameter.numel() for parameter in decoder.parameters())
