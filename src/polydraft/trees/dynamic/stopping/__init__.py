"""Ending growth where the draft is not sure: by a threshold, a learnt one, or a classifier."""

from polydraft.trees.dynamic.stopping.adaptive import (
    AdaptiveThreshold,
    LearningPolicy,
    policy_after,
    policy_joined,
    policy_of,
)
from polydraft.trees.dynamic.stopping.classifier import EMBEDDED, Classifier, examples, fit_classifier
from polydraft.trees.dynamic.stopping.confidence import (
    Confidence,
    EntropyBound,
    PathProbability,
    TokenProbability,
    surely_accepted,
)
from polydraft.trees.dynamic.stopping.confident import Confident

__all__ = [
    "EMBEDDED",
    "AdaptiveThreshold",
    "Classifier",
    "Confidence",
    "Confident",
    "EntropyBound",
    "LearningPolicy",
    "PathProbability",
    "TokenProbability",
    "examples",
    "fit_classifier",
    "policy_after",
    "policy_joined",
    "policy_of",
    "surely_accepted",
]
