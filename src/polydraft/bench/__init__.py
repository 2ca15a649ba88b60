"""Measurements on real text: prompt sets, how far every rule is from the optimum, and speed (`bench.speed`)."""

from polydraft.bench.bootstrap import Estimate
from polydraft.bench.limits import (
    NODE_CASES,
    TREE_CASES,
    TREE_SHAPES,
    Models,
    NodeCase,
    NodeResult,
    Plan,
    Record,
    Results,
    TreeCase,
    TreeResult,
    all_tables,
    as_document,
    as_lines,
    conditions_of,
    draw_figures,
    fitting,
    keys_of,
    measure,
    summarise,
)
from polydraft.bench.prompts import SHIPPED, Prompt, read_prompt_sets, read_prompts
from polydraft.bench.style import require_matplotlib
from polydraft.bench.table import Table

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
