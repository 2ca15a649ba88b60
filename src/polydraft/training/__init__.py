"""Training: the embedded pair's corpus, recipe, losses, measurements and export; draft heads for any target."""

from polydraft.training.consistency.consistency_loss import ConsistencySettings
from polydraft.training.consistency.consistency_making import ConsistencyPlan, MadeConsistent, make_consistent
from polydraft.training.exits.exit_loss import ExitQuality, ExitSettings
from polydraft.training.exits.exit_making import ExitPlan, MadeExits, make_exits
from polydraft.training.export import Quality, export_pair, measure_quality
from polydraft.training.heads.head_making import HeadPlan, MadeHead, calls_in_words, make_head, usual_form
from polydraft.training.heads.loop import Drafting, HeadRecipe
from polydraft.training.heads.makers import MAKERS
from polydraft.training.heads.new_heads import LOSSES, HeadSize
from polydraft.training.heads.shards import WritingPlan
from polydraft.training.pair import (
    PairRecipe,
    PairShape,
    Stage,
    distillation_loss,
    next_token_loss,
    overlap_loss,
    train_pair,
)
from polydraft.training.token_files import OwnText, write_own_text

__all__ = [
    "LOSSES",
    "MAKERS",
    "ConsistencyPlan",
    "ConsistencySettings",
    "Drafting",
    "ExitPlan",
    "ExitQuality",
    "ExitSettings",
    "HeadPlan",
    "HeadRecipe",
    "HeadSize",
    "MadeConsistent",
    "MadeExits",
    "MadeHead",
    "OwnText",
    "PairRecipe",
    "PairShape",
    "Quality",
    "Stage",
    "WritingPlan",
    "calls_in_words",
    "distillation_loss",
    "export_pair",
    "make_consistent",
    "make_exits",
    "make_head",
    "measure_quality",
    "next_token_loss",
    "overlap_loss",
    "train_pair",
    "usual_form",
    "write_own_text",
]
