"""Evidence against a law by betting on features of tokens: valid whenever one stops, within a stated tolerance.

For a feature f in [0, 1] with mean mu_t under the law, a sign s and a stake l_t chosen before x_t, the capital

    K = prod_t (1 + l_t (s (f(x_t) - mu_t) - eta)),    0 <= l_t < 1 / (mu_t + eta) or 1 / (1 - mu_t + eta)

has mean at most one as long as the server's own mean of f is within eta of mu_t in every place: so for every server
whose law of a token is within total variation eta of the copy's, as other kernels and precisions make it. A mixture of
such capitals with weights fixed beforehand has mean at most one too, so by Ville's inequality it ever reaches
1 / alpha with probability alpha at most, however often one looks.

Source: testing by betting, arXiv 2010.09686; Ville's inequality and test martingales, arXiv 1906.07801.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt

import torch

from polydraft.conformance.http.features import PLACES, Observations
from polydraft.errors import require_number

STAKES = (0.02, 0.05, 0.12, 0.3, 0.8, 3.0)
MOST_OF_CAPITAL = 0.95
"""The share of the capital that a single token may cost."""
ANYWHERE = 0.6
"""The weight of features that are looked at in all places."""
DIRECTIONS = ("too often", "too seldom")
SHOWN = 5
LARGEST = 690.0


@dataclass(frozen=True)
class TokenCount:
    """How often a token was expected and observed in a place."""

    token: int
    text: str
    expected: float
    observed: int


@dataclass(frozen=True)
class Culprit:
    """What gave a server away: the feature whose capital is largest, and tokens that are most unlike the law there.

    Args:
        feature: what is bet on.
        direction: "too often" or "too seldom".
        place: where.
        expected, observed: its mean share under the law and in the texts.
        e_value: of this bet alone.
        tokens: those furthest from what was expected.
    """

    feature: str
    direction: str
    place: str
    expected: float
    observed: float
    e_value: float
    tokens: tuple[TokenCount, ...]


class Wallet:
    """The capitals of all bets.

    Args:
        names: the features.
        size: of the vocabulary.
        tolerance: eta, the largest total variation a token that is not to be told.
    """

    def __init__(self, names: tuple[str, ...], size: int, tolerance: float) -> None:
        require_number("tolerance", tolerance, "in [0, 0.5)", lambda value: 0 <= value < 0.5)
        self.names, self.tolerance = names, tolerance
        self.logs = torch.zeros(len(names), len(PLACES), 2, len(STAKES), dtype=torch.float64)
        by_place = torch.full((len(PLACES),), (1 - ANYWHERE) / (len(PLACES) - 1), dtype=torch.float64)
        by_place[0] = ANYWHERE
        self.weights = (by_place / len(names) / 2 / len(STAKES)).log().view(1, -1, 1, 1)
        self.expected = torch.zeros(len(PLACES), size, dtype=torch.float64)
        self.observed = torch.zeros(len(PLACES), size, dtype=torch.float64)
        self.sums = torch.zeros(3, len(names), len(PLACES), dtype=torch.float64)
        self.tokens = 0

    def add(self, seen: Observations, text: Sequence[int]) -> None:
        """Take a text."""
        gap = seen.values - seen.means
        signs = torch.tensor([1.0, -1.0], dtype=torch.float64).view(2, 1, 1, 1)
        least = torch.stack([seen.means, 1 - seen.means]).unsqueeze(2) + self.tolerance  # what a token can cost
        stakes = torch.tensor(STAKES, dtype=torch.float64).view(1, 1, -1, 1)
        stakes = torch.minimum(stakes, MOST_OF_CAPITAL / least.clamp_min(1e-12))
        gained = (stakes * (signs * gap.unsqueeze(1) - self.tolerance)).log1p() * seen.seen.unsqueeze(1)
        places = seen.places.double()
        self.logs += torch.einsum("sflt,ct->fcsl", gained, places)
        weighted = places.T
        counted = seen.seen.double()
        self.sums += torch.stack(
            [(seen.values * counted) @ weighted, (seen.means * counted) @ weighted, counted @ weighted]
        )
        self.expected += seen.spreads
        self.observed.index_add_(1, torch.tensor(list(text)), places)
        self.tokens += len(text)

    @property
    def log_e(self) -> float:
        """The logarithm of the mixture's capital."""
        return float(torch.logsumexp((self.logs + self.weights).flatten(), dim=0))

    @property
    def e_value(self) -> float:
        """The mixture's capital."""
        return as_e_value(self.log_e)

    def culprit(self, spell: Callable[[int], str] = str) -> Culprit:
        """Return the bet that won most; `spell` gives the text of a token."""
        best = int((self.logs + self.weights).argmax())
        feature, place, sign, _ = (int(one) for one in torch.unravel_index(torch.tensor(best), self.logs.shape))
        seen, meant, count = (float(one) for one in self.sums[:, feature, place])
        excess = (self.observed - self.expected)[place] / (self.expected[place] + 1).sqrt()
        furthest = excess.abs().topk(min(SHOWN, len(excess))).indices.tolist()
        tokens = tuple(
            TokenCount(one, spell(one), float(self.expected[place, one]), int(self.observed[place, one]))
            for one in furthest
        )
        value = as_e_value(float(self.logs[feature, place, sign].max()))
        share = max(count, 1)
        return Culprit(self.names[feature], DIRECTIONS[sign], PLACES[place], meant / share, seen / share, value, tokens)

    def detectable(self, false_alarm: float) -> float:
        """Return the bias of a feature, as a difference of means, that would have been seen with probability .95.

        In the worst case, a feature with mean one half; log K is then about normal with mean n d^2 / (2 v) and
        variance n d^2 / v at the best stake, for d the bias beyond the tolerance and v = 1 / 4.
        """
        if not self.tokens:
            return 1.0
        needed = log(1 / false_alarm) - float(self.weights[0, 0])
        return min(1.0, self.tolerance + (1.645 + sqrt(1.645**2 + 2 * needed)) / 2 / sqrt(self.tokens))


def as_e_value(log_e: float) -> float:
    """Return the exponential of a logarithm, or the largest that a report holds."""
    return exp(min(log_e, LARGEST))
