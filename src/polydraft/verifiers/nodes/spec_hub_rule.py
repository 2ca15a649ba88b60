"""SpecHub's own rule: four stages over pairs that contain the likeliest token."""

from dataclasses import dataclass

import torch

from polydraft.probs import without
from polydraft.schemes import Scheme, SpecHub, hub_of, require_scheme
from polydraft.verifiers.outcome_law import (
    Counts,
    Drafts,
    Row,
    Shares,
    SharesRule,
    accept_ratio,
    accepted_alone,
    at_draft,
)


@dataclass(frozen=True)
class SpecHubRule(SharesRule):
    """Match the target with the pairs (x, a) and (a, x) around the hub a: first x in both kinds, then a in both.

    Problem: two drafts, one of them the likeliest token a of the draft row q: (x, a) with probability q(x) and (a, x)
    with probability q(a) q(x) / (1 - q(a)), x never a; a target mass m of total <= 1 and draft capacity 1: accept one
    draft so that no token is accepted more often than its mass.
    Rule, in four stages, each on what the stages before have left of mass and pairs:
      1. of (x, a) accept x with probability min(1, m(x) / q(x));
      2. of (a, x) accept x with probability min(1, (m(x) - q(x))+ / Pr[(a, x)]);
      3. of the pairs (a, x) left, of probability R, accept a with probability min(1, m(a) / R);
      4. of the pairs (x, a) left, of probability S, accept a with probability min(1, (m(a) - R)+ / S).
    What is left of the target is the residual. One draft is verified as in speculative sampling.
    Scheme: `SpecHub`, at most two drafts.
    Exactness: every stage moves mass from pairs to one of their tokens, never more than either has left.
    Cost: O(K) per node.
    Acceptance: m(a) + sum over x != a of min(m(x), q(x) / (1 - q(a))): that of TopThenSample, the optimum of both
    schemes, which have the same unordered pairs. TopThenSampleRule reaches it in one stage.
    Source: arXiv 2411.05289, section 4, and its reference code (which has further shortcuts that are not exact).

    Raises:
        UnpairedScheme: the scheme is not `SpecHub`.
    """

    scheme: Scheme = SpecHub()
    name = "spechub"
    most_drafts = 2
    lossless = True

    def __post_init__(self) -> None:
        require_scheme(self.scheme, (SpecHub,), "The SpecHub rule")

    def shares(self, drafts: Drafts, draft_probs: Row, target_mass: Row) -> Shares:
        """Return the stages' acceptance of each draft: stages 1 and 4 for (x, a), stages 2 and 3 for (a, x)."""
        first = drafts[..., 0]
        lone = accepted_alone(target_mass, draft_probs, first)
        if drafts.shape[-1] == 1:
            return lone.unsqueeze(-1)
        hub, second = hub_of(draft_probs).clamp_min(0), drafts[..., 1]
        onto_hub, from_hub = _pairs(draft_probs)
        after, at_hub = (target_mass - onto_hub).clamp_min(0), target_mass.gather(-1, hub).squeeze(-1)
        from_hub_left = (from_hub - after).clamp_min(0).sum(dim=-1)
        onto_hub_left = (onto_hub - target_mass).clamp_min(0).sum(dim=-1)
        hub_first = first == hub.squeeze(-1)
        other = second.where(hub_first, first)
        stage_1 = at_draft(accept_ratio(target_mass, onto_hub), other)
        stage_2 = at_draft(accept_ratio(after, from_hub), other)
        stage_3 = accept_ratio(at_hub, from_hub_left)
        stage_4 = accept_ratio((at_hub - from_hub_left).clamp_min(0), onto_hub_left)
        of_other = stage_2.where(hub_first, stage_1)
        of_hub = (1 - of_other) * stage_3.where(hub_first, stage_4)
        pair = torch.stack([of_hub.where(hub_first, of_other), of_other.where(hub_first, of_hub)], dim=-1)
        alone = torch.stack([lone, torch.zeros_like(lone)], dim=-1)
        shares = pair.where((second >= 0).unsqueeze(-1), alone)
        return torch.nn.functional.pad(shares, (0, drafts.shape[-1] - 2))

    def marginal(self, draft_probs: Row, target_mass: Row, counts: Counts) -> Row:
        """Return min(m, q / (1 - q(a))) off the hub and min(m(a), what that leaves) at it; min(m, q) for one draft."""
        counts = torch.minimum(counts, (draft_probs > 0).sum(dim=-1))
        hub = hub_of(draft_probs).clamp_min(0)
        onto_hub, from_hub = _pairs(draft_probs)
        accepted = torch.minimum(target_mass, onto_hub + from_hub)
        room = (1 - accepted.sum(dim=-1, keepdim=True)).clamp_min(0)
        pair = accepted.scatter(-1, hub, torch.minimum(target_mass.gather(-1, hub), room))
        alone = torch.minimum(target_mass, draft_probs) * (counts == 1).unsqueeze(-1)
        return pair.where((counts > 1).unsqueeze(-1), alone)


def _pairs(draft_probs: Row) -> tuple[Row, Row]:
    """Return the probabilities of the pairs (x, a) and (a, x) for every x; zero at the hub a."""
    hub = hub_of(draft_probs)
    others = without(draft_probs, hub)
    total = others.sum(dim=-1, keepdim=True)
    share = others / total.where(total > 0, torch.ones_like(total))
    return others, draft_probs.gather(-1, hub.clamp_min(0)) * share
