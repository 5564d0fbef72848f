"""What the package offers, and that planning starts without torch."""

import subprocess
import sys

import longspan.plan as package

PLANNING = """
import sys
from longspan import Layout, Mask, plan_attention
plan = plan_attention(Layout.zigzag(4096, 8), Mask.documents([96, 4000], window=512), heads=(8, 2))
assert plan.rank_plan(3).stages and plan.imbalance >= 1 and plan.digest and plan.bytes(3, "backward", 64, 2) > 0
usp = plan_attention(plan.layout, plan.mask, "usp", (8, 2), 4, wire_dtype="fp8")
assert usp.rank_plan(3).heads.num_query == 2 and usp.bytes(3, "forward", 64, 2) > 0
assert plan_attention(plan.layout, plan.mask, "auto", (8, 2)).reason
heavy = {name.split(".")[0] for name in sys.modules} & {"torch", "triton", "tensorboard", "tokenizers", "pyarrow"}
assert not heavy, heavy
"""


def test_all_names_exist_and_are_sorted():
    assert package.__all__ == [
        "AUTO", "BALANCED", "LAYOUTS", "ROUTES", "STAGED", "WIRE_DTYPES", "Costs", "HeadShare", "HeadStage", "Layout", "Mask",
        "Phase", "Place", "Plan", "RankPlan", "Runs", "Shape", "Stage", "Step", "Tile", "Transfer", "check_heads", "check_route",
        "check_wire_dtype", "head_stages", "plan_attention", "share_of_heads", "spans_of",
    ]  # fmt: skip
    assert all(hasattr(package, name) for name in package.__all__)


def test_planning_imports_no_torch():
    done = subprocess.run([sys.executable, "-c", PLANNING], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
