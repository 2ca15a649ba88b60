"""Planning: measure what a pair of models accepts and costs on this machine, and choose trees by it."""

from polydraft.engine.planner.curves import Curve
from polydraft.engine.planning.plan import PairPlan, TunedTree, load_plan
from polydraft.engine.planning.tune import Effort, planned, tune

__all__ = [
    "Curve",
    "Effort",
    "PairPlan",
    "TunedTree",
    "load_plan",
    "planned",
    "tune",
]
