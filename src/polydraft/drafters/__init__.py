"""Drafters: everything that can propose a token tree."""

from polydraft.drafters.boosted import (
    MEMBERS_FILE,
    MOST_BOOSTED,
    BoostedDrafter,
    boosted_members,
    is_boosted,
    member_folders,
)
from polydraft.drafters.contract import (
    Collects,
    Decoder,
    Defaults,
    Drafter,
    DraftRequest,
    Needs,
    Outside,
    Session,
    SoundDrafter,
    check_target,
    drafters_in,
    drafts_name,
    drafts_under,
    finished,
    has_store,
    is_by_text_alone,
    is_sound,
    known_outside,
    owned_models,
    owned_networks,
    proposes,
    resumed,
    stretches,
)
from polydraft.drafters.draft_kinds import MASKED, drafter_of
from polydraft.drafters.ensemble import EnsembleDrafter
from polydraft.drafters.heads import HeadDrafter, HeadEnds, HeadNetwork, TreePass
from polydraft.drafters.heads.formats.adapter_folders import write_adapter
from polydraft.drafters.heads.formats.blocks.block_writing import write_block
from polydraft.drafters.heads.formats.eagle_folders import write_eagle
from polydraft.drafters.heads.formats.falcon_folders import write_falcon
from polydraft.drafters.heads.formats.head_kinds import (
    check_adapter,
    drafts_inside,
    has_head_inside,
    is_head,
    load_adapter,
    load_head,
)
from polydraft.drafters.heads.formats.last_state_folders import write_medusa
from polydraft.drafters.heads.formats.mtp_folders import has_modules, load_modules, write_mtp
from polydraft.drafters.heads.formats.rider_folders import own_riders, write_pass
from polydraft.drafters.heads.formats.walked.own_walk_folders import write_walk
from polydraft.drafters.heads.formats.walked.walk_folders import write_hydra, write_mlp, write_redrafter
from polydraft.drafters.itself import (
    AdapterDrafter,
    Chunks,
    Keys,
    Mass,
    Recent,
    SelfDrafter,
    SkippingDrafter,
    Snap,
    View,
    own_model,
    tokens_per_work,
)
from polydraft.drafters.jacobi_block import JacobiBlockDrafter
from polydraft.drafters.model import ModelDrafter, NoDraft, model_defaults, runnable
from polydraft.drafters.parallel import ParallelDrafter, SpecDrafter
from polydraft.drafters.rider_drafter import RiderDrafter
from polydraft.drafters.several.by_depth import ByDepthDrafter
from polydraft.drafters.several.hedge import RoutedDrafter, route, route_first, usual_members
from polydraft.drafters.several.merge import MergedDrafter, merge, merge_beside, route_before
from polydraft.drafters.several.nested import NestedDrafter, check_levels
from polydraft.drafters.several.route import LookupFirst
from polydraft.drafters.text.guess import LOOKUP, TextDrafter, given_chain
from polydraft.drafters.text.jacobi import JacobiDrafter
from polydraft.drafters.text.lookahead import LookaheadDrafter
from polydraft.drafters.text.ngram import NgramDrafter
from polydraft.drafters.text.ouroboros import OuroborosDrafter
from polydraft.drafters.text.pool import NgramPool
from polydraft.drafters.text.predicted import Followed, PredictedDrafter
from polydraft.drafters.text.recycling import RecyclingDrafter
from polydraft.drafters.text.stores.segment import StoreVocabulary
from polydraft.drafters.text.stores.store import StoreWriter, TextStore
from polydraft.drafters.text.stores.suffix_store import SuffixStore, flush_stores
from polydraft.drafters.text.suffix import RetrievalDrafter, SuffixDrafter

__all__ = [
    "LOOKUP",
    "MASKED",
    "MEMBERS_FILE",
    "MOST_BOOSTED",
    "AdapterDrafter",
    "BoostedDrafter",
    "ByDepthDrafter",
    "Chunks",
    "Collects",
    "Decoder",
    "Defaults",
    "DraftRequest",
    "Drafter",
    "EnsembleDrafter",
    "Followed",
    "HeadDrafter",
    "HeadEnds",
    "HeadNetwork",
    "JacobiBlockDrafter",
    "JacobiDrafter",
    "Keys",
    "LookaheadDrafter",
    "LookupFirst",
    "Mass",
    "MergedDrafter",
    "ModelDrafter",
    "Needs",
    "NestedDrafter",
    "NgramDrafter",
    "NgramPool",
    "NoDraft",
    "OuroborosDrafter",
    "Outside",
    "ParallelDrafter",
    "PredictedDrafter",
    "Recent",
    "RecyclingDrafter",
    "RetrievalDrafter",
    "RiderDrafter",
    "RoutedDrafter",
    "SelfDrafter",
    "Session",
    "SkippingDrafter",
    "Snap",
    "SoundDrafter",
    "SpecDrafter",
    "StoreVocabulary",
    "StoreWriter",
    "SuffixDrafter",
    "SuffixStore",
    "TextDrafter",
    "TextStore",
    "TreePass",
    "View",
    "boosted_members",
    "check_adapter",
    "check_levels",
    "check_target",
    "drafter_of",
    "drafters_in",
    "drafts_inside",
    "drafts_name",
    "drafts_under",
    "finished",
    "flush_stores",
    "given_chain",
    "has_head_inside",
    "has_modules",
    "has_store",
    "is_boosted",
    "is_by_text_alone",
    "is_head",
    "is_sound",
    "known_outside",
    "load_adapter",
    "load_head",
    "load_modules",
    "member_folders",
    "merge",
    "merge_beside",
    "model_defaults",
    "own_model",
    "own_riders",
    "owned_models",
    "owned_networks",
    "proposes",
    "resumed",
    "route",
    "route_before",
    "route_first",
    "runnable",
    "stretches",
    "tokens_per_work",
    "usual_members",
    "write_adapter",
    "write_block",
    "write_eagle",
    "write_falcon",
    "write_hydra",
    "write_medusa",
    "write_mlp",
    "write_mtp",
    "write_pass",
    "write_redrafter",
    "write_walk",
]
