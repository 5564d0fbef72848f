"""What the package offers, and that planning starts without torch."""

import subprocess
import sys

import longspan.plan as package

PLANNING = """
import sys
from longspan import Layout, Mask, plan_attention
plan = plan_attention(Layout.zigzag(4096, 8), Mask.documents([96, 4000], window=512), heads=(8, 2))
assert plan.rank_plan(3).stages and plan.imbalance >= 1 and plan.digest and plan.bytes(3, "backward", 64, 2) > 0
usp = plan_attention(plan.layout, plan.mask, "usp", (8, 2), 4, comm_dtype="fp8")
assert usp.rank_plan(3).heads.num_query == 2 and usp.bytes(3, "forward", 64, 2) > 0
from longspan.advise import Planner
assert Planner(8, route="auto", heads=(8, 2)).plan(plan.layout, plan.mask).reason
from longspan.topology import ModelShape, Nodes, Topology, check_model
topology = Topology.of(1024, tp=8, cp=4, pp=2)
check_model(topology, ModelShape(32, 4096, 32, 8, 128, 128256, 14336), gradient_accumulation_steps=2, ranks_per_node=8)
assert len(topology.groups("tp-dp-cp")) == 2 and not Nodes(topology, 8).warnings()
heavy = {name.split(".")[0] for name in sys.modules} & {"torch", "triton", "tensorboard", "tokenizers", "pyarrow"}
assert not heavy, heavy
"""


def test_all_names_exist_and_are_sorted():
    assert package.__all__ == [
        "PHASES", "HeadShare", "HeadStage", "Layout", "Mask", "Phase", "Place", "Plan", "RankPlan", "Runs", "Shape", "Stage",
        "Step", "Tile", "Transfer", "check_comm_dtype", "check_heads", "head_stages", "plan_attention", "route_of",
        "share_of_heads", "spans_of",
    ]  # fmt: skip
    assert all(hasattr(package, name) for name in package.__all__)


def test_planning_imports_no_torch():
    done = subprocess.run([sys.executable, "-c", PLANNING], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
