"""Drafters: everything that can propose a token tree."""

from polydraft.drafters.model import ModelDrafter, ModelDraftState
from polydraft.drafters.ngram import NgramDrafter, continuation, given_chain
from polydraft.drafters.none import NoDraft
from polydraft.drafters.protocol import Drafter, Session, Text

__all__ = [
    "Drafter",
    "ModelDraftState",
    "ModelDrafter",
    "NgramDrafter",
    "NoDraft",
    "Session",
    "Text",
    "continuation",
    "given_chain",
]
