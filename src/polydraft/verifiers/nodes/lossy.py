"""Lossy rules: faster, and no longer the target's law. Each says what is lost."""

from dataclasses import dataclass
from math import inf

import torch
from jaxtyping import Bool
from torch import Tensor

from polydraft.errors import InvalidParameter, is_whole, require_number
from polydraft.schemes import IID, Scheme, TopK, check_scheme, require_scheme
from polydraft.schemes.scheme import largest_count
from polydraft.theory import containment
from polydraft.verifiers.nodes.speculative import RecursiveRejection, after_rejection
from polydraft.verifiers.outcome_law import Counts, DraftRows, Drafts, OutcomeLaw, Rate, Row


class KeepsLikeliest:
    """Of the drafts that a rule accepts keep the likeliest under the target; if there is none, draw from the target."""

    scheme: Scheme

    def accepts(self, target_probs: Row) -> Bool[Tensor, "*b A"]:
        """Mark the tokens that are accepted."""
        raise NotImplementedError

    def law(self, drafts: Drafts, draft_probs: DraftRows, target_probs: Row) -> OutcomeLaw:
        """Return the outcome law, which keeps one draft or none for certain, the first of equals."""
        passed = self.accepts(target_probs).gather(-1, drafts.clamp_min(0)) & (drafts >= 0)
        mass = target_probs.gather(-1, drafts.clamp_min(0)).where(passed, -torch.ones_like(target_probs[..., :1]))
        best = mass.argmax(dim=-1, keepdim=True)
        any_passed = passed.any(dim=-1, keepdim=True)
        child = torch.zeros_like(mass).scatter(-1, best, 1.0) * any_passed
        return OutcomeLaw(child, target_probs * ~any_passed)

    def acceptance(self, draft_probs: DraftRows, target_probs: Row, counts: Counts) -> Rate:
        """Return the probability that an accepted token is drafted."""
        missed = containment(self.scheme, draft_probs, ~self.accepts(target_probs), counts)
        return (1 - missed).to(target_probs.dtype)


@dataclass(frozen=True)
class TypicalAcceptance(KeepsLikeliest):
    """Keep a draft that the target finds typical: target(x) > min(epsilon, delta exp(-entropy)).

    Problem: accept long runs of plausible tokens; the target's law is given up.
    Rule: of the drafts above the threshold keep the likeliest under the target; if there is none draw from the target.
    The entropy is that of the K + 1 atoms, all tokens off the shortlist counted as one, which is below the
    vocabulary's: the threshold is at least the published one. Medusa keeps the longest path of typical tokens; this
    rule decides node by node.
    Scheme: any; Medusa's drafts are deterministic.
    Exactness: none. **Lossy**: accepted tokens follow the drafter's taste wherever it is plausible, so that sampled
    text loses diversity; at temperature 0 the row is one-hot and the rule is exact.
    Cost: O(K) per node.
    Acceptance: 1 - Q(the tokens at or below the threshold), Q the scheme's containment.
    Source: Medusa, arXiv 2401.10774, section 2.3.1; defaults of its code.

    Args:
        epsilon: a probability that is always typical, in (0, 1].
        delta: the share of exp(-entropy) that is typical, > 0.

    Raises:
        InvalidParameter: a value outside its range.
    """

    scheme: Scheme = TopK()
    epsilon: float = 0.09
    delta: float = 0.3
    name = "typical acceptance"
    lossless = False

    def __post_init__(self) -> None:
        check_scheme(self.scheme, "Typical acceptance")
        require_number("epsilon", self.epsilon, "in (0, 1]", lambda value: 0 < value <= 1)
        require_number("delta", self.delta, "> 0", lambda value: 0 < value < inf)

    def accepts(self, target_probs: Row) -> Bool[Tensor, "*b A"]:
        """Mark the typical tokens."""
        entropy = -torch.xlogy(target_probs, target_probs).sum(dim=-1, keepdim=True)
        return target_probs > (self.delta * (-entropy).exp()).clamp_max(self.epsilon)


