"""Subjects of `polydraft bench` beside arms: passes, rules, the trees of heads, the planner, pipelines."""

from polydraft_lab.subjects.clock import Progress
from polydraft_lab.subjects.lattice import LatticeOptions, LatticeResult, measure_lattice
from polydraft_lab.subjects.laws import RuleLaw, measure_laws
from polydraft_lab.subjects.optima import OptimumTime, measure_optima
from polydraft_lab.subjects.passes import PassSettings, PassTime, check_room, time_passes
from polydraft_lab.subjects.pipelines import PipelineSettings, PipelineTime, simulate_pipelines
from polydraft_lab.subjects.planner import (
    PlannerOptions,
    PlannerSetting,
    PlannerSpeed,
    measure_planner,
    settings_named,
)
from polydraft_lab.subjects.rows import Rows, rows_of_texts
from polydraft_lab.subjects.rules import DEFAULT, RulesSettings, node_rules_for, tree_rules_for
from polydraft_lab.subjects.shares import RuleShare, measure_shares

__all__ = [
    "DEFAULT",
    "LatticeOptions",
    "LatticeResult",
    "OptimumTime",
    "PassSettings",
    "PassTime",
    "PipelineSettings",
    "PipelineTime",
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
    "simulate_pipelines",
    "time_passes",
    "tree_rules_for",
]
