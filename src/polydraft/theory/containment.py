"""Containment: the probability that all drafts of a node lie in a set of tokens, for every scheme."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.schemes import Draws, Scheme, SetLaw, set_law_of
from polydraft.schemes.scheme import largest_count, log_symmetric_sums, support_size
from polydraft.theory.successive_law import SuccessiveLaw, prefix_sums


def containment_chain(
    scheme: Scheme,
    draft_probs: Float[Tensor, "*rows A"],
    order: Int[Tensor, "*b A"],
    counts: Int[Tensor, "*b"],
) -> Float[Tensor, "*b A+1"]:
    """Return Q of every prefix of an order of the tokens: entry j is Pr[all drafts are among the first j tokens].

    Entry 0 is 0, or 1 where no draft is drawn, and the last entry is 1. With q a draft row and H a prefix, Q(H) is
    q(H)^k for `IID`, prod_j q_j(H) for `Product`, 1[T in H] q'(H)^(k - |T|) for the schemes that take the top tokens
    T for certain and draw from q' = q off T, 1[T in H] for `TopK` and `Given`, e_k(q; H) / e_k(q) for
    `ConditionalPoisson`, and an integral for `WithoutReplacement` and `Coupled` (see `SuccessiveLaw`). A scheme
    without repeats draws the whole support where that is smaller than `counts`; a row without mass gives no drafts.

    Shapes: rows are "*b A", for `Product` "*b J A"; counts may differ by row. The result is in float64.
    Source: arXiv 2502.18779, section 4; for `WithoutReplacement` its formula is that of another law.

    Raises:
        UnpairedScheme: the scheme's containment is not known.
    """
    draft_probs = draft_probs.double()
    law = set_law_of(scheme)
    if law.draws is Draws.SUCCESSIVE:
        return SuccessiveLaw.of(draft_probs, counts).chain(order)
    if law.draws is Draws.DISTINCT:
        return _conditional_chain(draft_probs, order, counts)
    if law.draws is Draws.IN_TURN:
        times = _draws_per_row(draft_probs, counts).unsqueeze(-1)
        each = draft_probs.gather(-1, order.unsqueeze(-2).expand_as(draft_probs))
        return _prefix_shares(each).pow(times).prod(dim=-2)
    certain, draws = certain_and_drawn(law, draft_probs, counts)
    others = draft_probs.masked_fill(certain, 0.0)
    draws = draws.where((others > 0).any(dim=-1), 0).unsqueeze(-1)
    held = prefix_sums(certain.gather(-1, order).double())
    return _prefix_shares(others.gather(-1, order)).pow(draws) * (held == held[..., -1:])


def containment(
    scheme: Scheme,
    draft_probs: Float[Tensor, "*rows A"],
    members: Bool[Tensor, "*b A"],
    counts: Int[Tensor, "*b"],
) -> Float[Tensor, "*b"]:
    """Return Q(H) = Pr[all drafts lie in H] for the set H of members.

    Raises:
        UnpairedScheme: the scheme's containment is not known.
    """
    order = (~members).to(torch.int8).argsort(dim=-1, stable=True)
    chain = containment_chain(scheme, draft_probs, order, counts)
    return chain.gather(-1, members.sum(dim=-1, keepdim=True)).squeeze(-1)


def inclusion(
    scheme: Scheme, draft_probs: Float[Tensor, "*rows A"], counts: Int[Tensor, "*b"]
) -> Float[Tensor, "*b A"]:
    """Return the probability that each token is drafted: 1 - Q(all other tokens).

    Computed without that subtraction, so that small probabilities keep their digits.

    Raises:
        UnpairedScheme: the scheme's containment is not known.
    """
    draft_probs = draft_probs.double()
    law = set_law_of(scheme)
    if law.draws is Draws.SUCCESSIVE:
        return SuccessiveLaw.of(draft_probs, counts).inclusion()
    if law.draws is Draws.DISTINCT:
        return _conditional_inclusion(draft_probs, counts)
    if law.draws is Draws.IN_TURN:
        missed = _log_missed(draft_probs, _draws_per_row(draft_probs, counts)).sum(dim=-2)
        return -missed.expm1()
    certain, draws = certain_and_drawn(law, draft_probs, counts)
    missed = _log_missed(draft_probs.masked_fill(certain, 0.0), draws)
    return torch.where(certain, 1.0, -missed.expm1())


def likeliest(draft_probs: Float[Tensor, "*b A"], number: Int[Tensor, "*b"]) -> Bool[Tensor, "*b A"]:
    """Mark the `number` likeliest tokens that have any mass, earlier ones first among equals."""
    number = torch.minimum(number, support_size(draft_probs))
    most = largest_count(number)
    if most == 0:
        return torch.zeros_like(draft_probs, dtype=torch.bool)
    largest = draft_probs.topk(most, dim=-1).values
    least = largest.gather(-1, (number - 1).clamp_min(0).unsqueeze(-1))
    above, level = draft_probs > least, draft_probs == least
    left = number.unsqueeze(-1) - above.sum(dim=-1, keepdim=True)
    return (above | (level & (level.cumsum(dim=-1) <= left))) & (number > 0).unsqueeze(-1)


def certain_and_drawn(
    law: SetLaw, draft_probs: Float[Tensor, "*b A"], counts: Int[Tensor, "*b"]
) -> tuple[Bool[Tensor, "*b A"], Int[Tensor, "*b"]]:
    """Return the tokens that are drafted for certain, and how many draws from the others follow."""
    if not law.most_certain:
        return torch.zeros_like(draft_probs, dtype=torch.bool), counts
    fixed = (counts - law.drawn).clamp(0, law.most_certain)
    return likeliest((draft_probs > 0).double() if law.alike else draft_probs, fixed), counts - fixed


def _conditional_chain(
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


def _conditional_inclusion(draft_probs: Float[Tensor, "*b A"], counts: Int[Tensor, "*b"]) -> Float[Tensor, "*b A"]:
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


def _prefix_shares(mass: Float[Tensor, "*b A"]) -> Float[Tensor, "*b A+1"]:
    sums = prefix_sums(mass)
    total = sums[..., -1:]
    return sums / total.where(total > 0, 1.0)


def _log_missed(draft_probs: Float[Tensor, "*b A"], draws: Int[Tensor, "*b"]) -> Float[Tensor, "*b A"]:
    """Return log (1 - q(i))^draws for every token i of rows that need not be normalised."""
    total = draft_probs.sum(dim=-1, keepdim=True)
    logs = (-(draft_probs / total.where(total > 0, 1.0)).clamp_max(1)).log1p()
    return torch.where(draws.unsqueeze(-1) > 0, draws.unsqueeze(-1) * logs, 0.0)


def _draws_per_row(draft_probs: Float[Tensor, "*b J A"], counts: Int[Tensor, "*b"]) -> Int[Tensor, "*b J"]:
    """Return how many drafts come from each row in turn; the first row without mass ends them."""
    rows = draft_probs.shape[-2]
    live = (draft_probs > 0).any(dim=-1).long().cumprod(dim=-1).sum(dim=-1)
    drawn = torch.where(live < rows, torch.minimum(counts, live), counts).unsqueeze(-1)
    turn = torch.arange(rows, device=draft_probs.device)
    return (drawn - turn + rows - 1).div(rows, rounding_mode="floor").clamp_min(0)
