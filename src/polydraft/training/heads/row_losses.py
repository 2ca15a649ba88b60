"""Losses of draft heads, as functions of rows; each returns one value per position.

Every row has two laws: the head's q over its own tokens, and the target's p over all tokens, of which only the head's
are given. What p has elsewhere can never be accepted.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

Rows = Float[Tensor, "*b V"]
Values = Float[Tensor, "*b"]


def cross_entropy(logits: Rows, tokens: Int[Tensor, "*b"]) -> Values:
    """Return -log q(token); 0 where the head has no such token (-1)."""
    flat = functional.cross_entropy(logits.flatten(0, -2), tokens.flatten(), reduction="none", ignore_index=-1)
    return flat.view(tokens.shape)


def chances(logits: Rows, tokens: Int[Tensor, "*b"]) -> Values:
    """Return q(token); 0 where the head has no such token (-1), which it can never draft."""
    return torch.exp(-cross_entropy(logits, tokens)) * (tokens >= 0)


def soft_cross_entropy(logits: Rows, target: Rows) -> Values:
    """Return -sum_x p(x) log q(x): the divergence from p to q but for p's own entropy."""
    return -(target * logits.log_softmax(-1)).sum(-1)


def agreement(logits: Rows, target: Rows) -> Values:
    """Return alpha = sum_x min(p(x), q(x)), the chance that one draft is accepted (arXiv 2211.17192, theorem 3.5)."""
    return torch.minimum(logits.softmax(-1), target).sum(-1)


def total_variation(logits: Rows, target: Rows) -> Values:
    """Return 1 - alpha, DSpark's main term."""
    return 1 - agreement(logits, target)


def accepted_loss(logits: Rows, target: Rows) -> Values:
    """Return 0.1 of the soft cross entropy and 1.8 of the total variation: DSpark's loss, without the text's tokens."""
    return 0.1 * soft_cross_entropy(logits, target) + 1.8 * total_variation(logits, target)


def lk_alpha(logits: Rows, target: Rows) -> Values:
    """Return -log alpha (LK loss, SpecForge): its gradient lives where the overlap is small."""
    return -agreement(logits, target).clamp_min(1e-5).log()


def lk_lambda(logits: Rows, target: Rows, scale: float = 1.0, decay: float = 3.0) -> Values:
    """Return w KL(p || q) + (1 - w)(1 - alpha) with w = scale exp(-decay alpha), w detached (LK loss, hybrid form)."""
    alpha = agreement(logits, target)
    weight = scale * torch.exp(-decay * alpha.detach())
    divergence = soft_cross_entropy(logits, target) + torch.xlogy(target, target).sum(-1)
    return weight * divergence + (1 - weight) * (1 - alpha)


def smooth_l1(states: Float[Tensor, "*b d"], wanted: Float[Tensor, "*b d"]) -> Values:
    """Return the mean over channels of d^2 / 2 if |d| < 1, else |d| - 1/2: EAGLE-1's distance of features."""
    return functional.smooth_l1_loss(states, wanted, reduction="none").mean(-1)


def decaying(depth: int, rate: float, like: Tensor) -> Float[Tensor, " D"]:
    """Return exp(-i / rate) for drafts i = 0, 1, ...: later drafts count less, as they are reached less often."""
    return torch.exp(-torch.arange(depth, device=like.device, dtype=like.dtype) / rate)


def d_pace(chances: Float[Tensor, "*b D"], valid: Bool[Tensor, "*b D"], share: float = 0.5) -> Float[Tensor, "*b D"]:
    """Return D-PACE's weights: the detached suffix sums of the chances to come so far.

    s_i = (1 - A) q_i(label) + A, P_i = s_1 ... s_i, w_i = sum_{m >= i} P_m, with A = `share`. Drafts that are not valid
    have s = 1, count in no sum, and weigh nothing.
    """
    kept = ((1 - share) * chances.detach() + share).where(valid, 1.0)
    reached = kept.cumprod(-1) * valid
    return reached.flip(-1).cumsum(-1).flip(-1) * valid


def unsure(sure: Values, overlap: Values) -> Values:
    """Return the binary cross entropy of what a confidence head says, in (0, 1), against the overlap, detached."""
    kept = sure.clamp(1e-6, 1 - 1e-6)
    return functional.binary_cross_entropy(kept, overlap.detach().clamp(0, 1), reduction="none")


def weighted(values: Float[Tensor, "*b D"], weights: Float[Tensor, "*b D"]) -> Float[Tensor, ""]:
    """Return the weighted mean over all positions; 0 if nothing counts."""
    return (values * weights).sum() / weights.sum().clamp_min(1e-6)
