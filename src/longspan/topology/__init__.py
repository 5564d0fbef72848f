"""Parallel axes, their groups of ranks, nodes, and checks of the degrees against a model. No torch."""

from longspan.topology.axes import ORDER, Topology
from longspan.topology.fits import SCHEDULES, check_model
from longspan.topology.model_shape import ExpertsShape, ModelShape
from longspan.topology.nodes import BUSIEST_FIRST, Nodes

__all__ = ["BUSIEST_FIRST", "ORDER", "SCHEDULES", "ExpertsShape", "ModelShape", "Nodes", "Topology", "check_model"]
