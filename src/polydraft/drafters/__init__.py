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
from polydraft.drafters.model import ModelDrafter, model_defaults
from polydraft.drafters.none import NoDraft
from polydraft.drafters.protocol import Decoder, Defaults, Drafter, Session, SoundDrafter, is_sound, resumed
from polydraft.drafters.routing import (
    LookupFirst,
    MergedDrafter,
    RoutedDrafter,
    merge,
    merge_beside,
    route,
    route_first,
    usual_members,
)
from polydraft.drafters.text import (
    JacobiDrafter,
    LookaheadDrafter,
    NgramDrafter,
    NgramPool,
    OuroborosDrafter,
    PredictedDrafter,
    RecyclingDrafter,
    TextDrafter,
    given_chain,
)

__all__ = [
    "BlockDrafter",
    "Decoder",
    "Defaults",
    "Drafter",
    "EagleDrafter",
    "EnsembleDrafter",
    "JacobiDrafter",
    "LookaheadDrafter",
    "LookupFirst",
    "MedusaDrafter",
    "MergedDrafter",
    "ModelDrafter",
    "NgramDrafter",
    "NgramPool",
    "NoDraft",
    "OuroborosDrafter",
    "PredictedDrafter",
    "RecyclingDrafter",
    "RoutedDrafter",
    "Session",
    "SoundDrafter",
    "TextDrafter",
    "given_chain",
    "is_head",
    "is_sound",
    "load_head",
    "merge",
    "merge_beside",
    "model_defaults",
    "resumed",
    "route",
    "route_first",
    "usual_members",
    "write_block",
    "write_eagle",
    "write_medusa",
]
