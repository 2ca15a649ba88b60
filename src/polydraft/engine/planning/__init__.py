"""Planning: measure what a pair of models accepts and costs on this machine, and choose trees by it."""

from polydraft.engine.planning.acceptance import Tally, Visit, tally, visits_of
from polydraft.engine.planning.costs import Curve, StepCosts, time_draft, time_target
from polydraft.engine.planning.identity import Machine, ModelIdentity, PairIdentity
from polydraft.engine.planning.plan import PairPlan, Prediction, TunedTree, load_plan, searched
from polydraft.engine.planning.tune import Effort, planned, tune

__all__ = [
    "Curve",
    "Effort",
    "Machine",
    "ModelIdentity",
    "PairIdentity",
    "PairPlan",
    "Prediction",
    "StepCosts",
    "Tally",
    "TunedTree",
    "Visit",
    "load_plan",
    "planned",
    "searched",
    "tally",
    "time_draft",
    "time_target",
    "tune",
    "visits_of",
]
