"""Subjects of `polydraft bench` beside arms: passes, rules, the trees of heads, and the planner."""

from polydraft.bench.subjects.clock import Progress
from polydraft.bench.subjects.lattice import LatticeOptions, LatticeResult, measure_lattice
from polydraft.bench.subjects.laws import RuleLaw, measure_laws
from polydraft.bench.subjects.optima import OptimumTime, measure_optima
from polydraft.bench.subjects.passes import PassSettings, PassTime, check_room, time_passes
from polydraft.bench.subjects.planner import (
    PlannerOptions,
    PlannerSetting,
    PlannerSpeed,
    measure_planner,
    settings_named,
)
from polydraft.bench.subjects.rows import Rows, rows_of_texts
from polydraft.bench.subjects.rules import DEFAULT, RulesSettings, node_rules_for, tree_rules_for
from polydraft.bench.subjects.shares import RuleShare, measure_shares

__all__ = [
    "DEFAULT",
    "LatticeOptions",
    "LatticeResult",
    "OptimumTime",
    "PassSettings",
    "PassTime",
    "PlannerOptions",
    "PlannerSetting",
    "PlannerSpeed",
    "Progress",
    "Rows",
    "RuleLaw",
    "RuleShare",
    "RulesSettings",
    "check_room",
    "measure_lattice",
    "measure_laws",
    "measure_optima",
    "measure_planner",
    "measure_shares",
    "node_rules_for",
    "rows_of_texts",
    "settings_named",
    "time_passes",
    "tree_rules_for",
]
