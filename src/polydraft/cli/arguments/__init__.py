"""What the commands take: options that they share, and checks of places, names and combinations."""

from polydraft.cli.arguments.clashes import both_outputs, idle_excerpts, idle_filters, idle_template, refuse_clashes
from polydraft.cli.arguments.places import folder_to_write, to_read, to_write, to_write_beside

__all__ = [
    "both_outputs",
    "folder_to_write",
    "idle_excerpts",
    "idle_filters",
    "idle_template",
    "refuse_clashes",
    "to_read",
    "to_write",
    "to_write_beside",
]
