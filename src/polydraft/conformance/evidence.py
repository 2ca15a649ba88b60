"""Evidence that samples do not follow a law: a test martingale, valid whenever one stops to look at it.

Let p be the law of the next n tokens and let N(x) count the samples equal to x. For any other law r, fixed before the
samples are seen, the likelihood ratio prod_x (r(x) / p(x))^N(x) has mean one under p, and so has every mixture of such
ratios; each is a martingale in the number of samples. So by Ville's inequality

    Pr[the evidence ever reaches 1 / alpha | samples follow p] <= alpha,

however often one looks and whenever one stops. The alternatives that are mixed here:

* For every prefix length j <= n: the law of the first j tokens is drawn from a Dirichlet distribution centred on the
  target's, with concentrations from 10 to 655360. The ratio is in closed form, for counts N and concentration c
  prod_x [Gamma(c p(x) + N(x)) / (Gamma(c p(x)) p(x)^N(x))] Gamma(c) / Gamma(c + N).
  A large concentration tests against laws close by, as needed for many samples.
* The target at another temperature, ten of them from 0.5 to 2.

Several prompts are taken together in two ways, half the weight each: the product over prompts for every alternative
(a bias that all prompts share), and the average over prompts (a bias of one prompt).

Source: Ville's inequality and test martingales, arXiv 1906.07801; Dirichlet mixtures, arXiv 2011.03567.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, log

import torch
from jaxtyping import Float
from torch import Tensor

CONCENTRATIONS = tuple(10.0 * 4**power for power in range(9))
TEMPERATURES = (0.5, 0.7, 0.8, 0.9, 0.95, 1.05, 1.1, 1.25, 1.5, 2.0)
SMALLEST = 1e-300
"""Outcomes less likely than this count as impossible."""


@dataclass(frozen=True, eq=False)
class JointLaw:
    """The law of the next n tokens after one prompt.

    Args:
        probs: one axis of the vocabulary's size per token.
    """

    probs: Float[Tensor, "..."]

    def of_first(self, tokens: int) -> Float[Tensor, " x"]:
        """Return the law of the first few tokens, as a vector."""
        return self.probs.reshape(self.probs.shape[0] ** tokens, -1).sum(dim=-1)

    def at_temperature(self, temperature: float) -> Float[Tensor, " x"]:
        """Return the joint law if every next-token law were taken at another temperature, as a vector."""
        size = self.probs.shape[0]
        tempered = torch.ones(1, dtype=torch.float64)
        for tokens in range(1, self.probs.dim() + 1):
            rows = self.of_first(tokens).view(-1, size)
            rows = (rows / rows.sum(dim=-1, keepdim=True).clamp_min(SMALLEST)) ** (1 / temperature)
            rows = rows / rows.sum(dim=-1, keepdim=True).clamp_min(SMALLEST)
            tempered = (tempered.unsqueeze(-1) * rows).flatten()
        return tempered


def dirichlet_evidence(
    law: Float[Tensor, " x"], counts: Float[Tensor, "*b x"], concentration: float
) -> Float[Tensor, "*b"]:
    """Return the log likelihood ratio of counts: a Dirichlet mixture centred on the law, against the law itself.

    Infinite where an impossible outcome occurred.
    """
    prior = concentration * law.clamp_min(SMALLEST)
    gained = torch.lgamma(prior + counts) - torch.lgamma(prior) - counts * law.clamp_min(SMALLEST).log()
    total = counts.sum(dim=-1)
    size = torch.tensor(concentration, dtype=torch.float64)
    ratio = gained.sum(dim=-1) - torch.lgamma(size + total) + torch.lgamma(size)
    impossible = ((counts > 0) & (law < SMALLEST)).any(dim=-1)
    return ratio.masked_fill(impossible, inf)


class Evidence:
    """What the counts of several prompts say against their laws; alternatives are weighed up front.

    Args:
        laws: the target's joint law after every prompt, all of one shape.
    """

    def __init__(self, laws: Sequence[JointLaw]) -> None:
        self.laws = laws
        self.tokens = laws[0].probs.dim()
        families = self.tokens + 1
        prefixes = [1 / families / len(CONCENTRATIONS)] * (self.tokens * len(CONCENTRATIONS))
        tempered = [1 / families / len(TEMPERATURES)] * len(TEMPERATURES)
        self.log_weights = torch.tensor([*prefixes, *tempered], dtype=torch.float64).log()
        self.tilts = [self._tilts(law) for law in laws]

    def log_e(self, counts: Sequence[Float[Tensor, "*b x"]]) -> Float[Tensor, "*b"]:
        """Return the logarithm of the evidence: below log(1 / alpha) at all times, but for a chance of alpha.

        Args:
            counts: per prompt, how often each outcome occurred, in one or several experiments.
        """
        each = torch.stack([self._alternatives(*one) for one in zip(self.laws, self.tilts, counts, strict=True)])
        impossible = each.isposinf().any(dim=-1).any(dim=0)
        each = each.masked_fill(impossible.unsqueeze(-1), 0.0)  # infinite ones would meet others in sums
        shared = torch.logsumexp(self.log_weights + each.sum(dim=0), dim=-1)
        alone = torch.logsumexp(self.log_weights + each, dim=-1)
        average = torch.logsumexp(alone, dim=0) - log(len(counts))
        return (torch.logaddexp(shared, average) - log(2)).masked_fill(impossible, inf)

    @staticmethod
    def _tilts(law: JointLaw) -> Float[Tensor, "t x"]:
        base = law.probs.flatten().clamp_min(SMALLEST).log()
        tempered = torch.stack([law.at_temperature(value) for value in TEMPERATURES])
        return tempered.clamp_min(SMALLEST).log() - base

    def _alternatives(
        self, law: JointLaw, tilts: Float[Tensor, "t x"], counts: Float[Tensor, "*b x"]
    ) -> Float[Tensor, "*b a"]:
        ratios: list[Tensor] = []
        for tokens in range(1, self.tokens + 1):
            marginal = law.of_first(tokens)
            seen = counts.unflatten(-1, (len(marginal), -1)).sum(dim=-1)
            ratios += [dirichlet_evidence(marginal, seen, value) for value in CONCENTRATIONS]
        return torch.cat([torch.stack(ratios, dim=-1), counts @ tilts.T], dim=-1)
