"""Dynamic policies: trees that grow where the draft is sure, and stop where it is not."""

from polydraft.trees.dynamic.best_first import BestFirst
from polydraft.trees.dynamic.eagle_2 import Eagle2
from polydraft.trees.dynamic.expected import ExpectedAcceptance
from polydraft.trees.dynamic.merged import Merged
from polydraft.trees.dynamic.policy import (
    Drawn,
    DynamicPolicy,
    EstimatingPolicy,
    MergingPolicy,
    Opened,
    PruningPolicy,
    check_policy,
    is_dynamic,
)
from polydraft.trees.dynamic.stopping import (
    EMBEDDED,
    AdaptiveThreshold,
    Classifier,
    Confidence,
    Confident,
    EntropyBound,
    LearningPolicy,
    PathProbability,
    TokenProbability,
    examples,
    fit_classifier,
    policy_after,
    policy_joined,
    policy_of,
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
    "EstimatingPolicy",
    "ExpectedAcceptance",
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
    "policy_of",
]
