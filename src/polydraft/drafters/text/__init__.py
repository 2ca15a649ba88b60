"""Drafters of fixed tokens, which need no model of their own: they know them from text and from earlier steps."""

from polydraft.drafters.text.given import LOOKUP, TextDrafter, given, given_chain, rows_of
from polydraft.drafters.text.guess import Bounds, Guess
from polydraft.drafters.text.ngram import NgramDrafter
from polydraft.drafters.text.retrieval import RetrievalDrafter
from polydraft.drafters.text.stores import StoreWriter, SuffixStore, TextStore, Vocabulary
from polydraft.drafters.text.suffix import SuffixDrafter

__all__ = [
    "LOOKUP",
    "Bounds",
    "Guess",
    "NgramDrafter",
    "RetrievalDrafter",
    "StoreWriter",
    "SuffixDrafter",
    "SuffixStore",
    "TextDrafter",
    "TextStore",
    "Vocabulary",
    "given",
    "given_chain",
    "rows_of",
]
