"""Measurements on real text: prompt sets, tables and intervals, and speed (`bench.speed`)."""

from polydraft.bench.prompts import SHIPPED, USUAL, Prompt, read_prompt_sets, read_prompts
from polydraft.bench.table import Table

__all__ = [
    "SHIPPED",
    "USUAL",
    "Prompt",
    "Table",
    "read_prompt_sets",
    "read_prompts",
]
