"""Layouts, masks and routes, made into plans; counts of their work and traffic. No torch."""

from longspan.plan.comm_dtype import WIRE_DTYPES, check_wire_dtype
from longspan.plan.head_shares import HeadShare, HeadStage, Place, head_stages
from longspan.plan.layout import BALANCED, LAYOUTS, Layout, spans_of
from longspan.plan.mask import Mask
from longspan.plan.plan import Phase, Plan, check_heads, plan_attention, share_of_heads
from longspan.plan.routes import AUTO, ROUTES, STAGED, check_route
from longspan.plan.steps import RankPlan, Runs, Shape, Stage, Step, Tile, Transfer

__all__ = [
    "AUTO",
    "BALANCED",
    "LAYOUTS",
    "ROUTES",
    "STAGED",
    "WIRE_DTYPES",
    "HeadShare",
    "HeadStage",
    "Layout",
    "Mask",
    "Phase",
    "Place",
    "Plan",
    "RankPlan",
    "Runs",
    "Shape",
    "Stage",
    "Step",
    "Tile",
    "Transfer",
    "check_heads",
    "check_route",
    "check_wire_dtype",
    "head_stages",
    "plan_attention",
    "share_of_heads",
    "spans_of",
]
