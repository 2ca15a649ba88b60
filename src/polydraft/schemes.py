"""Schemes: the laws by which k drafts are drawn at one node of the token tree.

A draft is named by its *atom*, its place in the node's shortlist. `-1` is an absent draft. A verification rule
is exact for the drafts of one scheme only; section 4 of the theory pages gives counter-examples.
"""

from dataclasses import dataclass
from itertools import permutations, product
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.errors import InvalidParameter, UnpairedScheme
from polydraft.probs import without


@runtime_checkable
class Scheme(Protocol):
    """How drafts are drawn at one node, given the draft row over the shortlist's K atoms."""

    @property
    def name(self) -> str:
        """The scheme's name in tables."""
        ...

    @property
    def deterministic(self) -> bool:
        """Whether the drafts are a function of the draft row."""
        ...

    def sample(
        self, draft_probs: Float[Tensor, "*b K"], counts: Int[Tensor, "*b"], uniforms: Float[Tensor, "*b u"], k: int
    ) -> Int[Tensor, "*b k"]:
        """Draw `counts` drafts per row, at most `k`, in drafting order, padded with -1.

        `uniforms` holds u >= max(k, K) numbers per row. Fewer drafts than asked for come back where the row's
        support is smaller.
        """
        ...

    def probability(self, draft_probs: Float[Tensor, "*b K"], drafts: Int[Tensor, "*b k"]) -> Float[Tensor, "*b"]:
        """Return the probability of drawing exactly these drafts in this order."""
        ...


def enumerate_drafts(
    scheme: Scheme, draft_probs: Float[Tensor, " K"], k: int
) -> tuple[Int[Tensor, "m k"], Float[Tensor, " m"]]:
    """List every ordered outcome of k drafts with positive probability, and its probability; for small K only.

    Raises:
        InvalidParameter: K ** k is too large to list.
    """
    size = draft_probs.shape[-1]
    if size**k > 200_000:
        raise InvalidParameter(f"Listing {k} drafts of {size} tokens means {size**k} cases; at most 200000 are listed.")
    k_present = min(k, int((draft_probs > 0).sum()))
    full = product(range(size), repeat=k)
    short = (row + (-1,) * (k - k_present) for row in permutations(range(size), k_present)) if k_present < k else ()
    drafts = torch.tensor([*full, *short], dtype=torch.int64).reshape(-1, k)
    probability = scheme.probability(draft_probs.expand(len(drafts), size), drafts)
    return drafts[probability > 0], probability[probability > 0]


@dataclass(frozen=True)
class IID:
    """k independent draws from the draft row; the same token may come twice."""

    name = "iid"
    deterministic = False

    def sample(
        self, draft_probs: Float[Tensor, "*b K"], counts: Int[Tensor, "*b"], uniforms: Float[Tensor, "*b u"], k: int
    ) -> Int[Tensor, "*b k"]:
        """Draw by inverting the distribution function, one uniform per draft."""
        cumulative = draft_probs.double().cumsum(dim=-1)
        points = uniforms[..., :k].double() * cumulative[..., -1:]
        drafts = torch.searchsorted(cumulative, points, right=True)
        last_possible = _last_positive(draft_probs).unsqueeze(-1)
        return _cut(torch.minimum(drafts, last_possible), counts)

    def probability(self, draft_probs: Float[Tensor, "*b K"], drafts: Int[Tensor, "*b k"]) -> Float[Tensor, "*b"]:
        """Return the product of the drafts' probabilities."""
        each = draft_probs.gather(-1, drafts.clamp_min(0))
        return each.where(drafts >= 0, torch.zeros_like(each)).prod(dim=-1)


@dataclass(frozen=True)
class WithoutReplacement:
    """k successive draws, the row renormalised without the tokens already drawn.

    Equal in law to the k smallest of independent exponential clocks with rates `draft_probs` (Gumbel-top-k,
    arXiv 1903.06059), which is how it is sampled.
    """

    name = "without replacement"
    deterministic = False

    def sample(
        self, draft_probs: Float[Tensor, "*b K"], counts: Int[Tensor, "*b"], uniforms: Float[Tensor, "*b u"], k: int
    ) -> Int[Tensor, "*b k"]:
        """Run one exponential clock per atom and take the first k to ring."""
        clocks = _clocks(draft_probs, uniforms)
        order = clocks.topk(min(k, clocks.shape[-1]), dim=-1, largest=False, sorted=True)
        return _cut(_pad(order.indices.where(order.values < torch.inf, -torch.ones_like(order.indices)), k), counts)

    def probability(self, draft_probs: Float[Tensor, "*b K"], drafts: Int[Tensor, "*b k"]) -> Float[Tensor, "*b"]:
        """Return the product of q(x_i) / (1 - q(x_1) - ... - q(x_{i-1})); zero where a token repeats."""
        result = torch.ones_like(draft_probs[..., 0])
        left = draft_probs
        for i in range(drafts.shape[-1]):
            draft = drafts[..., i : i + 1]
            drawn = left.gather(-1, draft.clamp_min(0)).squeeze(-1)
            total = left.sum(dim=-1)
            step = drawn / total.where(total > 0, torch.ones_like(total))
            absent = (total <= 0).to(step.dtype)
            result = result * torch.where(draft.squeeze(-1) >= 0, step, absent)
            left = left.scatter(-1, draft.clamp_min(0), left.gather(-1, draft.clamp_min(0)) * (draft < 0))
        return result


