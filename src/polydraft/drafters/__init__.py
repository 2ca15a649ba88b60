"""Drafters: everything that can propose a token tree."""

from polydraft.drafters.ensemble import EnsembleDrafter, EnsembleState
from polydraft.drafters.lookup_first import LookupFirst
from polydraft.drafters.model import ModelDrafter, ModelDraftState
from polydraft.drafters.ngram import NgramDrafter, continuation, given_chain
from polydraft.drafters.none import NoDraft
from polydraft.drafters.protocol import Drafter, ResumingDrafter, Session, SoundDrafter, Text, is_sound, resumed
from polydraft.drafters.scorer import TreeScorer

__all__ = [
    "Drafter",
    "EnsembleDrafter",
    "EnsembleState",
    "LookupFirst",
    "ModelDraftState",
    "ModelDrafter",
    "NgramDrafter",
    "NoDraft",
    "ResumingDrafter",
    "Session",
    "SoundDrafter",
    "Text",
    "TreeScorer",
    "continuation",
    "given_chain",
    "is_sound",
    "resumed",
]
