"""A plan as numbers, table, text drawing and figure. No torch; matplotlib only when a figure is asked for."""

from longspan.report.cells import HIDDEN, cell_map, owner_map
from longspan.report.figure import draw_figure, save_figure
from longspan.report.record import PlanReport, RankReport, StepReport, describe
from longspan.report.table import plan_table
from longspan.report.terminal import print_plan

__all__ = [
    "HIDDEN",
    "PlanReport",
    "RankReport",
    "StepReport",
    "cell_map",
    "describe",
    "draw_figure",
    "owner_map",
    "plan_table",
    "print_plan",
    "save_figure",
]