@dataclass(frozen=True)
class TopK:
    """The k likeliest tokens: a function of the row, no randomness."""

    name = "top-k"
    deterministic = True

    def sample(
        self, draft_probs: Float[Tensor, "*b K"], counts: Int[Tensor, "*b"], uniforms: Float[Tensor, "*b u"], k: int
    ) -> Int[Tensor, "*b k"]:
        """Take the largest entries, earlier atoms first among equals; the uniforms are not used."""
        values, order = draft_probs.sort(dim=-1, descending=True, stable=True)
        return _cut(_pad(order.where(values > 0, -torch.ones_like(order))[..., :k], k), counts)

    def probability(self, draft_probs: Float[Tensor, "*b K"], drafts: Int[Tensor, "*b k"]) -> Float[Tensor, "*b"]:
        """Return one for the drafts that `sample` returns and zero for all others."""
        return _indicator(self, draft_probs, drafts)


@dataclass(frozen=True)
class TopThenSample:
    """The k - 1 likeliest tokens, then one drawn from the others (Hu et al., arXiv 2502.18779, section 4)."""

    name = "top then sample"
    deterministic = False

    def sample(
        self, draft_probs: Float[Tensor, "*b K"], counts: Int[Tensor, "*b"], uniforms: Float[Tensor, "*b u"], k: int
    ) -> Int[Tensor, "*b k"]:
        """Take the top counts - 1 atoms of each row and race the rest for the last place."""
        fixed = (counts - 1).clamp_min(0)
        drafts = TopK().sample(draft_probs, fixed, uniforms, k)
        rest = without(draft_probs, drafts)
        clock, last = _clocks(rest, uniforms).min(dim=-1, keepdim=True)
        last = last.where(clock < torch.inf, -torch.ones_like(last))
        place = torch.arange(k, device=counts.device) == fixed.unsqueeze(-1)
        return _cut(torch.where(place, last, drafts), counts)

    def probability(self, draft_probs: Float[Tensor, "*b K"], drafts: Int[Tensor, "*b k"]) -> Float[Tensor, "*b"]:
        """Return q(x_k) / (1 - q(top)) where the first k - 1 drafts are the top ones, else zero."""
        head, last = drafts[..., :-1], drafts[..., -1:]
        top = _indicator(TopK(), draft_probs, head) if head.shape[-1] else torch.ones_like(draft_probs[..., 0])
        rest = without(draft_probs, head)
        total = rest.sum(dim=-1)
        drawn = rest.gather(-1, last.clamp_min(0)).squeeze(-1) / total.where(total > 0, torch.ones_like(total))
        absent = (total <= 0).to(drawn.dtype)
        return top * torch.where(last.squeeze(-1) >= 0, drawn, absent)


@dataclass(frozen=True)
class Given:
    """Tokens from outside, such as an n-gram's continuation: the shortlist itself, in its order."""

    name = "given"
    deterministic = True

    def sample(
        self, draft_probs: Float[Tensor, "*b K"], counts: Int[Tensor, "*b"], uniforms: Float[Tensor, "*b u"], k: int
    ) -> Int[Tensor, "*b k"]:
        """Return the first atoms of the shortlist that have any mass."""
        return TopK().sample((draft_probs > 0).to(draft_probs.dtype), counts, uniforms, k)

    def probability(self, draft_probs: Float[Tensor, "*b K"], drafts: Int[Tensor, "*b k"]) -> Float[Tensor, "*b"]:
        """Return one for the shortlist's own order and zero for all other drafts."""
        return _indicator(self, draft_probs, drafts)


def require_scheme(scheme: Scheme, allowed: tuple[type[object], ...], who: str) -> None:
    """Check that a scheme is one that `who` can work with.

    Raises:
        UnpairedScheme: it is not.
    """
    if not isinstance(scheme, allowed):
        names = " or ".join(str(getattr(one, "name", one.__name__)) for one in allowed)
        raise UnpairedScheme(f"{who} works with drafts that are {names}, not {scheme.name}.")


def _cut(drafts: Int[Tensor, "*b k"], counts: Int[Tensor, "*b"]) -> Int[Tensor, "*b k"]:
    rank = torch.arange(drafts.shape[-1], device=drafts.device)
    return drafts.where(rank < counts.unsqueeze(-1), -torch.ones_like(drafts))


def _pad(drafts: Int[Tensor, "*b j"], k: int) -> Int[Tensor, "*b k"]:
    return torch.nn.functional.pad(drafts, (0, k - drafts.shape[-1]), value=-1)


def _clocks(rates: Float[Tensor, "*b K"], uniforms: Float[Tensor, "*b u"]) -> Float[Tensor, "*b K"]:
    exponential = -torch.log1p(-uniforms[..., : rates.shape[-1]].double())
    clocks = exponential.log() - rates.double().log()  # logarithms: a tiny rate must not overflow
    return clocks.where(rates > 0, torch.full_like(clocks, torch.inf))


def _last_positive(probs: Float[Tensor, "*b K"]) -> Int[Tensor, "*b"]:
    places = torch.arange(probs.shape[-1], device=probs.device)
    return torch.where(probs > 0, places, torch.zeros_like(places)).amax(dim=-1)


def _indicator(scheme: Scheme, draft_probs: Float[Tensor, "*b K"], drafts: Int[Tensor, "*b k"]) -> Float[Tensor, "*b"]:
    k = drafts.shape[-1]
    counts = torch.full(draft_probs.shape[:-1], k, device=draft_probs.device)
    own = scheme.sample(draft_probs, counts, draft_probs.new_zeros(*draft_probs.shape[:-1], k), k)
    return (own == drafts).all(dim=-1).to(draft_probs.dtype)
