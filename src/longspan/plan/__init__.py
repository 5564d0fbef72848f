"""Layouts, masks and routes, made into plans; counts of their work and traffic. No torch."""

from longspan.plan.layout import Layout, spans_of
from longspan.plan.mask import Mask
from longspan.plan.plan import ROUTES, Phase, Plan, check_heads, plan_attention
from longspan.plan.steps import RankPlan, Runs, Shape, Step, Tile, Transfer

__all__ = [
    "ROUTES",
    "Layout",
    "Mask",
    "Phase",
    "Plan",
    "RankPlan",
    "Runs",
    "Shape",
    "Step",
    "Tile",
    "Transfer",
    "check_heads",
    "plan_attention",
    "spans_of",
]