@dataclass(frozen=True)
class TopBeta(KeepsLikeliest):
    """Keep a draft that is among the target's `beta` likeliest tokens and nearly as likely as the first.

    Problem: accept what the target might well have said; the target's law is given up.
    Rule: draft x passes if fewer than beta atoms are likelier and log target(x) >= log max target - tau; of those that
    pass keep the likeliest under the target; if there is none draw from the target. All tokens off the shortlist are
    ranked as one atom. SpecDec decodes greedily and emits the likeliest token instead of drawing.
    Scheme: any; SpecDec drafts one argmax per position.
    Exactness: none. **Lossy** unless the row is one-hot: tokens within tau of the best are emitted whenever they are
    drafted, whatever their probability.
    Cost: O(k K) per node.
    Acceptance: 1 - Q(the tokens that do not pass), Q the scheme's containment.
    Source: SpecDec, arXiv 2203.16487, section 3.2; tau in its code is a gap of logits.

    Args:
        beta: how many tokens may pass, >= 1.
        tau: the largest gap of log probabilities, >= 0.

    Raises:
        InvalidParameter: a value outside its range.
    """

    scheme: Scheme = TopK()
    beta: int = 5
    tau: float = 3.0
    name = "top-beta"
    lossless = False

    def __post_init__(self) -> None:
        check_scheme(self.scheme, "The top-beta rule")
        if not is_whole(self.beta) or self.beta < 1:
            raise InvalidParameter(f"beta must be an integer >= 1, but is {self.beta!r}.")
        require_number("tau", self.tau, ">= 0", lambda value: 0 <= value < inf)

    def accepts(self, target_probs: Row) -> Bool[Tensor, "*b A"]:
        """Mark the tokens that pass."""
        highest = target_probs.topk(min(self.beta, target_probs.shape[-1]), dim=-1).values
        near = target_probs.log() >= highest[..., :1].log() - self.tau
        return near & (target_probs >= highest[..., -1:])


@dataclass(frozen=True)
class Lenient:
    """Recursive rejection with a lenience l < 1: accept with probability min(1, target / (l draft)).

    Problem: accept more drafts than the target allows; no token may gain more than a factor 1 / l.
    Rule: RecursiveRejection with the draft row multiplied by l in the tests and residuals: accept x with probability
    min(1, target_i(x) / (l draft(x))), else target_{i+1} = norm((target_i - l draft)+).
    Scheme: `IID`.
    Exactness: none for l < 1. **Lossy**: a single draft's law is tilted towards the drafter, each token up to
    target / l. l = 1 is recursive rejection.
    Cost: O(k K) per node.
    Acceptance: 1 - prod_i (1 - sum_x min(target_i(x) / l, draft(x))).
    Source: arXiv 2211.17192, appendix A.5.

    Args:
        lenience: l, in (0, 1].

    Raises:
        InvalidParameter: a lenience outside its range.
        UnpairedScheme: the scheme is not `IID`.
    """

    lenience: float = 0.5
    scheme: Scheme = IID()
    name = "lenient"
    lossless = False

    def __post_init__(self) -> None:
        require_number("lenience", self.lenience, "in (0, 1]", lambda value: 0 < value <= 1)
        require_scheme(self.scheme, (IID,), "Lenient rejection")

    def law(self, drafts: Drafts, draft_probs: Row, target_probs: Row) -> OutcomeLaw:
        """Return the outcome law of recursive rejection against a smaller draft row."""
        return RecursiveRejection().law(drafts, self.lenience * draft_probs, target_probs)

    def acceptance(self, draft_probs: Row, target_probs: Row, counts: Counts) -> Rate:
        """Return one minus the probability that every draft is rejected."""
        left, missing = target_probs, torch.zeros_like(target_probs[..., 0])
        reached = torch.ones_like(missing)
        for place in range(largest_count(counts)):
            row = self.lenience * draft_probs
            passed = torch.minimum(left, row).sum(dim=-1) / self.lenience
            reached = torch.where(place < counts, reached * (1 - passed), reached)
            left, _, _ = after_rejection(left, missing, row)
        return 1 - reached
