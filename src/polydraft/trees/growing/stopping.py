"""Ending growth where the draft is not sure: by a threshold, a learnt one, or a classifier."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self, cast, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.errors import InvalidParameter, shortened
from polydraft.trees.growing.growth import (
    Drawn,
    GrowingPolicy,
    Opened,
    entropy,
    require_finite,
    require_positive,
    require_share,
)
from polydraft.trees.policy import Chain, Widths
from polydraft.trees.tree import Draft, TokenTree, TreeShape, Verdict


@runtime_checkable
class Confidence(Protocol):
    """A guess, between 0 and 1, at each drafted token's chance to be accepted."""

    def of(self, drawn: Drawn) -> Float[Tensor, "b c"]:
        """Return the confidence in each node."""
        ...


@dataclass(frozen=True)
class TokenProbability:
    """The draft probability of the drawn token.

    Source: Draft & Verify, arXiv 2309.08168; `assistant_confidence_threshold` of Hugging Face transformers.
    """

    def of(self, drawn: Drawn) -> Float[Tensor, "b c"]:
        """Return the token's probability in the row it was drawn from."""
        return drawn.chance


@dataclass(frozen=True)
class PathProbability:
    """The product of the draft probabilities from the root down: the chance to get there at all, by the draft."""

    def of(self, drawn: Drawn) -> Float[Tensor, "b c"]:
        """Return the product."""
        return drawn.path


@dataclass(frozen=True)
class EntropyBound:
    """1 - sqrt(scale * entropy) of the row that the token was drawn from, in nats; a flat row counts as 0.

    Raises:
        InvalidParameter: a scale that is negative or not finite.

    Source: AdaEDL, arXiv 2410.18351, whose bound on the acceptance rate it is.
    """

    scale: float = 0.2

    def __post_init__(self) -> None:
        require_finite("scale", self.scale)
        if self.scale < 0:
            raise InvalidParameter(f"scale must be at least 0, but is {self.scale!r}.")

    def of(self, drawn: Drawn) -> Float[Tensor, "b c"]:
        """Return the bound."""
        return surely_accepted(drawn.entropy, self.scale)


def surely_accepted(entropy: Float[Tensor, "b n"], scale: float = EntropyBound.scale) -> Float[Tensor, "b n"]:
    """Return max(0, 1 - sqrt(scale * H)) of rows with entropy H in nats: AdaEDL's bound on their acceptance."""
    return (1 - (scale * entropy).sqrt()).clamp_min(0)


@dataclass(frozen=True)
class Confident(GrowingPolicy):
    """Widths per depth, but no children below a draft whose confidence is under the threshold.

    The doubtful draft itself stays in the tree and is verified with the row it was drawn from. So its own token may
    decide whether it has children: it is above them, and they are not drawn yet. (Throwing the doubtful draft away
    instead, as BiLD does, would be pruning after sampling.) A node that is not opened costs no draft pass; where no row
    of the batch goes on, drafting ends.

    Args:
        widths: children per depth; ones for a chain.
        threshold: the least confidence to go on with, in 0 to 1.
        confidence: what to compare with it.

    Raises:
        InvalidParameter: widths that are none, a threshold outside 0 to 1, or a confidence that is none.
    """

    widths: tuple[int, ...]
    threshold: float = 0.4
    confidence: Confidence = TokenProbability()

    def __post_init__(self) -> None:
        _ = Widths(self.widths)
        require_share("threshold", self.threshold)
        given = cast(object, self.confidence)
        if isinstance(given, type) or not isinstance(given, Confidence):
            raise InvalidParameter(f"confidence must be one such as TokenProbability(), but is {given!r}.")

    @property
    def shape(self) -> TreeShape:
        """The tree of a draft that is always sure."""
        return Widths(self.widths).shape

    @property
    def stops(self) -> bool:
        """Growth ends where the draft is not sure anywhere."""
        return self.threshold > 0

    def opened(self, drawn: Drawn) -> Bool[Tensor, "b c"]:
        """Choose the nodes that the draft is sure of."""
        return self.confidence.of(drawn) >= self.threshold

    def counts(self, opened: Opened) -> Int[Tensor, "b f"]:
        """Give every open node the width of its depth."""
        return torch.full_like(opened.there, self.widths[opened.depth], dtype=torch.int64)


FEATURES = ("token probability", "top probability", "entropy", "depth")
"""What the classifier looks at: three numbers of the row that a token was drawn from, and how deep it lies."""


