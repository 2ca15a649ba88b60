"""Dynamic policies: trees that grow where the draft is sure, and stop where it is not."""

from polydraft.trees.dynamic.adaptive import AdaptiveThreshold, LearningPolicy, policy_after, policy_joined
from polydraft.trees.dynamic.best_first import BestFirst
from polydraft.trees.dynamic.classifier import EMBEDDED, Classifier, examples, fit_classifier
from polydraft.trees.dynamic.confidence import Confidence, EntropyBound, PathProbability, TokenProbability
from polydraft.trees.dynamic.confident import Confident
from polydraft.trees.dynamic.eagle_2 import Eagle2
from polydraft.trees.dynamic.merged import Merged
from polydraft.trees.dynamic.policy import (
    Drawn,
    DynamicPolicy,
    MergingPolicy,
    Opened,
    PruningPolicy,
    check_policy,
    is_dynamic,
)

__all__ = [
    "EMBEDDED",
    "AdaptiveThreshold",
    "BestFirst",
    "Classifier",
    "Confidence",
    "Confident",
    "Drawn",
    "DynamicPolicy",
    "Eagle2",
    "EntropyBound",
    "LearningPolicy",
    "Merged",
    "MergingPolicy",
    "Opened",
    "PathProbability",
    "PruningPolicy",
    "TokenProbability",
    "check_policy",
    "examples",
    "fit_classifier",
    "is_dynamic",
    "policy_after",
    "policy_joined",
]
