"""Costs, memory and traffic of a run before it starts, and the planner that resolves "auto". No torch."""

from longspan.advise.choose import Costs

__all__ = ["Costs"]
