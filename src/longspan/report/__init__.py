"""Reports of plans, manifests of packed rows, and topologies: numbers, tables, text, figures. No torch.

Only figures need matplotlib.
"""

from longspan.report.cells import HIDDEN, cell_map, owner_map
from longspan.report.figure import draw_figure, save_figure
from longspan.report.packs import PackReport
from longspan.report.packs_figure import draw_packs, save_packs
from longspan.report.packs_text import packs_table, print_packs
from longspan.report.plan_report import PlanReport, RankReport, StepReport, describe
from longspan.report.table import plan_table
from longspan.report.terminal import print_plan
from longspan.report.topology_report import TopologyReport, describe_topology
from longspan.report.topology_text import topology_table

__all__ = [
    "HIDDEN",
    "PackReport",
    "PlanReport",
    "RankReport",
    "StepReport",
    "TopologyReport",
    "cell_map",
    "describe",
    "describe_topology",
    "draw_figure",
    "draw_packs",
    "owner_map",
    "packs_table",
    "plan_table",
    "print_packs",
    "print_plan",
    "save_figure",
    "save_packs",
    "topology_table",
]
