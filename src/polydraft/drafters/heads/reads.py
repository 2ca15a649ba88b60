"""What heads read of a target, the hidden states of some of its layers, and whether it is the one they are for."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from polydraft.drafters.protocol import Session
from polydraft.errors import InvalidParameter, TargetMismatch
from polydraft.models import LanguageModel, Layer
from polydraft.reading import Features

MOST_PADDING, SHARE = 1024, 64
"""A target may have so many tokens more or fewer than a head's folder says, and no more than one in so many."""


@dataclass(frozen=True)
class MadeFor:
    """What a head's folder says of the target that it was trained for.

    Args:
        vocab_size: how many tokens it has; None where nothing is said.
        layers: how many layers; likewise.
    """

    vocab_size: int | None = None
    layers: int | None = None

    def check(self, target: LanguageModel) -> None:
        """Check that a target can be the one that is meant.

        Numbers of layers must be equal. Vocabularies need not: the same model's tables are padded to a multiple of 64
        or more by one tool and not by another (Qwen2.5 has 151936 or 152064 rows for 151665 tokens), and tokens are
        added to a target after a head was trained. Heads never draft such tokens, and what they draft is still the
        target's own. That a head's tables know all tokens that it may have to read is checked by their sizes.

        Raises:
            TargetMismatch: it has another number of layers, or a vocabulary that no padding explains.
        """
        found = target.vocab_size
        if self.vocab_size is not None and abs(self.vocab_size - found) > min(MOST_PADDING, self.vocab_size // SHARE):
            raise TargetMismatch(
                f"The head was trained for a target of {self.vocab_size} tokens and this one has {found}: it is "
                "another target."
            )
        depth, _ = _size(target)
        if None not in (self.layers, depth) and self.layers != depth:
            raise TargetMismatch(
                f"The head was trained for a target of {self.layers} layers and this one has {depth}: it is another "
                "target."
            )


def joined_states(features: Features, layers: Sequence[Layer]) -> Float[Tensor, "b w r"]:
    """Return the hidden states of several layers joined, in this order."""
    return torch.cat([features.states[layer] for layer in layers], dim=-1)


def check_target(session: Session, layers: Sequence[Layer], width: int, made_for: MadeFor) -> LanguageModel:
    """Return the target of a session, if a head that reads these layers can have been trained for it.

    Args:
        session: the session.
        layers: what the head reads.
        width: how wide these states are.
        made_for: what its folder says of its target.

    Raises:
        TargetMismatch: it has not these layers, is not as wide, or is another one by what the folder says.
    """
    if session.target is None:
        raise InvalidParameter("A draft head reads its target's hidden states, and there is no target.")
    target = session.target.model
    depth, found = _size(target)
    beyond = [layer for layer in layers if layer != "final" and layer > depth] if depth is not None else []
    if beyond:
        raise TargetMismatch(
            f"The head reads the output of {beyond[0]} layers and the target has {depth}: it was trained for another "
            "target."
        )
    if found is not None and found != width:
        raise TargetMismatch(
            f"The head reads states {width} wide and the target's are {found}: it was trained for another target."
        )
    made_for.check(target)
    return target


def _size(target: LanguageModel) -> tuple[int | None, int | None]:
    """Return a target's number of layers and hidden width, where it says them."""
    return getattr(target, "layers", None), getattr(target, "width", None)
