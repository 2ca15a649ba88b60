"""A classifier that stops drafting, in the manner of DISCO: the chance of acceptance from features of the draft."""

from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from polydraft.errors import InvalidParameter, shortened
from polydraft.trees.growing.bounds import require_finite, require_positive
from polydraft.trees.growing.growth import Drawn, entropy
from polydraft.trees.tree import Draft, Verdict

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
