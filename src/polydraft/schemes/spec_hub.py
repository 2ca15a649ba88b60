"""Pairs of drafts with the likeliest token as their hub."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.errors import InvalidParameter, UnpairedScheme
from polydraft.probs import normalised, without
from polydraft.schemes.scheme import MOST_CERTAIN, Scheme, SchemeOfLaw, SetLaw, cut
from polydraft.schemes.top import TopK
from polydraft.schemes.without_replacement import WithoutReplacement

MOST = 2


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

    def sample(
        self, draft_probs: Float[Tensor, "*b K"], counts: Int[Tensor, "*b"], uniforms: Float[Tensor, "*b u"], k: int
    ) -> Int[Tensor, "*b k"]:
        """Draw two without replacement and put the hub in the second's place unless it came first."""
        _at_most_two(k)
        drafts = WithoutReplacement().sample(draft_probs, counts, uniforms, k)
        hub = hub_of(draft_probs)
        first = drafts[..., :1]
        return cut(torch.cat([first, drafts[..., 1:].where(first == hub, hub)], dim=-1), counts)

    def probability(self, draft_probs: Float[Tensor, "*b K"], drafts: Int[Tensor, "*b k"]) -> Float[Tensor, "*b"]:
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


def hub_of(draft_probs: Float[Tensor, "*b K"]) -> Int[Tensor, "*b 1"]:
    """Return the hub, each row's likeliest token, the first among equals; -1 in a row without mass."""
    one = torch.ones(draft_probs.shape[:-1], dtype=torch.int64, device=draft_probs.device)
    return TopK().sample(draft_probs, one, draft_probs, 1)


def _at_most_two(k: int) -> None:
    if k > MOST:
        raise InvalidParameter(f"SpecHub draws at most {MOST} drafts per node, not {k}; use TopThenSample for more.")
