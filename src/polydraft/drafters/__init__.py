"""Drafters: everything that can propose a token tree."""

from polydraft.drafters.ensemble import EnsembleDrafter
from polydraft.drafters.heads import (
    BlockDrafter,
    EagleDrafter,
    MedusaDrafter,
    is_head,
    load_head,
    write_block,
    write_eagle,
    write_medusa,
)
from polydraft.drafters.lookup_first import LookupFirst
from polydraft.drafters.model import ModelDrafter, model_defaults
from polydraft.drafters.none import NoDraft
from polydraft.drafters.protocol import Decoder, Defaults, Drafter, Session, SoundDrafter, is_sound, resumed
from polydraft.drafters.text import (
    NgramDrafter,
    RetrievalDrafter,
    StoreWriter,
    SuffixDrafter,
    SuffixStore,
    TextStore,
    Vocabulary,
    given_chain,
)

__all__ = [
    "BlockDrafter",
    "Decoder",
    "Defaults",
    "Drafter",
    "EagleDrafter",
    "EnsembleDrafter",
    "LookupFirst",
    "MedusaDrafter",
    "ModelDrafter",
    "NgramDrafter",
    "NoDraft",
    "RetrievalDrafter",
    "Session",
    "SoundDrafter",
    "StoreWriter",
    "SuffixDrafter",
    "SuffixStore",
    "TextStore",
    "Vocabulary",
    "given_chain",
    "is_head",
    "is_sound",
    "load_head",
    "model_defaults",
    "resumed",
    "write_block",
    "write_eagle",
    "write_medusa",
]
