"""What a chain of drafts is worth on text that the target wrote: accepted drafts, and target calls of the whole text.

The text's tokens x are drawn from the target's law p, so that one teacher-forced pass of each model tells what decoding
would do. Given the text, the first k drafts of a step are accepted with probability

    token by token   c_k = prod_{i <= k} min(1, q_i(x_i) / p_i(x_i))
    as a block       c_k = min_{0 <= i <= k} r_i,  r_i = prod_{j <= i} q_j(x_j) / p_j(x_j),  r_0 = 1

(speculative sampling, arXiv 2211.17192; block verification, 2403.10444), and E_{x ~ p} c_k is the exact probability.
All weights lie in [0, 1]. Their gradients by autograd are unbiased, since the law of the text does not depend on q. At
temperature 0 both hold as well: the rows are one-hot, and c_k is 1 while the draft's likeliest token is the text's. On
text of the draft, of a person, or of the target at another temperature nothing of this holds.

A rule that looks at one draft after the other and accepts token x with probability t(x) has t(x) / p(x) in place of
min(1, q(x) / p(x)).

A step takes one target call, and brings the accepted drafts and one token more.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.training.heads.losses.row_losses import Rows, Values, chances

Path = Float[Tensor, "*b g"]
"""A number for each draft of a chain whose tokens are the text's."""


def ratios(logits: Rows, target: Rows, tokens: Int[Tensor, "*b"]) -> Values:
    """Return q(x) / p(x) at the text's tokens; 0 where the draft has no such token (-1)."""
    own = target.gather(-1, tokens.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return chances(logits, tokens) / own.clamp_min(torch.finfo(own.dtype).tiny)


def kept_by_token(ratio: Path) -> Path:
    """Return c_1 ... c_g of speculative sampling, which looks at one draft after the other."""
    return ratio.clamp_max(1).cumprod(-1)


def kept_as_block(ratio: Path) -> Path:
    """Return c_1 ... c_g of block verification, which looks at a chain as a whole."""
    return ratio.cumprod(-1).cummin(-1).values.clamp_max(1)


def reached_in_draft_text(ratio: Float[Tensor, "*b n"], length: int) -> Float[Tensor, "*b n"]:
    """Return the weights of the places of text that the draft wrote: how often decoding comes there with a draft.

    (1 / g) sum_{d < g} prod_{i - d <= j < i} min(1, p_j(x_j) / q_j(x_j)) for place i, chains of g = `length` drafts
    beginning at all places alike. Places behind a token that the target would have rejected are hardly ever reached.

    Args:
        ratio: q(x) / p(x) of the text's tokens.
        length: the drafts of a chain.
    """
    kept = (1 / ratio.clamp_min(1e-9)).clamp_max(1)
    found, product = torch.ones_like(kept), torch.ones_like(kept)
    for _ in range(length - 1):
        product = torch.nn.functional.pad((product * kept)[..., :-1], (1, 0))
        found = found + product
    return found / length


def accepted(kept: Path, overlap: Path | None = None) -> Values:
    """Return J, the accepted drafts of a step from here, whose mean over the target's text is their expectation.

    Args:
        kept: c_1 ... c_g.
        overlap: alpha_d = sum_x min(p_d, q_d) of each row, if drafts are looked at token by token: then the last factor
            of every c_d is replaced by its mean, which has less noise. None leaves it.
    """
    if overlap is None:
        return kept.sum(-1)
    reached = torch.nn.functional.pad(kept[..., :-1], (1, 0), value=1.0)
    return (reached * overlap).sum(-1)


def expected_calls(kept: Float[Tensor, "*b n g"], lengths: Int[Tensor, "*b"]) -> Values:
    """Return the expected target calls that write each text, given what becomes of a chain at each of its places.

    Given the text, a step from place s keeps k < g drafts with probability c_k - c_{k+1}, and g with c_g; the next one
    begins at s + k + 1. So V(s) = 1 + sum_k (c_k - c_{k+1})(s) V(s + k + 1), and the calls are V(0). With f(s), how
    often a step begins at s, the gradient is d V(0) = sum_s f(s) sum_k d(c_k - c_{k+1})(s) V(s + k + 1): no graph goes
    through the recursions.

    Args:
        kept: for each place s of a text, c_1 ... c_g of the chain that begins with token s. What lies behind the text's
            end does not count.
        lengths: how many tokens each text has, its end token included; 0 for none, which takes no call.
    """
    drops = _ends(kept)
    with torch.no_grad():
        (*_, places, width), steps = drops.shape, drops.detach()
        inside = torch.arange(places, device=kept.device) < lengths.unsqueeze(-1)
        to_come = kept.new_zeros(*kept.shape[:-2], places + width)
        for place in reversed(range(places)):
            later = (steps[..., place, :] * to_come[..., place + 1 : place + width + 1]).sum(-1)
            to_come[..., place] = (1 + later) * inside[..., place]
        behind = to_come.unfold(-1, width, 1)[..., 1 : places + 1, :]
        weights = (begins(kept) * inside).unsqueeze(-1) * behind
    slope = (weights * drops).sum((-1, -2))
    return to_come[..., 0] + slope - slope.detach()


def begins(kept: Float[Tensor, "*b n g"]) -> Float[Tensor, "*b n"]:
    """Return how often a step begins at each place of a text, without gradients; arguments as of `expected_calls`."""
    with torch.no_grad():
        steps = _ends(kept)
        *_, places, width = steps.shape
        found = kept.new_zeros(*kept.shape[:-2], places + width)
        found[..., 0] = 1
        for place in range(places):
            found[..., place + 1 : place + width + 1] += found[..., place, None] * steps[..., place, :]
    return found[..., :places]


def replayed(
    kept: Float[Tensor, "*b n g"], lengths: Int[Tensor, "*b"], decay: float = 0.8
) -> tuple[Float[Tensor, "*b n"], Float[Tensor, "*b n"]]:
    """Return how much each place of a text counts as accepted, and how much as rejected, over all steps of decoding.

    A step begins where the one before was corrected. Its drafts before the first rejected one are accepted, and that
    one and those behind it are rejected, the k-th behind it counting `decay`^k. Of a chain that is kept as a whole none
    is. Draft-OPD (arXiv 2605.29343) replays drafts so from where they failed, and learns accepted places by KL(p || q)
    and rejected ones by KL(q || p); it draws what is accepted, of which this is the mean, and reads rejected drafts
    where this reads the target's own text.

    Args:
        kept: as of `expected_calls`.
        lengths: likewise.
        decay: how much a place behind a rejected one counts in comparison with it.
    """
    kept = kept.detach()
    inside = torch.arange(kept.shape[-2], device=kept.device) < lengths.unsqueeze(-1)
    starts, failed = begins(kept) * inside, _ends(kept)
    accepted_at, rejected_at = torch.zeros_like(starts), torch.zeros_like(starts)
    share = torch.zeros_like(starts)
    for depth in range(kept.shape[-1]):
        share = decay * share + failed[..., depth]
        for total, weight in ((accepted_at, kept[..., depth]), (rejected_at, share)):
            total[..., depth:] += (starts * weight)[..., : total.shape[-1] - depth]
    return accepted_at * inside, rejected_at * inside


def _ends(kept: Float[Tensor, "*b n g"]) -> Float[Tensor, "*b n g+1"]:
    """Return c_k - c_{k+1}, the chance that a step keeps k drafts, for k = 0 ... g."""
    return -torch.nn.functional.pad(torch.nn.functional.pad(kept, (1, 0), value=1.0), (0, 1)).diff(dim=-1)
