"""Estimates of time, memory and traffic of a run before it starts, and the planner that resolves "auto". No torch."""

from longspan.advise.costs import Costs
from longspan.advise.planner import Planner

__all__ = ["Costs", "Planner"]
