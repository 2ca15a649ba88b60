"""Enumeration of one node: all drafts, their probabilities and the rule's outcome law given each."""

from dataclasses import dataclass
from functools import cache

import torch
from scipy.optimize import linprog
from torch import Tensor

from polydraft.schemes import Product, Scheme, enumerate_drafts
from polydraft.verifiers import NodeVerifier, OutcomeLaw, ScalableVerifier


def atoms_of(target: Tensor, draft: Tensor, tail: float, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Add the tail atom, of target mass `tail`; give a scheme of several rows the draft row and its mirror image."""
    rows = torch.stack([draft, draft.flip(0)]) if isinstance(scheme, Product) else draft
    return torch.cat([target * (1 - tail), torch.full_like(target[:1], tail)]), torch.nn.functional.pad(rows, (0, 1))


@dataclass(frozen=True)
class Enumeration:
    """Everything that can happen at one node: the drafts, their probabilities and the outcome law given each."""

    target: Tensor
    draft: Tensor
    drafts: Tensor
    probability: Tensor
    outcome: OutcomeLaw

    @property
    def emitted(self) -> Tensor:
        return self.probability @ self.outcome.emitted(self.drafts)

    @property
    def error(self) -> float:
        return float((self.emitted - self.target).abs().max())

    @property
    def acceptance(self) -> float:
        return float(self.probability @ self.outcome.child.sum(dim=-1))


def enumerated(
    rule: NodeVerifier, k: int, target: Tensor, draft: Tensor, tail: float = 0.0, scheme: Scheme | None = None
) -> Enumeration:
    """Enumerate a node whose target has mass `tail` off the shortlist; by default with the rule's own scheme."""
    target, draft = atoms_of(target, draft, tail, scheme or rule.scheme)
    drafts, probability = enumerate_drafts(scheme or rule.scheme, draft[..., :-1], k)
    outcome = rule.law(drafts, draft.expand(len(drafts), *draft.shape), target.expand(len(drafts), -1))
    return Enumeration(target, draft, drafts, probability, outcome)


def mean_shares(rule: ScalableVerifier, k: int, mass: Tensor, draft: Tensor) -> tuple[Tensor, Tensor]:
    """Return the shares of all drafts, and by token what they come to on average over the drafts."""
    drafts, probability = enumerate_drafts(rule.scheme, draft[..., :-1], k)
    shares = rule.shares(drafts, draft.expand(len(drafts), *draft.shape), mass.expand(len(drafts), -1))
    by_token = torch.zeros(len(drafts), len(mass)).to(mass).scatter_add(-1, drafts.clamp_min(0), shares)
    return shares, probability @ by_token


def best_acceptance(case: Enumeration) -> float:
    """Solve the transport of drafted sets to target tokens: a linear program over pairs (set, token in it)."""
    sets: dict[frozenset[int], float] = {}
    for drafts, probability in zip(case.drafts.tolist(), case.probability.tolist(), strict=True):
        drafted = frozenset(drafts) - {-1}
        sets[drafted] = sets.get(drafted, 0.0) + probability
    return _transported(tuple(sets), tuple(sets.values()), tuple(case.target.tolist()))


@cache
def _transported(sets: tuple[frozenset[int], ...], supply: tuple[float, ...], demand: tuple[float, ...]) -> float:
    moves = [(place, token) for place, drafted in enumerate(sets) for token in drafted]
    at_most = [*supply, *demand]
    limits = torch.zeros(len(at_most), len(moves), dtype=torch.float64)
    for column, (place, token) in enumerate(moves):
        limits[place, column] = limits[len(sets) + token, column] = 1
    solution = linprog([-1.0] * len(moves), limits.numpy(), at_most, method="highs")
    assert solution.status == 0
    return -solution.fun
