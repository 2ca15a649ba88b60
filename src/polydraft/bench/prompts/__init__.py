"""Prompts: the value, rows of JSON, and sets of them: the shipped ones by name, and files."""

from polydraft.bench.prompts.prompt import (
    ALL,
    NAME_FIELDS,
    Prompt,
    as_asked,
    in_turn,
    prompt_from_row,
    template_in_words,
)
from polydraft.bench.prompts.sets import SHIPPED, USUAL, has_json_lines, read_prompt_sets, read_prompts, read_text

__all__ = [
    "ALL",
    "NAME_FIELDS",
    "SHIPPED",
    "USUAL",
    "Prompt",
    "as_asked",
    "has_json_lines",
    "in_turn",
    "prompt_from_row",
    "read_prompt_sets",
    "read_prompts",
    "read_text",
    "template_in_words",
]
