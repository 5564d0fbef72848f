"""Layouts, masks and routes, made into plans; counts of their work and traffic; the topology of a run. No torch."""

from longspan.plan.choose import Costs
from longspan.plan.fits import SCHEDULES, ModelShape, check_model
from longspan.plan.heads import HeadShare, HeadStage, Place, head_stages
from longspan.plan.layout import BALANCED, LAYOUTS, Layout, spans_of
from longspan.plan.mask import Mask
from longspan.plan.nodes import BUSIEST_FIRST, Nodes
from longspan.plan.plan import Phase, Plan, check_heads, plan_attention, share_of_heads
from longspan.plan.routes import AUTO, ROUTES, STAGED, check_route
from longspan.plan.steps import RankPlan, Runs, Shape, Stage, Step, Tile, Transfer
from longspan.plan.topology import ORDER, Topology
from longspan.plan.wire import WIRE_DTYPES, check_wire_dtype

__all__ = [
    "AUTO",
    "BALANCED",
    "BUSIEST_FIRST",
    "LAYOUTS",
    "ORDER",
    "ROUTES",
    "SCHEDULES",
    "STAGED",
    "WIRE_DTYPES",
    "Costs",
    "HeadShare",
    "HeadStage",
    "Layout",
    "Mask",
    "ModelShape",
    "Nodes",
    "Phase",
    "Place",
    "Plan",
    "RankPlan",
    "Runs",
    "Shape",
    "Stage",
    "Step",
    "Tile",
    "Topology",
    "Transfer",
    "check_heads",
    "check_model",
    "check_route",
    "check_wire_dtype",
    "head_stages",
    "plan_attention",
    "share_of_heads",
    "spans_of",
]
