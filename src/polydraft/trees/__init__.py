"""Token trees: the value, its masks, shapes, shape search and policies, growth and drawings."""

from polydraft.trees.drawing import draw_svg, draw_text
from polydraft.trees.dynamic import (
    AdaptiveThreshold,
    BestFirst,
    Classifier,
    Confident,
    DynamicPolicy,
    Eagle2,
    EntropyBound,
    Merged,
    PathProbability,
    TokenProbability,
    check_policy,
    examples,
    fit_classifier,
    is_dynamic,
    policy_after,
    policy_joined,
)
from polydraft.trees.frontier import Frontier, Propose
from polydraft.trees.grow import grow
from polydraft.trees.mask import causal_mask, tree_mask
from polydraft.trees.policies import (
    Chain,
    ChoosingPolicy,
    Fixed,
    TreePolicy,
    TrunkThenBranch,
    Widths,
    largest_shape,
)
from polydraft.trees.riders import Riders
from polydraft.trees.search import Acceptance, best_shape, expected_tokens, fastest_shape, step_seconds
from polydraft.trees.shape import EAGLE_25, MEDUSA_63, Topology, TreeShape, topology
from polydraft.trees.stacked import Piece, Pieces, by_row, in_pieces, stacked_riders, stacked_tree
from polydraft.trees.tree import Draft, Resume, TokenTree, Verdict

__all__ = [
    "EAGLE_25",
    "MEDUSA_63",
    "Acceptance",
    "AdaptiveThreshold",
    "BestFirst",
    "Chain",
    "ChoosingPolicy",
    "Classifier",
    "Confident",
    "Draft",
    "DynamicPolicy",
    "Eagle2",
    "EntropyBound",
    "Fixed",
    "Frontier",
    "Merged",
    "PathProbability",
    "Piece",
    "Pieces",
    "Propose",
    "Resume",
    "Riders",
    "TokenProbability",
    "TokenTree",
    "Topology",
    "TreePolicy",
    "TreeShape",
    "TrunkThenBranch",
    "Verdict",
    "Widths",
    "best_shape",
    "by_row",
    "causal_mask",
    "check_policy",
    "draw_svg",
    "draw_text",
    "examples",
    "expected_tokens",
    "fastest_shape",
    "fit_classifier",
    "grow",
    "in_pieces",
    "is_dynamic",
    "largest_shape",
    "policy_after",
    "policy_joined",
    "stacked_riders",
    "stacked_tree",
    "step_seconds",
    "topology",
    "tree_mask",
]
