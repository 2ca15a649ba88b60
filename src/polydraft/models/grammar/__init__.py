"""Grammars that texts follow: what they are, and their masks over tokens at every node of a tree."""

from polydraft.models.grammar.grammar import Grammar
from polydraft.models.grammar.masks import GrammarLogitsProcessor, grammar_processor

__all__ = ["Grammar", "GrammarLogitsProcessor", "grammar_processor"]
