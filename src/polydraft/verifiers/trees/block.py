"""Block verification: the optimal rule for a chain of drafts."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from polydraft.errors import UnpairedScheme
from polydraft.probs import Noise
from polydraft.schemes import IID, Scheme
from polydraft.trees import Draft, Verdict
from polydraft.verifiers.law import at_draft
from polydraft.verifiers.trees.certain import certain_verdict
from polydraft.verifiers.trees.emission import plain
from polydraft.verifiers.trees.law import PathLaw
from polydraft.verifiers.trees.trials import Division, first_success, share_of, trials


@dataclass(frozen=True)
class BlockVerification:
    """Accept the longest beginning of a chain x_1 ... x_L whose trial succeeds, tried from its end.

    Rule: with a_0 = 1 and a_i = min(1, a_{i-1} target(x_i) / draft(x_i)), the first i drafts are kept with probability
    Z_i / (Z_i + 1 - a_i), where Z_i = sum_x (a_i target(x) - draft(x))+ with the rows after x_i; all L with probability
    a_L. After i drafts the next token is drawn from norm((a_i target - draft)+), after L from the target.
    Scheme: one independent draft per node.
    Exactness: theorem 1 of the source.
    Cost: O(K) per node.
    Acceptance: the mean length is the largest that any rule reaches on a chain (theorem 2 of the source).
    Source: arXiv 2403.10444, algorithm 2.

    Raises:
        UnpairedScheme: a node has more than one draft.
    """

    scheme: Scheme = IID()
    name = "block verification"
    lossless = True

    def verify(self, draft: Draft, target_probs: Float[Tensor, "b n V"], noise: Noise) -> Verdict:
        """Keep the longest beginning that succeeds."""
        if draft.tree.tokens.shape[-1] == 1:
            return plain(target_probs, noise)
        certain = certain_verdict(draft, target_probs) if draft.tree.topology.width == 1 else None
        return certain or first_success(trials(draft, target_probs, _divide), draft, target_probs, noise)

    def path_law(self, draft: Draft, target_probs: Float[Tensor, "b n V"]) -> PathLaw:
        """Return the law of the verdict given the draft."""
        return trials(draft, target_probs, _divide).law(draft.tree.topology.post_order)


def _divide(
    drafts: Int[Tensor, "b f k"],
    draft_probs: Float[Tensor, "b f A"],
    target_probs: Float[Tensor, "b f A"],
    scale: Float[Tensor, "b f"],
) -> Division:
    if drafts.shape[-1] > 1:
        raise UnpairedScheme(
            f"Block verification keeps part of a chain, but the tree has a node with {drafts.shape[-1]} drafts; use a "
            "chain, or BottomUp."
        )
    draft, mass = drafts.squeeze(-1), scale.unsqueeze(-1) * target_probs
    there = (draft >= 0).to(mass.dtype)
    ratio = share_of(at_draft(mass, draft), at_draft(draft_probs, draft)) * there
    return Division(ratio.unsqueeze(-1), (mass - draft_probs * there.unsqueeze(-1)).clamp_min(0), scale)