@dataclass(frozen=True)
class Classifier:
    """The logistic function of a weighted sum of `FEATURES`: a confidence for `Confident`.

    DISCO's classifier is a small network on the same kind of features; a weighted sum can be given by hand, fitted in a
    few lines (`fit_classifier`) and read.

    Args:
        weights: one per feature.
        bias: added to the sum.

    Raises:
        InvalidParameter: another number of weights, or one that is no finite number.

    Source: DISCO, arXiv 2405.04304, section 4.
    """

    weights: tuple[float, ...]
    bias: float = 0.0

    def __post_init__(self) -> None:
        _require_weights(self.weights)
        for name, value in (*zip(FEATURES, self.weights, strict=True), ("bias", self.bias)):
            require_finite(name if name == "bias" else f"the weight of the {name}", value)

    def of(self, drawn: Drawn) -> Float[Tensor, "b c"]:
        """Return the chance that each node is accepted once its parent is."""
        depth = torch.full_like(drawn.chance, drawn.depth)
        features = torch.stack([drawn.chance, drawn.top, drawn.entropy, depth], dim=-1)
        return torch.sigmoid(features @ features.new_tensor(self.weights) + self.bias)


def _require_weights(value: object) -> None:
    has = str(len(cast(tuple[object, ...], value))) if isinstance(value, tuple) else shortened(value)
    if has != str(len(FEATURES)):
        raise InvalidParameter(f"A classifier needs {len(FEATURES)} weights ({', '.join(FEATURES)}), but has {has}.")


EMBEDDED = Classifier((1.9457, 2.0254, 0.0617, 0.1694), -0.5534)
"""The classifier that `fit_classifier` finds for the embedded pair: 4,395 drafts of chains of eight, 12 Python prompts,
128 new tokens each, temperatures 0 and 1. Its mean log-loss there is 0.376; that of the mean acceptance is 0.464."""


