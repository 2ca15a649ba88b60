"""Planning: what steps bring and take, in steps or measured before, and the policies that choose trees by it."""

from polydraft.planning.costs import Costs, Curve, Spent, StepCosts
from polydraft.planning.goodput import PLANNERS, Goodput
from polydraft.planning.lessons import Lesson, lessons_of
from polydraft.planning.plan import PairPlan, TunedTree, load_plan
from polydraft.planning.planner import Opening, Planner, arms_beside, relative_cost

__all__ = [
    "PLANNERS",
    "Costs",
    "Curve",
    "Goodput",
    "Lesson",
    "Opening",
    "PairPlan",
    "Planner",
    "Spent",
    "StepCosts",
    "TunedTree",
    "arms_beside",
    "lessons_of",
    "load_plan",
    "relative_cost",
]
