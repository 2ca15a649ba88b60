"""Losses of rows that bring a draft to its target, beside those that heads learn by (`row_losses`).

A row has the target's law p, over all tokens or over some of them, and the draft's logits z with q = softmax(z). Each
function returns one value per row. Which rows count is the caller's to say (`weighted`): those of the target's own
text, up to its first end token, without prompts and padding, and both laws under the sampling settings that are served.

Sources: DistillSpec (arXiv 2310.08461), GKD (2306.13649), TVD++ (2403.00858, section 3), AdaSPEC (2510.19779), Bebop's
products of overlaps, the optimal acceptance of several drafts (2502.18779, equation 8).
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.errors import InvalidParameter
from polydraft.schemes import IID
from polydraft.theory import optimal_set
from polydraft.training.heads.losses.row_losses import Rows, Values, cross_entropy, forward_divergence


def reverse_divergence(logits: Rows, target: Rows) -> Values:
    """Return KL(q || p) = sum_x q(x) log(q(x) / p(x)); infinite where p is 0 on a token that q may draw."""
    log_draft = logits.log_softmax(-1)
    return (log_draft.exp() * (log_draft - target.log())).sum(-1)


def mixture_divergence(logits: Rows, target: Rows, share: float) -> Values:
    """Return (b KL(p || m) + (1 - b) KL(q || m)) / (b (1 - b)) with m = b p + (1 - b) q: JSD(b), scaled.

    Unscaled it is 0 at both ends, so that b is a learning rate. Scaled it tends to KL(p || q) as b -> 0 and to
    KL(q || p) as b -> 1, which is what it returns there.

    Args:
        share: b, the target's share of the mixture of probabilities.

    Raises:
        InvalidParameter: a share outside of [0, 1].
    """
    if not 0 <= share <= 1:
        raise InvalidParameter(f"The target's share of a mixture is in [0, 1], but is {share}.")
    if share == 0:
        return forward_divergence(logits, target)
    if share == 1:
        return reverse_divergence(logits, target)
    log_draft = logits.log_softmax(-1)
    draft = log_draft.exp()
    log_mixed = (share * target + (1 - share) * draft).clamp_min(torch.finfo(draft.dtype).tiny).log()
    of_target = (torch.xlogy(target, target) - target * log_mixed).sum(-1)
    of_draft = (draft * (log_draft - log_mixed)).sum(-1)
    return of_target / (1 - share) + of_draft / share


def sampled_variation(logits: Rows, target: Rows, drawn: Int[Tensor, "*b"]) -> Values:
    """Return TVD++'s loss at tokens that the draft drew: its gradient is what is meant, its value is nothing.

    With r = 1[p(x) > q(x)] the gradient of 1 - sum_x min(p, q) is E_q[-r(x) grad log q(x)]. TVD++ takes (r - mean) /
    std over the batch in place of r. That changes the gradient's size and, in expectation, not its direction. Where
    whole rows are at hand, `total_variation` is free of the noise.
    """
    with torch.no_grad():
        draft = logits.softmax(-1)
        better = (target > draft).gather(-1, drawn.unsqueeze(-1)).squeeze(-1).to(logits)
        reward = (better - better.mean()) / better.std(correction=0).clamp_min(1e-6)
    return reward * cross_entropy(logits, drawn)


def drawn_variation(logits: Rows, target: Rows) -> Values:
    """Return TVD++'s loss at one token of each row that the draft draws, by torch's own random numbers."""
    chances = logits.detach().softmax(-1).flatten(0, -2)
    return sampled_variation(logits, target, chances.multinomial(1).view(logits.shape[:-1]))


def several_agreement(logits: Rows, target: Rows, drafts: int) -> Values:
    """Return the largest chance alpha* that any exact rule accepts one of k drafts, each drawn from the same row q.

        alpha* = 1 + min_H [p(H) - q(H)^k],  H any set of tokens (arXiv 2502.18779, equation 8)

    The set that is best at q is held fixed for the gradient: by the envelope theorem that is the gradient of the
    minimum too, d alpha* = -k q(H)^(k-1) dq(H). For k = 1 alpha* is sum_x min(p, q).

    Args:
        logits: of the draft's rows q.
        target: the target's rows p.
        drafts: k.

    Returns:
        alpha* of each row.
    """
    draft = logits.softmax(-1)
    with torch.no_grad():
        found = optimal_set(IID(), draft, target, torch.full(draft.shape[:-1], drafts, device=draft.device))
        first = torch.arange(draft.shape[-1], device=draft.device) < found.size.unsqueeze(-1)
        inside = torch.zeros_like(first).scatter(-1, found.order, first)
    mass, drawn = (torch.where(inside, one, 0.0).sum(-1) for one in (target, draft))
    return 1 + mass - drawn**drafts


def several_loss(logits: Rows, target: Rows, drafts: int) -> Values:
    """Return -log alpha* of each row; for one draft that is LK's loss. Arguments are those of `several_agreement`."""
    return -several_agreement(logits, target, drafts).clamp_min(1e-5).log()


def hardest(
    losses: Float[Tensor, "*b"], reference: Float[Tensor, "*b"], valid: Bool[Tensor, "*b"], share: float = 0.4
) -> Bool[Tensor, "*b"]:
    """Tell AdaSPEC's tokens: of all valid ones the share whose loss exceeds the reference's the most, one at least.

    What is learnt from is the mean over these (equation 10). Its code divides by all tokens instead, which scales the
    rate by the share, and ranks inside of micro-batches.

    Args:
        losses: the draft's, such as KL(p || q).
        reference: those of a draft that was distilled by itself from the same start.
        valid: which tokens count.

    Raises:
        InvalidParameter: a share outside of (0, 1].
    """
    if not 0 < share <= 1:
        raise InvalidParameter(f"The share of tokens that are learnt from is in (0, 1], but is {share}.")
    count = int(valid.sum())
    kept = min(count, max(1, round(share * count)))
    gaps = (losses - reference).detach().where(valid, -torch.inf).flatten()
    chosen = torch.zeros_like(gaps, dtype=torch.bool)
    chosen[gaps.topk(kept).indices] = True
    return chosen.view(valid.shape)


def product_loss(overlaps: Float[Tensor, "*b g"]) -> Values:
    """Return 1 - (1/g) sum_d prod_{j<=d} alpha_j of the overlaps on a path of the text (Bebop, equation 13).

    It is not the expected share of accepted drafts: `accepted` (`text_calls`) is, which weights a place by what becomes
    of the text's own tokens before it.
    """
    return 1 - overlaps.cumprod(-1).mean(-1)
