"""Layouts, masks, routes, and the plans made from them, with counts of work and traffic. No torch."""

from longspan.plan.comm_dtype import check_comm_dtype
from longspan.plan.head_shares import HeadShare, HeadStage, Place, head_stages
from longspan.plan.layout import Layout, spans_of
from longspan.plan.mask import Mask
from longspan.plan.plan import PHASES, Phase, Plan, check_heads, plan_attention, share_of_heads
from longspan.plan.routes import route_of
from longspan.plan.steps import RankPlan, Runs, Shape, Stage, Step, Tile, Transfer

__all__ = [
    "PHASES",
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
    "check_comm_dtype",
    "check_heads",
    "head_stages",
    "plan_attention",
    "route_of",
    "share_of_heads",
    "spans_of",
]
