"""Planners: policies that choose the tree of every step by what steps bring and take."""

from polydraft.engine.planner.costs import Costs, Spent
from polydraft.engine.planner.goodput import Goodput
from polydraft.engine.planner.planner import Opening, Planner, arms_beside, relative_cost
from polydraft.engine.planner.words import PLANNERS

__all__ = [
    "PLANNERS",
    "Costs",
    "Goodput",
    "Opening",
    "Planner",
    "Spent",
    "arms_beside",
    "relative_cost",
]
