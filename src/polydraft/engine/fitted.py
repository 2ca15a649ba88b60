"""Default trees by what passes take here and what is accepted; where no draft can pay, none at all."""

import os
import warnings
from functools import lru_cache

from polydraft.drafters import Drafter, has_store
from polydraft.engine.measured import VARIABLE, Measured, measured
from polydraft.models import HuggingFaceModel, check_over_ranks, chosen_precision
from polydraft.planning.costs import Curve, StepCosts
from polydraft.probs import SamplingParams
from polydraft.trees import (
    Acceptance,
    Chain,
    Fixed,
    GrowingPolicy,
    LearningPolicy,
    TreePolicy,
    TreeShape,
    expected_tokens,
    fastest_shape,
)
from polydraft.verifiers import TreeVerifier

HOPED = (0.85, 0.06, 0.02)
"""Few draft models and heads are accepted more often than this, by rank: a tree that is too large at these rates is too
large for all of them. They stand for the true rates where texts would take too long to write."""
CLEARLY = 1.05
"""A smaller tree is taken if it is expected to be so many times as fast."""
PAYS = 1.05
"""Drafts that are expected to be less than so many times as fast as none are left out: estimates are no better."""


def measures_over_ranks(target: HuggingFaceModel, drafter: Drafter, policy: TreePolicy | None, *, fixed: bool) -> bool:
    """Tell whether passes of a target over several ranks may be measured: where these draft as one.

    Args:
        fixed: whether the same numbers are drawn on all of them.

    Raises:
        InvalidParameter: they would not do the same, or the drafter reads what is not handed out.
    """
    needs = drafter.needs
    reads = bool(needs.layers or needs.riders or needs.target or needs.queries)
    learns = isinstance(policy, LearningPolicy) or has_store(drafter)
    return check_over_ranks(target.model, drafter.name, reads=reads, learns=learns, fixed=fixed)


def fitted_policy(
    target: HuggingFaceModel, drafter: Drafter, verifier: TreeVerifier, usual: TreePolicy, params: SamplingParams
) -> TreePolicy | None:
    """Return the default tree, or a smaller one where passes of this machine ask for it; None where no draft pays.

    Problem: kernels of few bits jump in time where a pass has more than a few tokens, and a draft may take as long as
    what it saves. Rule: search the fastest tree that is no larger than the usual one, by measured times and by the
    rates at which drafts were accepted in texts that the target wrote itself; where such texts would take too long, by
    rates that are seldom met (`HOPED`). The usual tree stays unless another is clearly faster. Texts that are easier
    to foretell than the target's own may pay with larger trees than this. Who adapts to them is `Planner`.

    The answer follows from what was measured once and is kept in the cache folder; so does a sampled text with a seed.

    Args:
        target: the target.
        drafter: who drafts: a model or a head.
        verifier: the rule, whose scheme draws the drafts.
        usual: the default tree.
        params: the target's sampling settings, of which the temperature counts.
    """
    if os.environ.get(VARIABLE) == "no" or chosen_precision(target.device) or not usual.shape.counts:
        return usual
    found = measured(target, drafter, verifier, usual, params.temperature)
    if found is None:
        return usual
    search = _Fit(found, usual)
    best, plain = search.best, search.speed(TreeShape(()))
    if max(search.speed(best), search.usual_speed) < PAYS * plain:
        warnings.warn(_why_nothing_pays(search), stacklevel=2)
        return None
    if not best.counts or search.speed(best) < CLEARLY * search.usual_speed:
        return usual
    return Chain(best.depth) if best.max_children == 1 else Fixed(best)


class _Fit:
    """The trees that are no larger than the usual one, by what was measured."""

    def __init__(self, found: Measured, usual: TreePolicy) -> None:
        self.found, self.usual, self.costs = found, usual, found.costs
        most = usual.largest.max_children
        self.rates = found.acceptance or Acceptance.positional(HOPED[: min(most, len(HOPED))])

    @property
    def best(self) -> TreeShape:
        """The fastest tree; the root alone if that is plain decoding."""
        return _fastest(self.costs, self.rates, self.usual.most_drafts + 1, self.usual.largest.depth)

    def speed(self, shape: TreeShape) -> float:
        """Return the expected tokens per second."""
        return expected_tokens(shape, self.rates) / self.costs.of(shape)

    @property
    def usual_speed(self) -> float:
        """The same with the usual tree: with its time as it was seen, and its tokens too if it follows the draft."""
        found, typical = self.found, self._typical()
        if not found.usual:
            return self.speed(typical)
        grows = isinstance(self.usual, GrowingPolicy)
        return (found.tokens if grows else expected_tokens(typical, self.rates)) / found.usual

    def needed(self) -> float | None:
        """Return how often single drafts would have to be accepted to pay; None if always would not do."""
        return _needed(self.found, self.usual.most_drafts + 1, self.usual.largest.depth)

    def _typical(self) -> TreeShape:
        """Return the shape of the usual tree; of one that grows, that of as many nodes which is best."""
        usual = self.usual
        if not isinstance(usual, GrowingPolicy):
            return usual.shape
        free, nodes, depth = Curve(((1, 1.0),)), usual.most_drafts + 1, usual.shape.depth
        return fastest_shape(self.rates, free, lambda _: 0.0, max_nodes=nodes, max_depth=depth)


def _fastest(costs: StepCosts, rates: Acceptance, nodes: int, depth: int) -> TreeShape:
    return fastest_shape(rates, costs.verifying, costs.draft, max_nodes=nodes, max_depth=depth, overhead=costs.drafting)


@lru_cache(maxsize=64)
def _needed(found: Measured, nodes: int, depth: int) -> float | None:
    costs = found.costs
    least = PAYS / costs.of(TreeShape(()))
    for share in range(1, 100):
        rates = Acceptance.positional((share / 100,))
        best = _fastest(costs, rates, nodes, depth)
        if expected_tokens(best, rates) / costs.of(best) >= least:
            return share / 100
    return None


def _why_nothing_pays(search: _Fit) -> str:
    found, needed = search.found, search.needed()
    (_, one), (width, several) = found.passes[0], found.passes[1]
    drafting = found.start + found.level + found.verifying
    accepted = search.rates.at(0, 1)[0] if search.rates.at(0, 1) else sum(search.rates.at(0, 2))
    return (
        f"Nothing is drafted: a pass over {width} tokens takes {1000 * several:.1f} ms, one over a single token "
        f"{1000 * one:.1f} ms, and a draft with its verification {1000 * drafting:.1f} ms. Drafts are accepted "
        f"{accepted:.0%} of the time{'' if found.acceptance else ' at best'}; they would pay "
        f"{f'from {needed:.0%}' if needed else 'at no rate'}. policy=... drafts all the same."
    )
