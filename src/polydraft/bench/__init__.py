"""Measurements on real text: prompt sets, and how far every rule is from the optimum."""

from polydraft.bench.cases import NODE_CASES, TREE_CASES, TREE_SHAPES, NodeCase, TreeCase
from polydraft.bench.figures import draw_figures, require_matplotlib
from polydraft.bench.limits import Plan, Record, fitting, keys_of, measure
from polydraft.bench.positions import Models
from polydraft.bench.prompts import SHIPPED, Prompt, read_prompt_sets, read_prompts
from polydraft.bench.records import Results, conditions_of
from polydraft.bench.summary import Estimate, NodeResult, TreeResult, as_lines, summarise
from polydraft.bench.tables import Table, all_tables, as_document

__all__ = [
    "NODE_CASES",
    "SHIPPED",
    "TREE_CASES",
    "TREE_SHAPES",
    "Estimate",
    "Models",
    "NodeCase",
    "NodeResult",
    "Plan",
    "Prompt",
    "Record",
    "Results",
    "Table",
    "TreeCase",
    "TreeResult",
    "all_tables",
    "as_document",
    "as_lines",
    "conditions_of",
    "draw_figures",
    "fitting",
    "keys_of",
    "measure",
    "read_prompt_sets",
    "read_prompts",
    "require_matplotlib",
    "summarise",
]
