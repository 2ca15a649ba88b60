"""Drafters of fixed tokens, which need no model of their own: they know them from text and from earlier steps."""

from polydraft.drafters.text.given import LOOKUP, TextDrafter, given, given_chain, rows_of
from polydraft.drafters.text.guess import Bounds, Guess, merged
from polydraft.drafters.text.ngram import NgramDrafter
from polydraft.drafters.text.predicted import PredictedDrafter
from polydraft.drafters.text.recycling import RecyclingDrafter

__all__ = [
    "LOOKUP",
    "Bounds",
    "Guess",
    "NgramDrafter",
    "PredictedDrafter",
    "RecyclingDrafter",
    "TextDrafter",
    "given",
    "given_chain",
    "merged",
    "rows_of",
]
