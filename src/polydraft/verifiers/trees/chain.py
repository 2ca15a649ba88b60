"""A short cut for chains: with one draft a node, most rules are speculative sampling, which needs few rows.

Speculative sampling accepts a draft with probability min(1, target / draft). If the drafts are drawn from whole rows,
the path follows from the drafts' own probabilities. Only the row at its end is read, for the next token.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.probs import sample
from polydraft.trees import Draft, Verdict
from polydraft.verifiers.law import NodeVerifier, accept_ratio
from polydraft.verifiers.nodes.importance_weighted import ImportanceWeighted
from polydraft.verifiers.nodes.k_seq import KSeq
from polydraft.verifiers.nodes.optimal import Optimal
from polydraft.verifiers.nodes.race import Race
from polydraft.verifiers.nodes.recursive_iid import RecursiveRejection
from polydraft.verifiers.nodes.recursive_without_replacement import RecursiveRejectionWithoutReplacement
from polydraft.verifiers.nodes.spec_hub import SpecHubRule
from polydraft.verifiers.nodes.speculative import SpeculativeSampling, is_drawn
from polydraft.verifiers.nodes.top_then_sample import TopThenSampleRule

BEST_WITH_ONE = (
    Optimal,
    Race,
    ImportanceWeighted,
    KSeq,
    SpecHubRule,
    TopThenSampleRule,
    SpeculativeSampling,
    RecursiveRejection,
    RecursiveRejectionWithoutReplacement,
)
"""The rules that are speculative sampling at a node with one draft, which is optimal there."""


def is_whole(draft: Draft) -> bool:
    """Tell whether a draft is a chain drawn from whole rows.

    A verifier may look at the grown tree for this, because the short cut has the same law given the draft. It must not
    choose another law by what was drawn (`ByShape` says why).
    """
    return draft.whole and draft.tree.topology.width == 1


def is_speculative(rule: NodeVerifier, draft: Draft) -> bool:
    """Tell whether a draft is a chain drawn from whole rows, and the rule verifies it by speculative sampling.

    The test is for the exact class: a class derived from one of these rules may have another law.
    """
    return is_whole(draft) and type(rule) in BEST_WITH_ONE and is_drawn(rule.scheme)


@dataclass(frozen=True, eq=False)
class WholeChain:
    """A chain of D drafts from whole rows.

    Args:
        there: which nodes but the leaf have a draft.
        rows: the draft rows.
        target: the target's probability of each draft.
        drawn: the draft's.
    """

    there: Bool[Tensor, "b D"]
    rows: Float[Tensor, "b n V"]
    target: Float[Tensor, "b D"]
    drawn: Float[Tensor, "b D"]

    @classmethod
    def of(cls, draft: Draft, target_probs: Float[Tensor, "b n V"]) -> "WholeChain":
        """Look the drafts' probabilities up."""
        rows = draft.probs if draft.probs.dim() == 3 else draft.probs[:, :, 0]
        place = draft.atoms[:, 1:].clamp_min(0).unsqueeze(-1)
        target, drawn = (of[:, :-1].gather(-1, place).squeeze(-1) for of in (target_probs, rows))
        return cls(draft.tree.valid[:, 1:], rows, target, drawn)

    def path(self, length: Int[Tensor, "b"]) -> Int[Tensor, "b D"]:
        """Return the first nodes below the root, padded with -1."""
        nodes = torch.arange(1, self.there.shape[-1] + 1, device=length.device)
        return nodes.where(nodes <= length.unsqueeze(-1), -1)


def by_chain(draft: Draft, target_probs: Float[Tensor, "b n V"], uniforms: Float[Tensor, "b n+1"]) -> Verdict:
    """Return the verdict of speculative sampling: that of the walk over all nodes' laws, for the same uniforms.

    A draft's own probabilities decide whether it is accepted, so only the row at which the path ends is read whole.
    The first uniform draws the token at a leaf.
    """
    chain, every = WholeChain.of(draft, target_probs), torch.arange(len(uniforms), device=uniforms.device)
    accepted = accept_ratio(chain.target, chain.drawn).double() * chain.there
    length = (uniforms[:, 1:-1] < accepted).cumprod(dim=-1).sum(dim=-1)
    at_end = torch.nn.functional.pad(torch.stack([accepted, chain.there]), (0, 1))[:, every, length]
    dense = target_probs[every, length]
    rest = (dense - chain.rows[every, length] * at_end[1].unsqueeze(-1).to(dense.dtype)).clamp_min_(0)
    left = ((uniforms[every, length + 1] - at_end[0]) / (1 - at_end[0]).clamp_min(1e-300)).clamp(0, 1)
    left = left.where(length < accepted.shape[-1], uniforms[:, 0])
    return Verdict(chain.path(length), length, sample_rest(rest, dense, left))


def sample_rest(
    rest: Float[Tensor, "b V"], target_probs: Float[Tensor, "b V"], uniforms: Float[Tensor, "b"]
) -> Int[Tensor, "b"]:
    """Draw the token that follows the path; where rounding left no mass, from the target."""
    return sample(rest.where(rest.sum(dim=-1, keepdim=True) > 0, target_probs), uniforms)
