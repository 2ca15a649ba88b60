"""Growing policies: trees that grow where the draft is sure, and stop where it is not."""

from polydraft.trees.growing.budgets import BestFirst, Eagle2, ExpectedAcceptance
from polydraft.trees.growing.growth import Drawn, GrowingPolicy, Opened
from polydraft.trees.growing.merged import Merged
from polydraft.trees.growing.stopping import (
    EMBEDDED,
    AdaptiveThreshold,
    Classifier,
    Confidence,
    Confident,
    EntropyBound,
    PathProbability,
    TokenProbability,
    examples,
    fit_classifier,
)

__all__ = [
    "EMBEDDED",
    "AdaptiveThreshold",
    "BestFirst",
    "Classifier",
    "Confidence",
    "Confident",
    "Drawn",
    "Eagle2",
    "EntropyBound",
    "ExpectedAcceptance",
    "GrowingPolicy",
    "Merged",
    "Opened",
    "PathProbability",
    "TokenProbability",
    "examples",
    "fit_classifier",
]
