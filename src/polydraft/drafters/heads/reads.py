"""What heads read of a target: the hidden states of some of its layers, and whether they are the target's own."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from polydraft.drafters.protocol import Session
from polydraft.errors import InvalidParameter, TargetMismatch
from polydraft.models import LanguageModel, Layer
from polydraft.reading import Features


def joined_states(features: Features, layers: Sequence[Layer]) -> Float[Tensor, "b w r"]:
    """Return the hidden states of several layers joined, in this order."""
    return torch.cat([features.states[layer] for layer in layers], dim=-1)


def check_target(session: Session, layers: Sequence[Layer], width: int) -> LanguageModel:
    """Return the target of a session, if a head that reads these layers can have been trained for it.

    Raises:
        TargetMismatch: it has not these layers, or is not as wide.
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
    return target


def _size(target: LanguageModel) -> tuple[int | None, int | None]:
    """Return a target's number of layers and hidden width, where it says them."""
    return getattr(target, "layers", None), getattr(target, "width", None)
