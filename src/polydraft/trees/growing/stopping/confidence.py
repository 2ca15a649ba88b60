"""Confidence: how likely a drafted token is to be accepted, guessed from the row it was drawn from."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from polydraft.errors import InvalidParameter
from polydraft.trees.growing.bounds import require_finite
from polydraft.trees.growing.growth import Drawn


@runtime_checkable
class Confidence(Protocol):
    """A guess, between 0 and 1, at each drafted token's chance to be accepted."""

    def of(self, drawn: Drawn) -> Float[Tensor, "b c"]:
        """Return the confidence in each node."""
        ...


@dataclass(frozen=True)
class TokenProbability:
    """The draft probability of the drawn token.

    Source: Draft & Verify, arXiv 2309.08168; `assistant_confidence_threshold` of Hugging Face transformers.
    """

    def of(self, drawn: Drawn) -> Float[Tensor, "b c"]:
        """Return the token's probability in the row it was drawn from."""
        return drawn.chance


@dataclass(frozen=True)
class PathProbability:
    """The product of the draft probabilities from the root down: the chance to get there at all, by the draft."""

    def of(self, drawn: Drawn) -> Float[Tensor, "b c"]:
        """Return the product."""
        return drawn.path


@dataclass(frozen=True)
class EntropyBound:
    """1 - sqrt(scale * entropy) of the row that the token was drawn from, in nats; a flat row counts as 0.

    Raises:
        InvalidParameter: a scale that is negative or not finite.

    Source: AdaEDL, arXiv 2410.18351, whose bound on the acceptance rate it is.
    """

    scale: float = 0.2

    def __post_init__(self) -> None:
        require_finite("scale", self.scale)
        if self.scale < 0:
            raise InvalidParameter(f"scale must be at least 0, but is {self.scale!r}.")

    def of(self, drawn: Drawn) -> Float[Tensor, "b c"]:
        """Return the bound."""
        return surely_accepted(drawn.entropy, self.scale)


def surely_accepted(entropy: Float[Tensor, "b n"], scale: float = EntropyBound.scale) -> Float[Tensor, "b n"]:
    """Return max(0, 1 - sqrt(scale * H)) of rows with entropy H in nats: AdaEDL's bound on their acceptance."""
    return (1 - (scale * entropy).sqrt()).clamp_min(0)
