"""Schemes: the laws by which k drafts are drawn at one node of the token tree.

A draft is named by its *atom*, its place in the node's shortlist. `-1` is an absent draft. A verification rule
is exact for the drafts of one scheme only.
"""

from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import Protocol, cast, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.errors import InvalidParameter, UnpairedScheme, is_whole

Row = Float[Tensor, "*b K"]
"""A number for each token of the shortlist of each node."""
Drafts = Int[Tensor, "*b k"]
"""The drafts of nodes: atoms in drafting order, -1 where they are absent."""
Counts = Int[Tensor, "*b"]
"""How many drafts each node has."""
RandomNumbers = Float[Tensor, "*b u"]
"""Uniform numbers for each node."""
Rate = Float[Tensor, "*b"]
"""A number for each node."""
MOST_DRAFTS = 4096
"""More drafts than a node of a tree can have."""


class Uniforms(Enum):
    """The random numbers by which the drafts of a node are drawn."""

    NONE = "none; the drafts follow from the row"
    OF_DRAFTS = "one for each draft"
    OF_TOKENS = "one for each token of the shortlist"
    SHARED = "one for each token, tied to its id and its place in the text, as the target's draw may be"


@runtime_checkable
class Scheme(Protocol):
    """How drafts are drawn at one node, given the draft row over the shortlist's K atoms.

    Rows are "*b K", or "*b J K" where a node has several (`several_rows`). A scheme that knows the law of the set of
    its drafts derives from `SchemeOfLaw` and says that law and its `uniforms`; the other properties follow.
    """

    @property
    def name(self) -> str:
        """The scheme's name in tables."""
        ...

    @property
    def deterministic(self) -> bool:
        """Whether the drafts are a function of the draft row."""
        ...

    @property
    def independent(self) -> bool:
        """Whether a node's drafts are drawn anew, whatever was drawn at other nodes and in other steps.

        Rules that reckon with the law of the drafts below several nodes need it.
        """
        ...

    @property
    def lone_draft_is_drawn(self) -> bool:
        """Whether a draft that is its node's only one is an independent draw from the row, and not certain."""
        ...

    @property
    def several_rows(self) -> bool:
        """Whether a node has several draft rows, from which its drafts are drawn in turn."""
        ...

    @property
    def uniforms(self) -> Uniforms:
        """The random numbers by which the drafts are drawn."""
        ...

    def sample(self, draft_probs: Float[Tensor, "*rows K"], counts: Counts, uniforms: RandomNumbers, k: int) -> Drafts:
        """Draw `counts` drafts per row, at most `k`, in drafting order, padded with -1.

        `uniforms` holds u >= max(k, K) numbers per row. Fewer drafts than asked for come back where the row's
        support is smaller.
        """
        ...

    def probability(self, draft_probs: Float[Tensor, "*rows K"], drafts: Drafts) -> Rate:
        """Return the probability of drawing exactly these drafts in this order."""
        ...


def most_drafts_of(scheme: Scheme) -> int:
    """Return the most drafts at a node that a scheme can draw: its `most_drafts`, or 4095 where it names no number."""
    return getattr(scheme, "most_drafts", MOST_DRAFTS - 1)


def enumerate_drafts(
    scheme: Scheme, draft_probs: Float[Tensor, "*J K"], k: int
) -> tuple[Int[Tensor, "m k"], Float[Tensor, " m"]]:
    """List every ordered outcome of k drafts with positive probability, and its probability; for small K only.

    Raises:
        InvalidParameter: k is no integer from 1 to 4095, or K ** k is too large to list.
    """
    require_draft_count("k", k)
    size = draft_probs.shape[-1]
    if size**k > 200_000:
        raise InvalidParameter(f"Listing {k} drafts of {size} tokens means {size**k} cases; at most 200000 are listed.")
    outcomes = (row + (-1,) * (k - there) for there in range(k, -1, -1) for row in product(range(size), repeat=there))
    drafts = torch.tensor([*outcomes], dtype=torch.int64).reshape(-1, k)
    probability = scheme.probability(draft_probs.expand(len(drafts), *draft_probs.shape), drafts)
    return drafts[probability > 0], probability[probability > 0]


def require_draft_count(name: str, value: object) -> None:
    """Check that a number of drafts is one.

    Raises:
        InvalidParameter: it is no integer from 1 to 4095, the most children that a node of a tree can have.
    """
    if not is_whole(value) or not 1 <= cast(int, value) < MOST_DRAFTS:
        raise InvalidParameter(f"{name} must be an integer >= 1 and below {MOST_DRAFTS}, but is {value!r}.")


def check_scheme(scheme: object, who: str) -> None:
    """Check that a value is a scheme, and not the class of one.

    Raises:
        InvalidParameter: it is none.
    """
    if isinstance(scheme, type) or not isinstance(scheme, Scheme):
        raise InvalidParameter(f"{who} needs a scheme such as IID(), with all that Scheme names, but got {scheme!r}.")


def require_independent(scheme: Scheme, who: str) -> None:
    """Check that each node's drafts are drawn anew, so that their law is what `probability` says at every node.

    Raises:
        UnpairedScheme: they are not.
    """
    check_scheme(scheme, who)
    if not scheme.independent:
        raise UnpairedScheme(
            f"{who} needs drafts that are drawn anew at every node, but {scheme.name} drafts share their noise with "
            "other nodes and steps; use SharedNoise, or TopDown with NaiveMatch."
        )


