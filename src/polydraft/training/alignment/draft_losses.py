"""The losses that a draft model may learn by, by their words: of single rows, and of the chains of whole texts.

Sources: DistillSpec (arXiv 2310.08461), LK losses (2602.23881), TVD++ (2403.00858), AdaSPEC (2510.19779, section 3),
Bebop's products; the expected calls and accepted drafts are those of `text_calls`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.errors import InvalidParameter, hint
from polydraft.training.alignment.divergences import (
    drawn_variation,
    mixture_divergence,
    product_loss,
    reverse_divergence,
    several_loss,
)
from polydraft.training.alignment.text_calls import accepted, expected_calls, kept_as_block, kept_by_token
from polydraft.training.heads.losses.row_losses import (
    Rows,
    Values,
    forward_divergence,
    lk_alpha,
    lk_lambda,
    total_variation,
)

CHAIN = 5
"""The drafts of the chains that forms are compared by, and whose calls are learnt."""
ANCHOR = 0.1
"""How much KL(p || q) counts beside losses of whole texts."""
TINY = 1e-12
"""A target's chance is taken to be this much at least where a loss has its logarithm."""

Chains = Float[Tensor, "b n g"]
Paths = Callable[[Chains, Chains, Int[Tensor, "b"]], Float[Tensor, "b"]]
"""A loss of whole texts, of the ratios q / p and overlaps of the chains at all their places, and of their lengths."""


@dataclass(frozen=True)
class DraftLoss:
    """What a draft model learns by.

    Args:
        rows: a loss of each row.
        weight: how much the mean of these counts.
        paths: a loss of texts, whose sum is divided by their tokens; of those alone that were sampled, at the
            temperature that they have. None for none.
        share: of the rows those are learnt from whose loss exceeds a reference's the most, this share of a batch.
    """

    rows: Callable[[Rows, Rows], Values]
    weight: float = 1.0
    paths: Paths | None = None
    share: float = 1.0


def _calls(
    kept: Callable[[Chains], Chains], ratio: Chains, overlap: Chains, lengths: Int[Tensor, "b"]
) -> Float[Tensor, "b"]:
    return expected_calls(kept(ratio), lengths)


def _rejected_as_block(ratio: Chains, overlap: Chains, lengths: Int[Tensor, "b"]) -> Float[Tensor, "b"]:
    return _inside(1 - accepted(kept_as_block(ratio)) / CHAIN, lengths)


def _rejected_by_token(ratio: Chains, overlap: Chains, lengths: Int[Tensor, "b"]) -> Float[Tensor, "b"]:
    return _inside(1 - accepted(kept_by_token(ratio), overlap) / CHAIN, lengths)


def _products(ratio: Chains, overlap: Chains, lengths: Int[Tensor, "b"]) -> Float[Tensor, "b"]:
    return _inside(product_loss(overlap), lengths)


def _inside(values: Float[Tensor, "b n"], lengths: Int[Tensor, "b"]) -> Float[Tensor, "b"]:
    """Return each text's sum over its places."""
    there = torch.arange(values.shape[1], device=values.device) < lengths.unsqueeze(-1)
    return torch.where(there, values, 0.0).sum(-1)


def _pair_distance(logits: Rows, target: Rows) -> Values:
    return forward_divergence(logits, target) + lk_alpha(logits, target)


DRAFT_LOSSES: Mapping[str, DraftLoss] = {
    "fkl": DraftLoss(forward_divergence),
    "rkl": DraftLoss(lambda logits, target: reverse_divergence(logits, target.clamp_min(TINY))),
    "jsd": DraftLoss(partial(mixture_divergence, share=0.5)),
    "tvd": DraftLoss(total_variation),
    "lk-alpha": DraftLoss(lk_alpha),
    "lk-lambda": DraftLoss(lk_lambda),
    "fkl+lk-alpha": DraftLoss(_pair_distance),
    "jsd-0.1": DraftLoss(partial(mixture_divergence, share=0.1)),
    "jsd-0.9": DraftLoss(partial(mixture_divergence, share=0.9)),
    "tvd++": DraftLoss(drawn_variation),
    "lk-alpha-2": DraftLoss(partial(several_loss, drafts=2)),
    "lk-alpha-4": DraftLoss(partial(several_loss, drafts=4)),
    "adaspec": DraftLoss(forward_divergence, share=0.4),
    "calls": DraftLoss(forward_divergence, ANCHOR, partial(_calls, kept_as_block)),
    "calls-by-token": DraftLoss(forward_divergence, ANCHOR, partial(_calls, kept_by_token)),
    "accepted": DraftLoss(forward_divergence, ANCHOR, _rejected_as_block),
    "accepted-by-token": DraftLoss(forward_divergence, ANCHOR, _rejected_by_token),
    "products": DraftLoss(forward_divergence, ANCHOR, _products),
}
"""By its word: KL(p || q); KL(q || p); JSD, scaled, at the middle and near both ends; the total variation, of rows and
as TVD++ at drawn tokens; -log alpha, and the same of 2 and 4 drafts; LK's mixture; the sum that the embedded draft was
distilled by; KL(p || q) of the rows that AdaSPEC's filter keeps. With a little KL(p || q) as an anchor beside, for
drafts that are close already: the expected target calls per token and the share of the drafts that is rejected, under
block verification and token by token, and Bebop's products of overlaps."""


def draft_loss(word: str) -> DraftLoss:
    """Return the loss of a word.

    Raises:
        InvalidParameter: there is none.
    """
    if word not in DRAFT_LOSSES:
        meant = hint(word, DRAFT_LOSSES)
        raise InvalidParameter(f"A draft model learns by the loss {', '.join(DRAFT_LOSSES)}, not {word!r}{meant}.")
    return DRAFT_LOSSES[word]
