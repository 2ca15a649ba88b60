"""Drafters of fixed tokens, which need no model of their own: they know them from text and from earlier steps."""

from polydraft.drafters.text.given import LOOKUP, TextDrafter, given, given_chain, rows_of
from polydraft.drafters.text.guess import Bounds, Guess
from polydraft.drafters.text.ngram import NgramDrafter

__all__ = [
    "LOOKUP",
    "Bounds",
    "Guess",
    "NgramDrafter",
    "TextDrafter",
    "given",
    "given_chain",
    "rows_of",
]
