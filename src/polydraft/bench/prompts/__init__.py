"""Prompts: the value, rows of JSON, and sets of them: the shipped ones by name, and files."""

from polydraft.bench.prompts.prompt import ALL, Prompt, as_asked, in_turn, template_in_words
from polydraft.bench.prompts.prompt_formats import NAME_FIELDS, prompt_from_row
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
