"""`Costs`: the file of a calibration, and what follows from it."""

import json

import pytest

from longspan.advise import Costs
from longspan.errors import SpecError

RECORD = Costs().model_dump(mode="json")


def test_costs_survive_their_file(tmp_path):
    costs = Costs(head_dim=64, message_bandwidth=1e9, tile_speed=((32, 1e9), (512, 4e9)), source="a test")
    costs.save(tmp_path / "costs.json")
    assert Costs.load(tmp_path / "costs.json") == costs


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "holds no measured costs: the file: Invalid JSON"),
        ("[]", "holds no measured costs: the file: Input should be an object"),
        ('{"head_dim": 64}', "holds no measured costs: all_to_all_bandwidth, all_to_all_latency, itemsize, "),
        (json.dumps(RECORD | {"weight": 3}), "holds no measured costs: weight: Extra inputs are not permitted"),
        (json.dumps(RECORD | {"head_dim": "64"}), "holds no measured costs: head_dim: Input should be a valid integer"),
        (json.dumps(RECORD | {"message_bandwidth": 0}), "message_bandwidth: Input should be greater than 0"),
        (json.dumps(RECORD | {"node_bandwidth": float("nan")}), "node_bandwidth: Input should be a finite number"),
        (json.dumps(RECORD | {"tile_speed": [[128, -8.0]]}), "tile_speed.0.1: Input should be greater than 0"),
        (json.dumps(RECORD | {"tile_speed": [3]}), "tile_speed.0: Input should be a valid array"),
        (json.dumps(RECORD | {"tile_speed": []}), "tile_speed: Tuple should have at least 1 item"),
    ],
)
def test_a_file_that_holds_something_else(tmp_path, text, told):
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(SpecError) as error:
        Costs.load(path)
    assert told in str(error.value)
    assert str(error.value).endswith("\n\nhint: longspan bench calibrate writes such a file")


def test_a_file_that_does_not_exist(tmp_path):
    with pytest.raises(SpecError, match=r"cannot read .*/none\.json: No such file or directory"):
        Costs.load(tmp_path / "none.json")


def test_speed_between_and_beyond_the_measured_sizes():
    costs = Costs(tile_speed=((128, 1e12), (1024, 2e12), (4096, 8e12)))
    assert [costs.speed(rows) for rows in (1, 128, 576, 1024, 4096, 10**6)] == [1e12, 1e12, 1.5e12, 2e12, 8e12, 8e12]


def test_a_document_is_whole_where_its_tokens_take_less_time_than_a_cut():
    costs = Costs(head_dim=64, message_latency=20e-6, tile_overhead=10e-6, tile_speed=((128, 1e13), (1024, 1e14)))
    # 80 us a cut; a token takes 72 x 512^2 / 1e14 = 0.19 us besides, and n of them 3584 n^2 / speed(n) in attention.
    n = costs.min_split_tokens(8)
    linear, attention = 72 * 512**2 / 1e14, 3.5 * 2 * 512
    assert linear * (n - 1) + attention * (n - 1) ** 2 / costs.speed(n - 1) <= 80e-6
    assert linear * n + attention * n**2 / costs.speed(n) > 80e-6
    assert 300 < n < 420
    assert costs.model_copy(update={"message_latency": 20e-3}).min_split_tokens(8) > 50 * n
    assert costs.min_split_tokens(64) < n / 8
