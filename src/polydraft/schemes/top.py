"""The likeliest tokens, taken for certain, alone or before or after others that are drawn."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from polydraft.errors import InvalidParameter, UnpairedScheme, is_whole
from polydraft.probs import normalised, sample, without
from polydraft.schemes.iid import IID
from polydraft.schemes.scheme import (
    MOST_CERTAIN,
    Counts,
    Drafts,
    RandomNumbers,
    Rate,
    Row,
    Scheme,
    SchemeOfLaw,
    SetLaw,
    Uniforms,
    cut,
    padded,
)
from polydraft.schemes.without_replacement import WithoutReplacement

MOST = 2


class Certain(SchemeOfLaw):
    """Drafts that follow from the row."""

    uniforms = Uniforms.NONE

    def probability(self: Scheme, draft_probs: Row, drafts: Drafts) -> Rate:
        """Return one for the drafts that `sample` returns and zero for all others."""
        k = drafts.shape[-1]
        counts = torch.full(draft_probs.shape[:-1], k, device=draft_probs.device)
        sampled = self.sample(draft_probs, counts, draft_probs.new_zeros(*draft_probs.shape[:-1], k), k)
        return (sampled == drafts).all(dim=-1).to(draft_probs.dtype)


@dataclass(frozen=True)
class TopK(Certain):
    """The k likeliest tokens: a function of the row, no randomness."""

    name = "top-k"
    set_law = SetLaw(most_certain=MOST_CERTAIN)

    def sample(self, draft_probs: Row, counts: Counts, uniforms: RandomNumbers, k: int) -> Drafts:
        """Take the largest entries, earlier atoms first among equals; the uniforms are not used."""
        values, order = draft_probs.sort(dim=-1, descending=True, stable=True)
        return cut(padded(order[..., :k].where(values[..., :k] > 0, -1), k), counts)


@dataclass(frozen=True)
class Given(Certain):
    """Tokens from outside, such as an n-gram's continuation: the shortlist itself, in its order."""

    name = "given"
    set_law = SetLaw(most_certain=MOST_CERTAIN, alike=True)

    def sample(self, draft_probs: Row, counts: Counts, uniforms: RandomNumbers, k: int) -> Drafts:
        """Return the first atoms of the shortlist that have any mass."""
        return TopK().sample((draft_probs > 0).to(draft_probs.dtype), counts, uniforms, k)


@dataclass(frozen=True)
class TopThenSample(SchemeOfLaw):
    """The k - 1 likeliest tokens, then one drawn from the others (Hu et al., arXiv 2502.18779, section 4)."""

    name = "top then sample"
    uniforms = Uniforms.OF_DRAFTS
    set_law = SetLaw(drawn=1, most_certain=MOST_CERTAIN)

    def sample(self, draft_probs: Row, counts: Counts, uniforms: RandomNumbers, k: int) -> Drafts:
        """Take the top counts - 1 atoms of each row and draw the last from the rest."""
        if k == 1:  # nothing is taken for certain
            return cut(_drawn(draft_probs, uniforms), counts)
        fixed = (counts - 1).clamp_min(0)
        drafts = TopK().sample(draft_probs, fixed, uniforms, k)
        last = _drawn(without(draft_probs, drafts), uniforms)
        place = torch.arange(k, device=counts.device) == fixed.unsqueeze(-1)
        return cut(torch.where(place, last, drafts), counts)

    def probability(self, draft_probs: Row, drafts: Drafts) -> Rate:
        """Return q(x_k) / (1 - q(top)) where the first k - 1 drafts are the top ones, else zero."""
        return TopThenIID(drafts.shape[-1] - 1).probability(draft_probs, drafts)


@dataclass(frozen=True)
class TopThenIID(SchemeOfLaw):
    """The `top` likeliest tokens, then independent draws from the others.

    Law: with q the draft row, T its `top` likeliest tokens (earlier atoms first among equals) and q' the row without
    T, renormalised, the drafts are T in descending order and k - top independent draws from q'. `top` = 0 is `IID`,
    `top` = k - 1 is `TopThenSample`, `top` >= k is `TopK`. Where T has all the mass, T's tokens are all the drafts.
    Containment: Pr[all drafts in H] = 1[T in H] q'(H)^(k - top).
    Source: Hu et al., arXiv 2502.18779, section 4, whose greedy drafting has k - 1 fixed tokens.

    Args:
        top: the number of tokens taken for certain.

    Raises:
        InvalidParameter: `top` is no integer from 0 to `MOST_CERTAIN`.
    """

    top: int
    uniforms = Uniforms.OF_DRAFTS

    def __post_init__(self) -> None:
        if not is_whole(self.top) or self.top < 0:
            raise InvalidParameter(f"top must be an integer >= 0, but is {self.top!r}.")
        if self.top > MOST_CERTAIN:
            raise InvalidParameter(
                f"top must be at most {MOST_CERTAIN}, but is {self.top}; TopK takes all for certain."
            )
        object.__setattr__(self, "set_law", SetLaw(most_certain=self.top))

    @property
    def name(self) -> str:
        """The scheme's name in tables."""
        return f"top {self.top} then iid"

    def sample(self, draft_probs: Row, counts: Counts, uniforms: RandomNumbers, k: int) -> Drafts:
        """Take the top atoms, then invert the distribution function of the rest, one uniform per draft."""
        likeliest = TopK().sample(draft_probs, torch.full_like(counts, min(self.top, k)), uniforms, k)
        drawn = IID().sample(without(draft_probs, likeliest), counts, uniforms, k)
        fixed = torch.arange(k, device=counts.device) < self.top
        return cut(torch.where(fixed, likeliest, drawn), counts)

    def probability(self, draft_probs: Row, drafts: Drafts) -> Rate:
        """Return the product of q'(x_i) after the top ones; zero where the first drafts are not the top ones."""
        head, drawn = drafts[..., : self.top], drafts[..., self.top :]
        chance = TopK().probability(draft_probs, head)
        rest = without(draft_probs, head)
        return chance * IID().probability(normalised(rest, rest), drawn)