def require_drawn(scheme: Scheme, who: str) -> None:
    """Check that a draft that is its node's only one is an independent draw from the draft row.

    Raises:
        UnpairedScheme: it is not.
    """
    check_scheme(scheme, who)
    if not scheme.lone_draft_is_drawn:
        raise UnpairedScheme(
            f"{who} needs single drafts that are independent draws from their rows, such as iid ones, not "
            f"{scheme.name}; use TopDown with NaiveMatch."
        )


def require_scheme(scheme: Scheme, allowed: tuple[type[object], ...], who: str) -> None:
    """Check that a scheme is one that `who` can work with.

    Raises:
        UnpairedScheme: it is not.
    """
    check_scheme(scheme, who)
    if not isinstance(scheme, allowed):
        names = " or ".join(_name(one) for one in allowed)
        raise UnpairedScheme(f"{who} works with drafts that are {names}, not {scheme.name}.")


def _name(kind: type[object]) -> str:
    """Return a scheme class's name, or the class's own where the name depends on the scheme's parameters."""
    name = getattr(kind, "name", None)
    return name if isinstance(name, str) else kind.__name__


def cut(drafts: Drafts, counts: Counts) -> Drafts:
    """Keep the first `counts` drafts of each row."""
    rank = torch.arange(drafts.shape[-1], device=drafts.device)
    return drafts.where(rank < counts.unsqueeze(-1), -1)


def padded(drafts: Int[Tensor, "*b j"], k: int) -> Drafts:
    """Pad drafts to k places with -1."""
    missing = k - drafts.shape[-1]
    return torch.nn.functional.pad(drafts, (0, missing), value=-1) if missing else drafts


def clocks(rates: Row, uniforms: RandomNumbers) -> Row:
    """Return the logarithms of independent exponential clocks with the given rates; infinite where a rate is zero."""
    exponential = uniforms[..., : rates.shape[-1]].double().neg().log1p_().neg_()
    times = exponential.log_().sub_(rates.double().log())  # logarithms: a tiny rate must not overflow
    return times.where(rates > 0, torch.inf)


def support_size(probs: Row) -> Counts:
    """Return the number of positive entries of each row."""
    return (probs > 0).sum(dim=-1)


def largest_count(counts: Counts) -> int:
    """Return the largest of some numbers of drafts; zero if there are none."""
    return int(counts.max()) if counts.numel() else 0


def log_symmetric_sums(logs: Float[Tensor, "*b A"], sizes: int) -> Float[Tensor, "*b s C"]:
    """Return log e_s of the first i weights for s = 0..sizes - 1 and i = 0..A, given the weights' logarithms.

    The elementary symmetric polynomial e_s is the sum over sets of s weights of their product. In logarithms, because
    products of small probabilities would vanish.
    """
    chains = [torch.nn.functional.pad(torch.zeros_like(logs), (0, 1))]
    for _ in range(1, sizes):
        sums = (logs + chains[-1][..., :-1]).logcumsumexp(dim=-1)
        chains.append(torch.nn.functional.pad(sums, (1, 0), value=-torch.inf))
    return torch.stack(chains, dim=-2)


MOST_CERTAIN = 1 << 20
"""The most tokens that may be taken for certain; no vocabulary is larger."""


class Draws(Enum):
    """How those drafts are drawn that are not certain."""

    ANEW = "independently, from one row"
    IN_TURN = "independently, from the rows of the node in turn"
    SUCCESSIVE = "one after the other, the row renormalised without the tokens already drawn"
    DISTINCT = "independently, given that they are distinct"


@dataclass(frozen=True)
class SetLaw:
    """The law of the set of k drafts: the likeliest tokens of the row for certain, and others that are drawn.

    Args:
        draws: how the others are drawn; tokens are certain beside `Draws.ANEW` only.
        drawn: how many drafts are drawn before any is certain.
        most_certain: how many may be certain at most.
        alike: whether all tokens with any mass count as equally likely, so that the first ones are certain.
    """

    draws: Draws = Draws.ANEW
    drawn: int = 0
    most_certain: int = 0
    alike: bool = False

    def certain(self, drafts: int) -> int:
        """Return how many of so many drafts are certain."""
        return min(max(drafts - self.drawn, 0), self.most_certain)


class SchemeOfLaw:
    """What follows from the numbers by which a scheme draws and the law of the set of its drafts; derive from this."""

    uniforms: Uniforms = Uniforms.OF_TOKENS
    set_law: SetLaw = SetLaw()

    @property
    def deterministic(self) -> bool:
        """Whether the drafts are a function of the draft row."""
        return self.uniforms is Uniforms.NONE

    @property
    def independent(self) -> bool:
        """Whether a node's drafts are drawn anew, whatever was drawn at other nodes and in other steps."""
        return self.uniforms is not Uniforms.SHARED

    @property
    def lone_draft_is_drawn(self) -> bool:
        """Whether a draft that is its node's only one is an independent draw from the row, and not certain."""
        return self.independent and not self.set_law.certain(1)

    @property
    def several_rows(self) -> bool:
        """Whether a node has several draft rows."""
        return self.set_law.draws is Draws.IN_TURN


def set_law_of(scheme: Scheme) -> SetLaw:
    """Return the law of the set of a scheme's drafts.

    Raises:
        UnpairedScheme: the scheme does not say it.
    """
    law = getattr(scheme, "set_law", None)
    if isinstance(law, SetLaw):
        return law
    check_scheme(scheme, "Containment")
    raise UnpairedScheme(f"The containment of drafts that are {scheme.name} is not known; use a scheme with one.")
