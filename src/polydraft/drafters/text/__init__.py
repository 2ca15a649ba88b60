"""Drafters of fixed tokens, which need no model of their own: they know them from text and from earlier steps."""

from polydraft.drafters.text.guess import (
    LOOKUP,
    Bounds,
    GivenDrafter,
    Guess,
    TextDrafter,
    given,
    given_chain,
    merged,
    rows_of,
)
from polydraft.drafters.text.jacobi import JacobiDrafter
from polydraft.drafters.text.lookahead import LookaheadDrafter
from polydraft.drafters.text.ngram import NgramDrafter
from polydraft.drafters.text.ouroboros import OuroborosDrafter
from polydraft.drafters.text.pool import NgramPool
from polydraft.drafters.text.predicted import Followed, PredictedDrafter
from polydraft.drafters.text.recycling import RecyclingDrafter
from polydraft.drafters.text.retrieval import RetrievalDrafter
from polydraft.drafters.text.stores import StoreVocabulary, StoreWriter, SuffixStore, TextStore, flush_stores
from polydraft.drafters.text.suffix import SuffixDrafter

__all__ = [
    "LOOKUP",
    "Bounds",
    "Followed",
    "GivenDrafter",
    "Guess",
    "JacobiDrafter",
    "LookaheadDrafter",
    "NgramDrafter",
    "NgramPool",
    "OuroborosDrafter",
    "PredictedDrafter",
    "RecyclingDrafter",
    "RetrievalDrafter",
    "StoreVocabulary",
    "StoreWriter",
    "SuffixDrafter",
    "SuffixStore",
    "TextDrafter",
    "TextStore",
    "flush_stores",
    "given",
    "given_chain",
    "merged",
    "rows_of",
]
