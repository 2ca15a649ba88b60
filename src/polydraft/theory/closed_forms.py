"""Closed forms for special cases: two independent drafts, and top tokens with one sampled draft."""

from math import isfinite

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from polydraft.errors import InvalidParameter, is_number
from polydraft.probs import normalised, overlap
from polydraft.schemes import require_draft_count
from polydraft.theory.theory_rows import likeliest, prefix_sums


def two_draft_acceptance(
    draft_probs: Float[Tensor, "*b V"], target_probs: Float[Tensor, "*b V"]
) -> Float[Tensor, "*b"]:
    """Return the optimal acceptance of two independent drafts.

    min over H of target(H) + draft(off H)^2 + 2 draft(H) draft(off H): what is accepted is either a token of H or
    comes from a pair of drafts not both in H. The minimum is at a prefix of the tokens by draft / target descending.
    Source: Khisti et al., arXiv 2410.18234, theorem 3.
    """
    head, mass = _prefixes(draft_probs, target_probs)
    rest = (1 - head).clamp_min(0)
    return (mass + rest**2 + 2 * head * rest).amin(dim=-1)


def two_drafts_suffice(
    draft_probs: Float[Tensor, "*b V"], target_probs: Float[Tensor, "*b V"], tolerance: float = 1e-12
) -> Bool[Tensor, "*b"]:
    """Tell whether two independent drafts can always be accepted: target(H) >= draft(H)^2 for every set H.

    Source: Khisti et al., arXiv 2410.18234, theorem 2.

    Raises:
        InvalidParameter: the tolerance is no finite number.
    """
    if not is_number(tolerance) or not isfinite(tolerance):
        raise InvalidParameter(f"tolerance must be a finite number, but is {tolerance!r}.")
    head, mass = _prefixes(draft_probs, target_probs)
    return (mass >= head**2 - float(tolerance)).all(dim=-1)


def top_then_sample_acceptance(
    draft_probs: Float[Tensor, "*b V"], target_probs: Float[Tensor, "*b V"], k: int
) -> Float[Tensor, "*b"]:
    """Return the optimal acceptance of Hu's greedy drafts: target(T) + sum_x min(target(x), draft'(x)).

    T are the k - 1 likeliest tokens of the draft and draft' is the draft row without them, renormalised.
    Source: Hu et al., arXiv 2502.18779, section 4.

    Raises:
        InvalidParameter: k is not an integer from 1 to 4095.
    """
    require_draft_count("k", k)
    draft, target = draft_probs.double(), target_probs.double()
    top = likeliest(draft, torch.full(draft.shape[:-1], k - 1, device=draft.device))
    rest = draft.masked_fill(top, 0.0)
    return (target * top).sum(dim=-1) + overlap(target, normalised(rest, rest))


def _prefixes(
    draft_probs: Float[Tensor, "*b V"], target_probs: Float[Tensor, "*b V"]
) -> tuple[Float[Tensor, "*b V+1"], Float[Tensor, "*b V+1"]]:
    """Return the draft's and the target's mass of every prefix of the tokens by draft / target descending."""
    draft, target = draft_probs.double(), target_probs.double()
    order = (draft / target).where(draft > 0, -1.0).argsort(dim=-1, descending=True)
    return prefix_sums(draft.gather(-1, order)), prefix_sums(target.gather(-1, order))
