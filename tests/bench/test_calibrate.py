"""Measured costs: plausible, the same on every rank, kept in a file that plans read."""

import json

import pytest
import torch
from click.testing import CliRunner

from longspan.advise import Costs, Planner
from longspan.bench.calibrate import measure
from longspan.cli.main import main
from longspan.errors import SpecError
from longspan.plan import Mask
from tests.ranks import run_ranks


def _measure(group, rank):
    return measure(group, head_dim=16, dtype=torch.float32, num_bytes=1 << 20)


@pytest.mark.parametrize("P", [2, 3])
def test_costs_of_ranks_at_hand(P, tmp_path):
    costs = run_ranks(P, _measure)
    assert len(set(costs)) == 1
    found = costs[0]
    assert (found.head_dim, found.itemsize, found.source) == (16, 4, f"measured on {P} ranks")
    for value in (found.message_latency, found.all_to_all_latency, found.tile_overhead):
        assert 1e-7 < value < 1
    for value in (
        found.message_bandwidth,
        found.all_to_all_bandwidth,
        found.node_bandwidth,
        *dict(found.tile_speed).values(),
    ):
        assert 1e6 < value < 1e13
    assert [rows for rows, _ in found.tile_speed] == [128, 512, 2048]
    found.save(tmp_path / "costs.json")
    assert Costs.load(tmp_path / "costs.json") == found
    plan = Planner(4, route="auto", heads=(4, 4), costs=found).plans({"full": Mask.causal(64)})[1]["full"]
    assert found.source in plan.reason


def test_one_rank_has_nothing_to_measure():
    with pytest.raises(SpecError, match="a group of 1 rank has no traffic"):
        run_alone()


def run_alone():
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return _measure(dist.group.WORLD, 0)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"tile_speed": [[1, 2.0]], "color": 1}'])
def test_a_file_that_holds_something_else(tmp_path, text):
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(SpecError, match="holds no measured costs"):
        Costs.load(path)
    with pytest.raises(SpecError, match="cannot read"):
        Costs.load(tmp_path / "missing.json")


@pytest.mark.usefixtures("warm")
def test_the_command(tmp_path):
    path = tmp_path / "costs.json"
    done = CliRunner().invoke(main, ["bench", "calibrate", "--mebibytes", "1", "--output", str(path), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == json.loads(path.read_text())
    assert CliRunner().invoke(main, ["bench", "calibrate", "--ranks", "1"]).exit_code == 2


def test_more_ranks_than_devices_are_refused_before_there_are_any(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    refused = CliRunner().invoke(main, ["bench", "calibrate", "--ranks", "3"])
    assert refused.exit_code == 2
    assert refused.stderr == (
        "measuring\nerror: 3 ranks on this machine, which has 1 CUDA device: each rank needs its own\n\n"
        "hint: set --device cpu, or start at most 1 rank here\n"
    )
