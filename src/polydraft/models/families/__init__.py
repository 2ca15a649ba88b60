"""The types of causal models that transformers knows, each as a tiny random model."""

from polydraft.models.families.tiny_families import (
    WINDOW,
    installed_version,
    registered_types,
    their_greedy_text,
    tiny_of_type,
)

__all__ = ["WINDOW", "installed_version", "registered_types", "their_greedy_text", "tiny_of_type"]
