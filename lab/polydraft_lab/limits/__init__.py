"""The limits of drafting on real text: what every rule accepts at every position, and what any rule could."""

from polydraft_lab.limits.cases import TREE_SHAPES, NodeCase, TreeCase, node_cases, tree_cases
from polydraft_lab.limits.figures import draw_figures
from polydraft_lab.limits.measuring import LimitsSettings, Record, fitting, keys_of, measure
from polydraft_lab.limits.positions import Models
from polydraft_lab.limits.records import Results, conditions_of
from polydraft_lab.limits.summary import NodeResult, TreeResult, as_lines, summarise
from polydraft_lab.limits.tables import all_tables, as_document, footnotes

__all__ = [
    "TREE_SHAPES",
    "LimitsSettings",
    "Models",
    "NodeCase",
    "NodeResult",
    "Record",
    "Results",
    "TreeCase",
    "TreeResult",
    "all_tables",
    "as_document",
    "as_lines",
    "conditions_of",
    "draw_figures",
    "fitting",
    "footnotes",
    "keys_of",
    "measure",
    "node_cases",
    "summarise",
    "tree_cases",
]
