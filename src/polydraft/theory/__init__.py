"""Theory: how likely drafts are to lie in a set, the largest acceptance rate that follows, and what it is worth."""

from polydraft.theory.containment import containment, containment_chain, inclusion
from polydraft.theory.optimum import (
    OptimalSet,
    minimising_order,
    optimal_acceptance,
    optimal_set,
    top_then_sample_acceptance,
    two_draft_acceptance,
    two_drafts_suffice,
)
from polydraft.theory.quadrature import TimeNodes, time_nodes
from polydraft.theory.speedup import (
    best_length,
    block_efficiency,
    can_gain,
    divergence,
    expected_accepted_length,
    least_gain,
    lenient_acceptance,
    operations_factor,
    time_factor,
    tokens_per_call,
)
from polydraft.theory.successive_law import SuccessiveLaw
from polydraft.theory.transport import drafted_sets, flow_acceptance, lp_acceptance
from polydraft.theory.tree_program import tree_optimum

__all__ = [
    "OptimalSet",
    "SuccessiveLaw",
    "TimeNodes",
    "best_length",
    "block_efficiency",
    "can_gain",
    "containment",
    "containment_chain",
    "divergence",
    "drafted_sets",
    "expected_accepted_length",
    "flow_acceptance",
    "inclusion",
    "least_gain",
    "lenient_acceptance",
    "lp_acceptance",
    "minimising_order",
    "operations_factor",
    "optimal_acceptance",
    "optimal_set",
    "time_factor",
    "time_nodes",
    "tokens_per_call",
    "top_then_sample_acceptance",
    "tree_optimum",
    "two_draft_acceptance",
    "two_drafts_suffice",
]
