"""A verifier that remembers what chances the drafts had, for those who plan by it."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from polydraft.probs import Noise
from polydraft.trees import Draft, Verdict
from polydraft.verifiers import TreeVerifier
from polydraft.verifiers.law import BestAlone
from polydraft.verifiers.nodes.speculative import is_drawn


@dataclass(frozen=True)
class Outlook:
    """The chances of a step's drafts, mean of the rows.

    Args:
        won: how many levels a row could expect to win.
        faced: how many levels of drafts it faced.
    """

    won: float
    faced: float


class Witness:
    """Wrap a verifier so that `outlook` holds the chances of the last drafts, or None where they are not plain.

    Of a node with one sampled draft the chance is the overlap of both laws, sum of min(p, q), whatever came of it. That
    is known at every node of a chain, also below a rejected draft, so that one step tells more than its result does.
    """

    def __init__(self, verifier: TreeVerifier) -> None:
        self.verifier = verifier
        self.scheme = verifier.scheme
        self.name = verifier.name
        self.lossless = verifier.lossless
        self.outlook: Outlook | None = None

    def verify(self, draft: Draft, target_probs: Float[Tensor, "b n V"], noise: Noise) -> Verdict:
        """Verify, and remember the chances."""
        self.outlook = outlook(draft, target_probs)
        return self.verifier.verify(draft, target_probs, noise)


def keeps_overlaps(verifier: TreeVerifier) -> bool:
    """Tell whether a rule accepts the sampled drafts of a chain as often as both laws overlap, or more."""
    return is_drawn(verifier.scheme) and isinstance(verifier, BestAlone) and verifier.best_alone


def outlook(draft: Draft, target_probs: Float[Tensor, "b n V"]) -> Outlook | None:
    """Return the chances of a chain of sampled drafts under a rule that keeps overlaps; None for other trees."""
    if draft.tree.tokens.shape[-1] == 1 or draft.tree.topology.width > 1 or draft.probs.dim() > 3:
        return None
    inner, there = draft.tree.topology.inner, draft.tree.valid[:, 1:]
    target, listed = target_probs[:, :inner], draft.shortlist[:, :inner]
    if not draft.whole:
        target = target.gather(-1, listed.clamp_min(0)).where(listed >= 0, 0)
    chances = torch.minimum(draft.probs[:, :inner], target).sum(dim=-1)
    won, faced = torch.stack([chances.where(there, 0), there.to(chances.dtype)]).sum(dim=-1).mean(dim=-1).tolist()
    return Outlook(won, faced)
