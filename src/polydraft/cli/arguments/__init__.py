"""What the commands take: options that they share, and checks of places, names and combinations."""

from polydraft.cli.clashes import (
    LONE_DRAFT,
    LONE_MODEL,
    both_outputs,
    idle_excerpts,
    idle_filters,
    idle_template,
    refuse_clashes,
)

__all__ = [
    "LONE_DRAFT",
    "LONE_MODEL",
    "both_outputs",
    "idle_excerpts",
    "idle_filters",
    "idle_template",
    "refuse_clashes",
]
