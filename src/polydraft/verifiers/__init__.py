"""Verification rules: which draft to keep, so that the output keeps the target's law."""

from polydraft.verifiers.checks import check_rows
from polydraft.verifiers.nodes.importance_weighted import ImportanceWeighted
from polydraft.verifiers.nodes.k_seq import KSeq
from polydraft.verifiers.nodes.lossy import Lenient, TopBeta, TypicalAcceptance
from polydraft.verifiers.nodes.naive import NaiveMatch
from polydraft.verifiers.nodes.optimal import Optimal
from polydraft.verifiers.nodes.race import Race
from polydraft.verifiers.nodes.recursive_without_replacement import RecursiveRejectionWithoutReplacement
from polydraft.verifiers.nodes.spec_hub_rule import SpecHubRule
from polydraft.verifiers.nodes.speculative import RecursiveRejection, SpeculativeSampling
from polydraft.verifiers.nodes.top_then_sample import TopThenSampleRule
from polydraft.verifiers.outcome_law import (
    NodeVerifier,
    OutcomeLaw,
    ScalableVerifier,
    SharesRule,
    Traits,
    TreeVerifier,
    has_marginal,
    most_drafts,
    require_few,
    require_greedy,
    traits,
)
from polydraft.verifiers.selection.rule import SelectionRule
from polydraft.verifiers.selection.value_curves import ValueCurves
from polydraft.verifiers.trees.block_verification import BlockVerification, ByShape
from polydraft.verifiers.trees.lifts import BottomUp, PathLaw, PathVerifier, TopDown, expected_accepted
from polydraft.verifiers.trees.rollback import Rollback
from polydraft.verifiers.trees.shared_noise import SharedNoise
from polydraft.verifiers.trees.traversal import TraversalVerification
from polydraft.verifiers.trees.tree_bound import FAMILIES, PriceFamily, cross_fitted, dual_values
from polydraft.verifiers.trees.valued import Valued

__all__ = [
    "FAMILIES",
    "BlockVerification",
    "BottomUp",
    "ByShape",
    "ImportanceWeighted",
    "KSeq",
    "Lenient",
    "NaiveMatch",
    "NodeVerifier",
    "Optimal",
    "OutcomeLaw",
    "PathLaw",
    "PathVerifier",
    "PriceFamily",
    "Race",
    "RecursiveRejection",
    "RecursiveRejectionWithoutReplacement",
    "Rollback",
    "ScalableVerifier",
    "SelectionRule",
    "SharedNoise",
    "SharesRule",
    "SpecHubRule",
    "SpeculativeSampling",
    "TopBeta",
    "TopDown",
    "TopThenSampleRule",
    "Traits",
    "TraversalVerification",
    "TreeVerifier",
    "TypicalAcceptance",
    "ValueCurves",
    "Valued",
    "check_rows",
    "cross_fitted",
    "dual_values",
    "expected_accepted",
    "has_marginal",
    "most_drafts",
    "require_few",
    "require_greedy",
    "traits",
]
