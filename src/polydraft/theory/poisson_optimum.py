"""Independent drafts conditioned on being distinct: ratios of elementary symmetric polynomials, in logarithms."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.schemes.scheme import largest_count, log_symmetric_sums, support_size


def conditional_chain(
    draft_probs: Float[Tensor, "*b A"], order: Int[Tensor, "*b A"], counts: Int[Tensor, "*b"]
) -> Float[Tensor, "*b A+1"]:
    """Return e_k(q; first j tokens of `order`) / e_k(q) for j = 0..A: Q of the `ConditionalPoisson` law.

    By e_k(H + x) = e_k(H) + q(x) e_{k-1}(H). Hu et al. (arXiv 2502.18779, section 4.2.2) give it for drafts without
    replacement, whose law is another one: with q = (.8, .1, .1), k = 2 and H the last two tokens, it is .0588 here
    and .0222 there.
    """
    counts = torch.minimum(counts, support_size(draft_probs))
    chains = log_symmetric_sums(draft_probs.log().gather(-1, order), largest_count(counts) + 1)
    at = counts[..., None, None].expand(*counts.shape, 1, chains.shape[-1])
    chain = chains.gather(-2, at).squeeze(-2)
    return (chain - chain[..., -1:]).exp()


def conditional_inclusion(draft_probs: Float[Tensor, "*b A"], counts: Int[Tensor, "*b"]) -> Float[Tensor, "*b A"]:
    """Return q(i) e_{k-1}(all but i) / e_k(all), the probability that token i is among the drafts."""
    counts = torch.minimum(counts, support_size(draft_probs))
    logs = draft_probs.log()
    before = log_symmetric_sums(logs, largest_count(counts) + 1)
    after = log_symmetric_sums(logs.flip(-1), largest_count(counts)).flip(-1)
    result = torch.zeros_like(draft_probs)
    for size in range(1, largest_count(counts) + 1):
        others = torch.stack([before[..., i, :-1] + after[..., size - 1 - i, 1:] for i in range(size)])
        drawn = (logs + others.logsumexp(dim=0) - before[..., size, -1:]).exp()
        result = torch.where((counts == size).unsqueeze(-1), drawn.clamp_max(1), result)
    return result
