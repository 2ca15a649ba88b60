"""Token trees: the value, its masks, shapes, shape search and policies, growth and drawings."""

from polydraft.trees.drawing import draw_svg, draw_text
from polydraft.trees.grow import Frontier, Propose, grow
from polydraft.trees.mask import causal_mask, tree_mask
from polydraft.trees.policies import Chain, Fixed, TreePolicy, Widths, parse_policy
from polydraft.trees.search import Acceptance, best_shape, expected_tokens, fastest_shape, step_seconds
from polydraft.trees.shape import EAGLE_25, MEDUSA_63, Topology, TreeShape, topology
from polydraft.trees.tree import Draft, TokenTree, Verdict

__all__ = [
    "EAGLE_25",
    "MEDUSA_63",
    "Acceptance",
    "Chain",
    "Draft",
    "Fixed",
    "Frontier",
    "Propose",
    "TokenTree",
    "Topology",
    "TreePolicy",
    "TreeShape",
    "Verdict",
    "Widths",
    "best_shape",
    "causal_mask",
    "draw_svg",
    "draw_text",
    "expected_tokens",
    "fastest_shape",
    "grow",
    "parse_policy",
    "step_seconds",
    "topology",
    "tree_mask",
]