def _drawn(weights: Row, uniforms: RandomNumbers) -> Int[Tensor, "*b 1"]:
    """Return one atom per row, drawn with the first uniform; -1 in a row without mass."""
    return sample(weights, uniforms[..., 0]).unsqueeze(-1).where(weights.amax(dim=-1, keepdim=True) > 0, -1)


@dataclass(frozen=True)
class SpecHub(SchemeOfLaw):
    """One draw from the draft row; the second draft is the likeliest token, or replaces it where it was drawn.

    Law: with q the draft row and a its likeliest token (the first among equals), the first draft is x ~ q. If x is
    not a, the second is a; if it is, the second is drawn from q without a, renormalised. So
    Pr[(x, a)] = q(x), Pr[(a, x)] = q(a) q(x) / (1 - q(a)), and the unordered pair {a, x} has probability
    q(x) / (1 - q(a)): the set law is that of `TopThenSample` with two drafts. One draft is a draw from q.
    Containment: two drafts lie in H with probability 1[a in H] q(H - a) / (1 - q(a)).
    Source: Sun et al., arXiv 2411.05289.

    Raises:
        InvalidParameter: more than two drafts are asked for.
    """

    name = "spechub"
    most_drafts = MOST
    set_law = SetLaw(drawn=1, most_certain=MOST_CERTAIN)

    def sample(self, draft_probs: Row, counts: Counts, uniforms: RandomNumbers, k: int) -> Drafts:
        """Draw two without replacement and put the hub in the second's place unless it came first."""
        _at_most_two(k)
        drafts = WithoutReplacement().sample(draft_probs, counts, uniforms, k)
        hub = hub_of(draft_probs)
        first = drafts[..., :1]
        return cut(torch.cat([first, drafts[..., 1:].where(first == hub, hub)], dim=-1), counts)

    def probability(self, draft_probs: Row, drafts: Drafts) -> Rate:
        """Return q(x) for (x, a) and q(a) q(x) / (1 - q(a)) for (a, x); zero for pairs without the hub a."""
        _at_most_two(drafts.shape[-1])
        chance = WithoutReplacement().probability(draft_probs, drafts[..., :1])
        if drafts.shape[-1] < MOST:
            return chance
        hub = hub_of(draft_probs)
        others = without(draft_probs, hub)
        after_hub = WithoutReplacement().probability(normalised(others, others), drafts[..., 1:])
        onto_hub = (drafts[..., 1] == hub.squeeze(-1)).to(chance.dtype)
        return chance * torch.where(drafts[..., 0] == hub.squeeze(-1), after_hub, onto_hub)


def require_pairs(scheme: Scheme, children: int) -> None:
    """Check that a tree whose nodes have up to `children` children can be drawn by a scheme.

    Raises:
        UnpairedScheme: the scheme is SpecHub and a node has more than two.
    """
    if isinstance(scheme, SpecHub) and children > MOST:
        raise UnpairedScheme(
            f"SpecHub draws at most {MOST} drafts per node, but the tree has a node with {children}; use a tree with "
            f'at most {MOST} children per node, such as "2,2", or TopThenSample for more.'
        )


def hub_of(draft_probs: Row) -> Int[Tensor, "*b 1"]:
    """Return the hub, each row's likeliest token, the first among equals; -1 in a row without mass."""
    one = torch.ones(draft_probs.shape[:-1], dtype=torch.int64, device=draft_probs.device)
    return TopK().sample(draft_probs, one, draft_probs, 1)


def _at_most_two(k: int) -> None:
    if k > MOST:
        raise InvalidParameter(f"SpecHub draws at most {MOST} drafts per node, not {k}; use TopThenSample for more.")