def examples(draft: Draft, verdict: Verdict) -> tuple[Float[Tensor, "m e"], Bool[Tensor, " m"]]:
    """Return the features of every draft whose parent was accepted, and whether it was accepted itself.

    Those below a rejected draft were never judged, so they teach nothing.
    """
    tree, size = draft.tree, draft.tree.tokens.shape[-1]
    spare = torch.nn.functional.pad(torch.zeros_like(tree.valid), (0, 1))
    on_path = spare.scatter(-1, verdict.path.where(verdict.path >= 0, size), True)[:, :size]
    on_path[:, 0] = True
    above = tree.parents.clamp_min(0)
    judged = tree.valid & on_path.gather(-1, above)
    judged[:, 0] = False
    rows = draft.probs.mean(dim=-2) if draft.probs.dim() == 4 else draft.probs
    own = rows[torch.arange(len(rows), device=rows.device).unsqueeze(-1), above]
    chance = own.gather(-1, draft.atoms.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    features = torch.stack([chance, own.amax(dim=-1), entropy(own), tree.depth.to(chance)], dim=-1)
    return features[judged], on_path[judged]


def fit_classifier(
    features: Float[Tensor, "m e"], accepted: Bool[Tensor, " m"], penalty: float = 1.0, rounds: int = 50
) -> Classifier:
    """Fit the classifier to examples by penalised maximum likelihood (Newton's method).

    Args:
        features: those of `examples`, of many steps.
        accepted: whether each was accepted.
        penalty: the weights' squares times half of this are added to the negative log-likelihood, for features scaled
            to unit deviation; it keeps separable examples finite.
        rounds: Newton steps; they end by themselves when nothing moves.

    Raises:
        InvalidParameter: no examples, a penalty that is not positive, or no round.
    """
    require_finite("penalty", penalty)
    require_positive(rounds=rounds)
    if penalty <= 0:
        raise InvalidParameter(f"penalty must be positive, but is {penalty!r}.")
    if not len(features):
        raise InvalidParameter("A classifier cannot be fitted to no examples.")
    values, wanted = features.double(), accepted.double()
    centre, spread = values.mean(dim=0), values.std(dim=0, correction=0).clamp_min(1e-9)
    design = torch.cat([(values - centre) / spread, torch.ones_like(values[:, :1])], dim=-1)
    ridge = float(penalty) * torch.eye(design.shape[-1], dtype=design.dtype, device=design.device)
    ridge[-1, -1] = 1e-9  # the bias goes free
    weights = torch.zeros_like(design[0])
    for _ in range(rounds):
        chance = torch.sigmoid(design @ weights)
        slope = design.T @ (wanted - chance) - ridge @ weights
        curve = (design.T * (chance * (1 - chance))) @ design + ridge
        move = curve.inverse() @ slope
        size = float(move.square().sum()) ** 0.5
        weights = weights + move * (5 / max(size, 5))  # a bounded step cannot overshoot for good
        if size < 1e-10:
            break
    scaled = weights[:-1] / spread
    return Classifier(tuple(float(one) for one in scaled), float(weights[-1] - (scaled * centre).sum()))


@dataclass(frozen=True, eq=False)
class Learnt:
    """What each row has learnt: its threshold, and the smoothed share of its drafts that was accepted."""

    threshold: Float[Tensor, "b"]
    rate: Float[Tensor, "b"]


@dataclass(frozen=True)
class AdaptiveThreshold(GrowingPolicy):
    """A chain that goes on while the drawn token's draft probability is at least a threshold, which each row learns.

    After a step that accepted the share r of its drafts, the mean share becomes R <- f R + (1 - f) r, with R = 0 at
    the start and f the `forgetting`. If R < goal the threshold t aims at t' = t + step; else at t' = t if the chain
    ran to its full length, and at t' = t - step if not. Then t <- s t + (1 - s) t', with s the `smoothing`. A step
    without drafts teaches nothing. Exact as any threshold is: it depends on steps that are over.

    Args:
        length: the longest chain.
        threshold: where it starts, in 0 to 1.
        goal: the share of accepted drafts to aim at.
        step: how far the threshold is moved, before smoothing.
        forgetting: weight of the past in the mean share.
        smoothing: weight of the past in the threshold.
        learnt: the rows' state; None before the first step.

    Raises:
        InvalidParameter: a length below 1, or a number outside 0 to 1.

    Source: Draft & Verify, arXiv 2309.08168, section 3.3; start, goal, step and weights are those of its code.
    """

    length: int = 8
    threshold: float = 0.6
    goal: float = 0.9
    step: float = 0.01
    forgetting: float = 0.5
    smoothing: float = 0.9
    learnt: Learnt | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        require_positive(length=self.length)
        for name in ("threshold", "goal", "step", "forgetting", "smoothing"):
            require_share(name, getattr(self, name))

    @property
    def shape(self) -> TreeShape:
        """The longest chain."""
        return Chain(self.length).shape

    @property
    def stops(self) -> bool:
        """A chain ends where the draft is not sure."""
        return True

    def opened(self, drawn: Drawn) -> Bool[Tensor, "b c"]:
        """Go on below tokens at least as likely as the row's threshold."""
        least = self.threshold if self.learnt is None else self.learnt.threshold.unsqueeze(-1).to(drawn.chance)
        return drawn.chance >= least

    def counts(self, opened: Opened) -> Int[Tensor, "b f"]:
        """Give every open node one child."""
        return torch.ones_like(opened.there, dtype=torch.int64)

    def after(self, tree: TokenTree, verdict: Verdict) -> "AdaptiveThreshold":
        """Move the thresholds by what was drafted and accepted."""
        drafted = tree.on_host.valid.sum(dim=-1) - 1
        old, kept = self._of(len(drafted)), torch.tensor(verdict.kept, dtype=torch.float64)
        rate = self.forgetting * old.rate + (1 - self.forgetting) * kept / drafted.clamp_min(1)
        doubtful, stopped = rate < self.goal, drafted < self.length
        aim = old.threshold + self.step * (doubtful.double() - (stopped & ~doubtful).double())
        threshold = (self.smoothing * old.threshold + (1 - self.smoothing) * aim).clamp(0, 1)
        taught = drafted > 0
        return replace(self, learnt=Learnt(threshold.where(taught, old.threshold), rate.where(taught, old.rate)))

    def select(self, rows: Sequence[int]) -> "AdaptiveThreshold":
        """Return the policy for some rows, with what each has learnt."""
        if self.learnt is None:
            return self
        old, places = self._of(max(rows) + 1), torch.tensor(rows)
        return replace(self, learnt=Learnt(old.threshold[places], old.rate[places]))

    def put(self, row: int, other: Any) -> Self:
        """Return the policy with what another has learnt of its only row."""
        known = self.learnt or other.learnt
        if known is None:
            return self
        count = max(row + 1, 0 if self.learnt is None else len(self.learnt.rate))
        own, new = self._of(count), other._of(1)
        at = torch.arange(count) == row
        return replace(self, learnt=Learnt(own.threshold.where(~at, new.threshold), own.rate.where(~at, new.rate)))

    def _of(self, rows: int) -> "Learnt":
        """Return what was learnt of so many rows; those behind the last of which something was begin anew."""
        zero = torch.zeros(rows, dtype=torch.float64)
        threshold, rate = zero + self.threshold, zero
        if self.learnt is not None:
            more = max(rows - len(self.learnt.rate), 0)
            threshold = torch.cat([self.learnt.threshold, threshold[:more]])
            rate = torch.cat([self.learnt.rate, rate[:more]])
        return Learnt(threshold, rate)
