"""`longspan plan`, `pack`, `--dry-run` and the run plan alike: layout, route, degrees and bytes, for random configurations."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from longspan.cli.plan import plan as plan_command
from longspan.cli.train import train as train_command
from longspan.comm.in_memory import MemoryWorld
from longspan.data.manifest import read_table
from longspan.errors import SpecError
from longspan.names import AUTO, COMM_DTYPES, DTYPES, LAYOUTS, ROUTES, window_of
from longspan.plan import Mask
from longspan.train.axes import topology_of
from longspan.train.pack_run import pack_run
from longspan.train.step import check_plan, make_context
from longspan.train.train_config import PackConfig, TrainConfig
from tests.examples import examples
from tests.train.tiny import make_config, to_toml

SEQ_LEN = 96


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of one long document, so that every row is one document of `SEQ_LEN` tokens: the longest there can be."""
    folder: Path = tmp_path_factory.mktemp("alike")
    (folder / "corpus").mkdir()
    (folder / "corpus" / "long.txt").write_text("abcdefg " * 60)
    return folder


@st.composite
def changes(draw: st.DrawFn) -> dict[str, Any]:
    """Whatever decides a plan, nodes smaller than the CP group above all."""
    cp, tp = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 1), (8, 1), (4, 2), (2, 2)]))
    num_kv_heads = draw(st.sampled_from([1, 2, 4, 8]))
    num_heads = num_kv_heads * draw(st.sampled_from([1, 2]))
    window = draw(st.sampled_from([None, 17]))
    return {
        "model__num_heads": num_heads * tp, "model__num_kv_heads": num_kv_heads * tp, "model__head_dim": 8,
        "model__hidden_size": 16, "model__windows": ["full", window or "full"], "parallel__cp": cp, "parallel__tp": tp,
        "parallel__layout": draw(st.sampled_from(LAYOUTS)), "parallel__route": draw(st.sampled_from([AUTO, "usp", *ROUTES])),
        "parallel__ranks_per_node": draw(st.sampled_from([cp * tp, max(1, cp * tp // 2), tp])),
        "parallel__pad_to_multiple_of": draw(st.sampled_from([1, 5])),
        "parallel__comm_dtype": draw(st.sampled_from(["", *COMM_DTYPES])),
        "dtype": draw(st.sampled_from(["fp32", "bf16"])),
    }  # fmt: skip


def planned_by_the_run(config: TrainConfig) -> dict[str, tuple[Any, ...]]:
    """Layout, route, degrees and each rank's bytes of each mask, as rank 0 of the CP group plans them."""
    topology, model = topology_of(config), config.model
    assert model is not None
    meshes: Any = SimpleNamespace(topology=topology, data={"cp": MemoryWorld(topology.cp).group(0)})
    context = make_context(config, model, meshes)
    names = dict.fromkeys(model.mask_names)
    layout, plans = context.plans({name: Mask.documents([SEQ_LEN], window=window_of(name)) for name in names})
    itemsize = DTYPES[config.dtype].itemsize
    return {
        name: (
            layout.name, plan.route, plan.degrees.heads, plan.degrees.rows,
            [plan.bytes(rank, "forward", 8, itemsize) + plan.bytes(rank, "backward", 8, itemsize) for rank in range(plan.ranks)],
        )
        for name, plan in plans.items()
    }  # fmt: skip


def output(command: Any, *words: str) -> Any:
    done = CliRunner().invoke(command, list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@settings(examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes())
def test_every_command_plans_as_the_run_does(folder: Path, changes: dict[str, Any]) -> None:
    given = {name: value for name, value in changes.items() if value != ""}
    try:
        config = make_config(folder, data__seq_len=SEQ_LEN, data__heldout_fraction=0, **given)
        check_plan(config, config.model)  # type: ignore[arg-type]
    except (SpecError, ValidationError):
        assume(False)
    run = planned_by_the_run(config)
    file = folder / "run.toml"
    file.write_text(to_toml(config))

    plans = output(plan_command, str(file), "--json")["plans"]
    told = [
        (plan["layout"], plan["route"], plan["head_degree"], plan["row_degree"],
         [rank["bytes_forward"] + rank["bytes_backward"] for rank in plan["per_rank"]])
        for plan in plans
    ]  # fmt: skip
    assert told == list(run.values())

    budget = output(train_command, str(file), "--dry-run", "--json")["attention"]
    told = [(a["layout"], a["route"], a["ulysses_degree"], a["ring_degree"], a["bytes_sent"]) for a in budget]
    assert told == [(*which, max(sent)) for *which, sent in run.values()]

    packed = folder / "rows.parquet"
    pack_run(PackConfig.model_validate(config.model_dump(exclude_unset=True)), packed)
    _, about = read_table(packed, ["row"])
    assert about["counted"]["layout"] == config.parallel.layout
    layers = {plan_name: config.model.mask_names.count(plan_name) for plan_name in run}  # type: ignore[union-attr]
    total = [sum(layers[name] * sent[rank] for name, (*_, sent) in run.items()) for rank in range(config.parallel.cp)]
    assert pq.read_table(packed).to_pylist()[0]["rank_bytes"] == total


def test_heads_stay_within_a_node_for_all_of_them(folder: Path) -> None:
    """8 ranks, 4 a node: `usp` exchanges heads among 4, though the heads would allow 8."""
    config = make_config(
        folder, data__seq_len=SEQ_LEN, parallel__cp=8, parallel__route="usp", parallel__ranks_per_node=4,
        model__num_heads=16, model__num_kv_heads=8, model__head_dim=8,
    )  # fmt: skip
    assert {run[2:4] for run in planned_by_the_run(config).values()} == {(4, 2)}
    (folder / "run.toml").write_text(to_toml(config))
    (plan,) = output(plan_command, str(folder / "run.toml"), "--json")["plans"]
    assert (plan["head_degree"], plan["row_degree"], plan["inner"]) == (4, 2, 4)
