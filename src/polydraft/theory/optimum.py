"""The largest acceptance rate that any exact rule can reach, by a scan over prefixes."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.errors import VocabularyMismatch
from polydraft.probs import check_probs
from polydraft.schemes import Scheme, check_scheme, require_draft_count, set_law_of
from polydraft.theory.containment import certain_and_drawn, containment_chain
from polydraft.theory.submodular import minimising_order
from polydraft.theory.theory_rows import prefix_sums


@dataclass(frozen=True, eq=False)
class OptimalSet:
    """The set H of tokens that limits the acceptance, and the acceptance that it allows.

    Args:
        order: the tokens, those that H takes in first at the beginning.
        size: the number of tokens in H, a prefix of the order.
        target_mass: the target mass of H.
        containment: Q(H), the probability that all drafts lie in H.
        acceptance: 1 + target_mass - containment.
    """

    order: Int[Tensor, "*b A"]
    size: Int[Tensor, "*b"]
    target_mass: Float[Tensor, "*b"]
    containment: Float[Tensor, "*b"]
    acceptance: Float[Tensor, "*b"]


def optimal_set(
    scheme: Scheme,
    draft_probs: Float[Tensor, "*rows A"],
    target_mass: Float[Tensor, "*b A"],
    counts: Int[Tensor, "*b"],
) -> OptimalSet:
    """Return the set H that minimises m(H) - Q(H) for a target mass m of total at most one.

    A draft is accepted with probability at most 1 + min_H [m(H) - Q(H)], and some rule reaches it: by max-flow
    min-cut, because drafts inside H can only become tokens of H (arXiv 2502.18779, equation 8, for m a distribution;
    the whole set, with m(H) - Q(H) = |m| - 1, is one of the H). The tokens drafted for certain are in every H but the
    empty one; the others enter by draft / target descending, an infinite ratio first and draft zero last (theorem 6).
    `Product` drafts have no such order, so H is found by submodular minimisation, row after row.

    Shapes: rows are "*b A", for `Product` "*b J A". Cost: O(A log A), and O(k A) per node of the quadrature without
    replacement. The result is in float64.

    Raises:
        NotConverged: the minimisation for `Product` drafts did not come to an end.
        UnpairedScheme: the scheme's containment is not known.
    """
    draft_probs, target_mass = draft_probs.double(), target_mass.double()
    if scheme.several_rows:
        order = _order_by_search(scheme, draft_probs, target_mass, counts)
    else:
        order = _order_by_ratio(scheme, draft_probs, target_mass, counts)
    chain = containment_chain(scheme, draft_probs, order, counts)
    mass = prefix_sums(target_mass.gather(-1, order))
    gap, size = (mass - chain).min(dim=-1)
    at = size.unsqueeze(-1)
    return OptimalSet(
        order, size, mass.gather(-1, at).squeeze(-1), chain.gather(-1, at).squeeze(-1), (1 + gap).clamp(0, 1)
    )


def optimal_acceptance(
    draft_probs: Float[Tensor, "*rows V"], target_probs: Float[Tensor, "*b W"], scheme: Scheme, k: int
) -> Float[Tensor, "*b"]:
    """Return alpha* = 1 + min_H [target(H) - Q(H)], the largest acceptance rate of k drafts.

    Shapes: V = W; draft rows are "*b V", for `Product` "*b J V". See `optimal_set`.

    Raises:
        InvalidParameter: k is not an integer from 1 to 4095, or the scheme is none.
        InvalidProbabilities: a row is not a distribution.
        NotConverged: the minimisation for `Product` drafts did not come to an end.
        UnpairedScheme: the scheme's containment is not known.
        VocabularyMismatch: the rows differ in length.
    """
    check_scheme(scheme, "The optimal acceptance")
    require_draft_count("k", k)
    if draft_probs.shape[-1] != target_probs.shape[-1]:
        raise VocabularyMismatch(
            f"The draft rows have {draft_probs.shape[-1]} tokens and the target rows {target_probs.shape[-1]}; "
            "put both over one vocabulary."
        )
    check_probs(draft_probs, "draft_probs")
    check_probs(target_probs, "target_probs")
    target = target_probs.double()
    counts = torch.full(target.shape[:-1], k, device=target.device)
    return optimal_set(scheme, draft_probs, target / target.sum(dim=-1, keepdim=True), counts).acceptance


def _order_by_ratio(
    scheme: Scheme, draft_probs: Float[Tensor, "*b A"], target_mass: Float[Tensor, "*b A"], counts: Int[Tensor, "*b"]
) -> Int[Tensor, "*b A"]:
    certain, _ = certain_and_drawn(set_law_of(scheme), draft_probs, counts)
    ratio = (draft_probs / target_mass).where(draft_probs > 0, -1.0).masked_fill(certain, torch.inf)
    return (-ratio.view(torch.int64)).argsort(dim=-1, stable=True)  # floats >= 0 sort like their bits, but faster


def _order_by_search(
    scheme: Scheme, draft_probs: Float[Tensor, "*b J A"], target_mass: Float[Tensor, "*b A"], counts: Int[Tensor, "*b"]
) -> Int[Tensor, "*b A"]:
    rows, size = draft_probs.shape[-2:]
    nodes = draft_probs.cpu().reshape(-1, rows, size), target_mass.cpu().reshape(-1, size), counts.cpu().flatten()
    orders = [minimising_order(scheme, draft, target, count) for draft, target, count in zip(*nodes, strict=True)]
    return torch.stack(orders).view(target_mass.shape).to(target_mass.device) if orders else target_mass.long()
