"""Ending growth where the draft is not sure: by a threshold, a learnt one, or a classifier."""

from polydraft.trees.growing.stopping.adaptive import AdaptiveThreshold
from polydraft.trees.growing.stopping.classifier import EMBEDDED, Classifier, examples, fit_classifier
from polydraft.trees.growing.stopping.confidence import (
    Confidence,
    EntropyBound,
    PathProbability,
    TokenProbability,
    surely_accepted,
)
from polydraft.trees.growing.stopping.confident import Confident

__all__ = [
    "EMBEDDED",
    "AdaptiveThreshold",
    "Classifier",
    "Confidence",
    "Confident",
    "EntropyBound",
    "PathProbability",
    "TokenProbability",
    "examples",
    "fit_classifier",
    "surely_accepted",
]
