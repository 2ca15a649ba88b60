"""Training: the embedded pair's corpus, recipe, losses, measurements and export."""

from polydraft.training.export import export_pair
from polydraft.training.losses import distillation_loss, next_token_loss, overlap_loss
from polydraft.training.measure import Quality, measure_quality
from polydraft.training.own_text import OwnText, write_own_text
from polydraft.training.pair import PairRecipe, Shape, Stage, train_pair

__all__ = [
    "OwnText",
    "PairRecipe",
    "Quality",
    "Shape",
    "Stage",
    "distillation_loss",
    "export_pair",
    "measure_quality",
    "next_token_loss",
    "overlap_loss",
    "train_pair",
    "write_own_text",
]
